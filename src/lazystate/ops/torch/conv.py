"""The short causal convolution before the recurrence, its inputs in a ring (Eq. 15)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lazystate.ops.pool import Pool
from lazystate.ops.torch.rows import Rows


def convolve(
    pool: Pool, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """Depthwise causal convolution of T new inputs, which join the ring uncommitted.

    Args:
        x: [A, T, C]. weight: [C, width]. bias: [C] or None. silu: apply SiLU to the result.

    Returns:
        [A, T, C], dtype of x. Products and sum are in compute dtype and do not depend on T.
    """
    assert pool.conv is not None
    past = pool.spec.conv_width - 1
    positions, new = rows.conv_positions(past, pool.conv.shape[1])
    ring = pool.conv.flatten(0, 1)
    ring.index_copy_(0, new, x.flatten(0, 1))
    inputs = ring.index_select(0, positions.flatten()).view(*positions.shape, x.shape[2])
    windows = inputs.unfold(1, past + 1, 1).to(pool.spec.compute)
    out = (windows * weight.to(windows.dtype)).sum(-1)
    out = out if bias is None else out + bias
    return (F.silu(out) if silu else out).to(x.dtype)


def history(pool: Pool, rows: Rows) -> Tensor:
    """The last width - 1 committed inputs, oldest first: [A, C, width - 1]."""
    assert pool.conv is not None
    past = pool.spec.conv_width - 1
    positions = rows.conv_positions(past, pool.conv.shape[1])[0][:, :past]
    inputs = pool.conv.flatten(0, 1).index_select(0, positions.flatten())
    return inputs.view(*positions.shape, pool.spec.conv_channels).transpose(1, 2)


def remember(pool: Pool, rows: Rows, inputs: Tensor | None) -> None:
    """Make [A, C, width - 1] the last committed inputs; zeros if None."""
    assert pool.conv is not None
    past = pool.spec.conv_width - 1
    positions = rows.conv_positions(past, pool.conv.shape[1])[0][:, :past].flatten()
    ring = pool.conv.flatten(0, 1)
    if inputs is None:
        ring.index_fill_(0, positions, 0)
    else:
        ring.index_copy_(0, positions, inputs.transpose(1, 2).flatten(0, 1))
