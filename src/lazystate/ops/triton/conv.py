"""The short causal convolution and its input ring in one launch (Eq. 15)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazystate.ops.pool import Pool
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.device import load_f32


@triton.jit
def conv_kernel(
    meta,
    x,
    weight,
    bias,
    ring,
    out,
    x_row,
    x_token,
    x_channel,
    weight_channel,
    ring_slot,
    channels,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of channels of one row; products and sum in FP32, the same for every T."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    slot = tl.load(meta + row * 8)
    seen = tl.load(meta + row * 8 + 2, mask=slot >= 0, other=0)
    length = tl.load(meta + row * 8 + 3, mask=slot >= 0, other=0)
    at_x = x + row * x_row + c * x_channel
    at_ring = ring + slot * ring_slot + c
    for s in range(T):
        alive = inside & (s < length)
        y = tl.zeros([BLOCK], tl.float32)
        for w in tl.static_range(WIDTH):
            i = s - (WIDTH - 1) + w
            past = load_f32(at_ring + ((seen + i + INPUTS) % INPUTS) * channels, alive & (i < 0))
            fresh = load_f32(at_x + i * x_token, alive & (i >= 0))
            y += (past + fresh) * load_f32(weight + c * weight_channel + w, inside)
        if HAS_BIAS:
            y += load_f32(bias + c, inside)
        if SILU:
            y = y * tl.sigmoid(y)
        tl.store(out + (row * T + s) * channels + c, tl.where(alive, y, 0.0), mask=inside)
        new = load_f32(at_x + s * x_token, alive)
        tl.store(
            at_ring + ((seen + s) % INPUTS) * channels,
            new.to(ring.dtype.element_ty),
            mask=alive,
        )


def convolve(
    pool: Pool, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """See `Backend.convolve`; x may be strided."""
    assert pool.conv is not None
    batch, tokens, channels = x.shape
    out = torch.empty(batch, tokens, channels, dtype=x.dtype, device=x.device)
    block = 256
    conv_kernel[(batch, triton.cdiv(channels, block))](
        rows.meta,
        x,
        weight,
        weight if bias is None else bias,
        pool.conv,
        out,
        *x.stride(),
        weight.stride(0),
        pool.conv.stride(0),
        channels,
        T=tokens,
        WIDTH=pool.spec.conv_width,
        INPUTS=pool.conv.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        BLOCK=block,
        num_warps=2,
    )
    return out
