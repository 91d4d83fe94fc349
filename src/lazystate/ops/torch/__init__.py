"""Plain PyTorch, any device: readable, the oracle of faster backends and the CPU path.

It decides on the host which rows fold; on a GPU that costs one synchronisation a model step.
"""

from __future__ import annotations

from torch import Tensor

from lazystate.gates import Prologue
from lazystate.ops.pool import Pool
from lazystate.ops.torch import conv, fold
from lazystate.ops.torch import step as output
from lazystate.ops.torch.rows import Rows, begin, census, commit, gather_rows, scatter_rows

__all__ = ["begin", "census", "commit", "convolve", "settle", "step"]


def step(
    pool: Pool,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    prologue: Prologue | None = None,
) -> Tensor:
    """See `Backend.step`."""
    if prologue is not None:
        q, k, v, log_decay, beta, _ = prologue.prepare(q, k, v, log_decay, beta)
    q, k, v, log_decay = (gather_rows(rows, x) for x in (q, k, v, log_decay))
    beta = None if beta is None else gather_rows(rows, beta)
    out = output.step(pool, rows, q, k, v, log_decay, beta)
    settle(pool, rows)
    if skip is not None:
        skip = skip.to(out.dtype)
        out = out + (skip if skip.dim() == 2 else skip.unsqueeze(1)) * v
    return scatter_rows(rows, out.to(pool.spec.activation))


def settle(pool: Pool, rows: Rows) -> None:
    """See `Backend.settle`."""
    if rows.folding.numel():
        fold.fold(pool, rows)


def convolve(
    pool: Pool, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """See `Backend.convolve`."""
    out = conv.convolve(pool, rows, gather_rows(rows, x), weight, bias, silu)
    return scatter_rows(rows, out)
