"""The functional interface: what a cache does to a pool, one dispatch point for all backends."""

from __future__ import annotations

from torch import Tensor

from lazystate.ops.pool import Cursors, Fold, FullView, Pool, Ring, View, allocate
from lazystate.ops.rows import Rows, begin, commit, standing
from lazystate.ops.torch.conv import convolve, history, remember
from lazystate.ops.torch.fold import fold, replay
from lazystate.ops.torch.step import step as _step
from lazystate.ops.traffic import Traffic, active, count_traffic

__all__ = [
    "Cursors",
    "Fold",
    "FullView",
    "Pool",
    "Ring",
    "Rows",
    "Traffic",
    "View",
    "allocate",
    "begin",
    "commit",
    "convolve",
    "count_traffic",
    "history",
    "remember",
    "replay",
    "standing",
    "step",
]


def step(
    pool: Pool,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
) -> Tensor:
    """Outputs of T new tokens; their records are appended and folding rows are folded (Eq. 8-14).

    Args:
        rows: the step's active rows A.
        q, k: [A, T, H, K]. v: [A, T, HV, V]. log_decay: [A, T, HV] or [A, T, HV, K]. beta: [A, T,
            HV] or None.

    Returns:
        [A, T, HV, V], compute dtype; rows shorter than T hold unspecified finite values behind
        their end.
    """
    out = _step(pool, rows, q, k, v, log_decay, beta)
    if rows.folding.numel():
        fold(pool, rows)
    if (traffic := active()) is not None:
        _count(traffic, pool, rows)
    return out


def _count(traffic: Traffic, pool: Pool, rows: Rows) -> None:
    """Add the bytes of one layer's step: what the algorithm reads and writes, padding excluded."""
    spec, checkpoint = pool.spec, pool.checkpoint[0].nbytes
    used = ("k", "u", "log_decay") if spec.erase else ()
    folded = rows.filled[rows.folding]
    read_rows = rows.slots.numel() - int(rows.empty.sum())
    from_checkpoint = int((~rows.empty[rows.folding]).sum())
    traffic.read += (read_rows - from_checkpoint) * pool.view.bytes_read()
    traffic.read += from_checkpoint * checkpoint
    traffic.read += int(rows.filled.sum()) * pool.record_bytes(*used)
    if spec.erase and pool.ring.v is not None:
        traffic.read += int(folded.sum()) * pool.record_bytes("v", "beta")
    traffic.written += folded.numel() * checkpoint
    new = rows.slots.numel() * rows.tokens if rows.lengths is None else int(rows.lengths.sum())
    traffic.written += new * pool.record_bytes()
