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
    starts,
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
    ring_input,
    channels,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of channels of one row; products and sum in FP32, the same for every T.

    starts: see `Rows`; with it there is no output behind a row's length.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    slot = tl.load(meta + row * 8)
    seen = tl.load(meta + row * 8 + 2, mask=slot >= 0, other=0)
    length = tl.load(meta + row * 8 + 3, mask=slot >= 0, other=0)
    fresh = (seen == 0) & (tl.load(meta + row * 8 + 5, mask=slot >= 0, other=0) != 0)
    if starts is None:
        first = row * T
        at_x = x + row * x_row + c * x_channel
    else:
        first = tl.load(starts + row).to(tl.int64)
        at_x = x + first * x_token + c * x_channel
    at_ring = ring + slot * ring_slot + c
    for s in range(T):
        alive = inside & (s < length)
        y = tl.zeros([BLOCK], tl.float32)
        for w in tl.static_range(WIDTH):
            i = s - (WIDTH - 1) + w
            there = alive & (i < 0) & (fresh == 0)
            past = load_f32(at_ring + ((seen + i + INPUTS) % INPUTS) * ring_input, there)
            new = load_f32(at_x + i * x_token, alive & (i >= 0))
            y += (past + new) * load_f32(weight + c * weight_channel + w, inside)
        if HAS_BIAS:
            y += load_f32(bias + c, inside)
        if SILU:
            y = y * tl.sigmoid(y)
        written = inside if starts is None else alive
        tl.store(out + (first + s) * channels + c, tl.where(alive, y, 0.0), mask=written)
        new = load_f32(at_x + s * x_token, alive)
        tl.store(
            at_ring + ((seen + s) % INPUTS) * ring_input,
            new.to(ring.dtype.element_ty),
            mask=alive,
        )
    for w in tl.static_range(WIDTH - 2):  # what came before a fresh row's first token
        nothing = tl.zeros([BLOCK], ring.dtype.element_ty)
        tl.store(at_ring + (INPUTS - 1 - w) * ring_input, nothing, mask=inside & fresh)


def convolve(
    pool: Pool, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """See `Backend.convolve`; x may be strided."""
    assert pool.conv is not None
    return convolve_ring(pool.conv, rows, x, weight, bias, silu)


def convolve_ring(
    ring: Tensor, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """A step's convolution, and its inputs appended.

    Args:
        ring: [slots, R, C], any strides but dense channels; R >= width - 2 + T, since a step keeps
            one token at least.
        x: [B, T, C], or [1, tokens, C] with `rows.starts`; may be strided.
        weight: [C, width]. bias: [C] or None. silu: whether an activation follows.

    Returns:
        As x, dense; uninitialised where there are `rows.starts` but no row has a token.
    """
    channels, batch = x.shape[-1], rows.meta.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = 256
    conv_kernel[(batch, triton.cdiv(channels, block))](
        rows.meta,
        rows.starts,
        x,
        weight,
        weight if bias is None else bias,
        ring,
        out,
        *x.stride(),
        weight.stride(0),
        ring.stride(0),
        ring.stride(1),
        channels,
        T=rows.tokens,
        WIDTH=weight.shape[1],
        INPUTS=ring.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        BLOCK=block,
        num_warps=2,
    )
    return out


@triton.jit
def turn_kernel(
    meta,
    ring,
    ring_slot,
    ring_input,
    channels,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of channels of one row, all its last inputs at once: they move within the ring."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(meta + row * 8)
    seen = tl.load(meta + row * 8 + 2, mask=slot >= 0, other=0)
    if (slot >= 0) & (seen > 0):
        i = tl.arange(0, PADDED) - (WIDTH - 1)
        inside = (i < 0)[:, None] & (c < channels)[None, :]
        at = ring + slot * ring_slot + c[None, :]
        old = (seen + i + INPUTS) % INPUTS
        inputs = tl.load(at + old[:, None] * ring_input, mask=inside, other=0.0)
        tl.debug_barrier()  # all are read before one is overwritten
        tl.store(at + (i + INPUTS)[:, None] * ring_input, inputs, mask=inside)


def turn(ring: Tensor, rows: Rows, width: int) -> None:
    """Bring the last width - 1 inputs of every row to the ring's end, oldest first: where they are
    when no token has been seen since. ring: see `convolve_ring`.
    """
    channels, block = ring.shape[-1], 64
    turn_kernel[(rows.meta.shape[0], triton.cdiv(channels, block))](
        rows.meta,
        ring,
        ring.stride(0),
        ring.stride(1),
        channels,
        WIDTH=width,
        INPUTS=ring.shape[1],
        PADDED=triton.next_power_of_2(width),
        BLOCK=block,
        num_warps=1,
    )
