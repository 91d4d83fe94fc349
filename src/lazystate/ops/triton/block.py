"""A block of tokens at once: decays between them, their mutual products, their corrections.

Shared by verification (the block: drafts) and the fold (the block: 16 records). Products run on
tensor cores: an FP32 operand is cut into two TF32 halves, which keeps FP32 level, and a 16-bit one
is exact in TF32 as it is. Whatever has the axis of K is one tile [n, KP], KP a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.device import load_f32


@triton.jit
def load_tile(base, at, there, shape: tl.constexpr):
    """n rows of K elements in FP32 from base + at [n] -> [n, KP]; zeros where not there."""
    column = tl.arange(0, shape.KP)
    mask = there[:, None] if shape.K == shape.KP else there[:, None] & (column < shape.K)[None, :]
    return load_f32(base + at[:, None] + column[None, :], mask)


@triton.jit
def dot_exact(a, b, NARROW: tl.constexpr):
    """a [m, k] times b [k, n] at FP32 level; NARROW: b came from 16 bits and is exact in TF32."""
    if NARROW:
        high = (a.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        out = tl.dot(high, b, input_precision="tf32")
        out += tl.dot(a - high, b, input_precision="tf32")
    else:
        out = tl.dot(a, b, input_precision="tf32x3")
    return out


@triton.jit
def dot_narrow(a, b, NARROW: tl.constexpr):
    """a [m, k] times b [k, n]; NARROW: both came from 16 bits, and one TF32 product is exact."""
    return tl.dot(a, b, input_precision="tf32" if NARROW else "tf32x3")


@triton.jit
def segments(token, newer):
    """Log-decay from token s to token [r], exclusive of s -> [r, s]; 0 where s is not older.

    newer: [s], the log-decay of token s + 1. Sums only, so that a reset stays exact.
    """
    column = tl.arange(0, newer.shape[0])
    older = column[None, :] < token[:, None]
    return tl.cumsum(tl.where(older, newer[None, :], 0.0), 1, reverse=True)


@triton.jit
def _border(token, column, SIZE: tl.constexpr):
    """Whether an odd multiple of SIZE lies between, no farther than SIZE from either -> [r, s]."""
    block = (token // SIZE)[:, None]
    return (block % 2 == 1) & ((column // SIZE)[None, :] == block - 1)


@triton.jit
def inverted(lower, N: tl.constexpr):
    """Inverse of I + lower [n, n], strictly lower triangular, zero from row N on (Eq. 12).

    Diagonal blocks of twice the size from those of the last: as stable as substitution, in
    products instead of N dependent rows.
    """
    row = tl.arange(0, lower.shape[0])
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for level in tl.static_range(4):
        if (1 << level) < N:
            corner = tl.where(_border(row, row, 1 << level), lower, 0.0)
            if level == 0:
                inverse -= corner
            else:
                half = tl.dot(inverse, corner, input_precision="tf32x3")
                inverse -= tl.dot(half, inverse, input_precision="tf32x3")
    return inverse
