"""A block of tokens at once: decays between them, their mutual products, their corrections.

Shared by verification (the block: drafts) and the fold (the block: 16 records). Products run on
tensor cores: an FP32 operand is cut into two TF32 halves, which keeps FP32 level, and a 16-bit one
is exact in TF32 as it is. Whatever has the axis of K is one tile [n, KP], KP a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.device import load_f32, wrapped


@triton.jit
def load_tile(base, at, there, K: tl.constexpr, KP: tl.constexpr):
    """n rows of K elements in FP32 from base + at [n] -> [n, KP]; zeros where not there."""
    column = tl.arange(0, KP)
    mask = there[:, None] if K == KP else there[:, None] & (column < K)[None, :]
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
def channel_scores(
    queries,
    keys,
    gates,
    query_stride,
    key_stride,
    gate_stride,
    first,
    count,
    R: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Products of a block's keys with its later keys and queries, decayed per channel in between.

    A walk along the tokens: every key seen so far decays by one token's gates at a time, so that
    nothing is divided and a reset stays exact. Token s lies at position first + s of a ring of R;
    keys at keys + position * key_stride, log-decays and queries likewise.

    KEYS, QUERIES: the first column of keys' and of queries' products, below 0 for none.

    Returns:
        [N, N], key s is a row and vector t a column; zero where s is newer, and for keys also where
        it is the same.
    """
    KP: tl.constexpr = triton.next_power_of_2(K)
    row = tl.arange(0, N)
    column = tl.arange(0, KP)
    seen = tl.zeros([N, KP], tl.float32)
    out = tl.zeros([N, N], tl.float32)
    for t in tl.range(0, count, num_stages=2):
        at = wrapped(first + t, R)
        key = load_f32(keys + at * key_stride + column, column < K)
        gate = load_f32(gates + at * gate_stride + column, column < K)
        seen *= tl.exp(gate)[None, :]
        if KEYS >= 0:
            scores = tl.sum(seen * key[None, :], 1)
            out = tl.where(row[None, :] == t + KEYS, scores[:, None], out)
        seen = tl.where(row[:, None] == t, key[None, :], seen)
        if QUERIES >= 0:
            query = load_f32(queries + at * query_stride + column, column < K)
            scores = tl.sum(seen * query[None, :], 1)
            out = tl.where(row[None, :] == t + QUERIES, scores[:, None], out)
    return out


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
