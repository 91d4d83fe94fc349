"""Device functions that the kernels share: tiles, gates' weights, ring addressing, the recurrence.

A state tile is held as [KC, BV, KI]: K split into KC chunks of KI contiguous elements. Triton then
puts 8 lanes along K and 4 along V, so that a sum over K is KC additions in registers and three
shuffles, where a [BV, K] tile would take five shuffles for every row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunked(KC: tl.constexpr, KI: tl.constexpr):
    """Key indices of a tile, [KC, 1, KI]."""
    return (tl.arange(0, KC) * KI)[:, None, None] + tl.arange(0, KI)[None, None, :]


@triton.jit
def dot_k(tile, x):
    """Sum over K of a tile [KC, BV, KI] times [KC, 1, KI] -> [BV]."""
    return tl.sum(tl.sum(tile * x, 0), 1)


@triton.jit
def load_f32(pointer, mask):
    """A masked load in FP32, zeros where masked."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def advance(state, k, v, decay, beta, ERASE: tl.constexpr):
    """One token of the recurrence (Eq. 1, 2) on a tile.

    state: [KC, BV, KI]. k: [KC, 1, KI]. v: [BV]. decay: exp(log_decay), scalar or [KC, 1, KI].
    """
    state = state * decay
    u = v
    if ERASE:
        u = u - dot_k(state, k)
    u = u * beta
    return state + u[None, :, None] * k, u
