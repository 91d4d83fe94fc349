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
def load_vector(base, there, K: tl.constexpr, KP: tl.constexpr):
    """K elements in FP32 -> [KP]; zeros unless there."""
    column = tl.arange(0, KP)
    return load_f32(base + column, there & (column < K))


@triton.jit
def dot_exact(a, b, NARROW: tl.constexpr):
    """a [m, k] times b [k, n] at FP32 level; NARROW: b came from 16 bits and is exact in TF32."""
    if NARROW:
        high = (a.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        out = tl.dot(high, b, input_precision="tf32")
        out = tl.dot(a - high, b, out, input_precision="tf32")
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
    x,
    token,
    keys,
    gates,
    key_stride,
    gate_stride,
    first,
    count,
    R: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    """Products of x [r, KP] with the block's keys, decayed per channel, and the decays of x.

    Token s of the block lies at position first + s of a ring of R; row r of x belongs to `token`
    [r]. Keys at keys + position * key_stride, log-decays likewise.

    Returns:
        (scores [r, N], wrong where s is newer than r's token, log-decay up to each row [r, KP],
        log-decay behind each row [r, KP], total log-decay [KP]).
    """
    KP: tl.constexpr = x.shape[1]
    column = tl.arange(0, N)
    scores = tl.zeros([x.shape[0], N], tl.float32)
    segment = tl.zeros([x.shape[0], KP], tl.float32)
    prefix = tl.zeros([x.shape[0], KP], tl.float32)
    behind = tl.zeros([x.shape[0], KP], tl.float32)
    total = tl.zeros([KP], tl.float32)
    for back in range(count):
        s = count - 1 - back
        place = wrapped(first + s, R)
        key = load_vector(keys + place * key_stride, True, K, KP)
        gate = load_vector(gates + place * gate_stride, True, K, KP)
        scored = tl.sum(x * tl.exp(segment) * key[None, :], 1)
        scores = tl.where(column[None, :] == s, scored[:, None], scores)
        segment = tl.where((token >= s)[:, None], segment + gate[None, :], 0.0)
        prefix = tl.where((token >= s)[:, None], prefix + gate[None, :], prefix)
        behind = tl.where((token < s)[:, None], behind + gate[None, :], behind)
        total += gate
    return scores, prefix, behind, total


@triton.jit
def substitute(lower, count):
    """Transposed inverse of I + lower [n, n], strictly lower triangular, row after row (Eq. 12)."""
    row = tl.arange(0, lower.shape[0])
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for t in range(1, count):
        coefficients = tl.sum(tl.where(row[:, None] == t, lower, 0.0), 0)
        column = tl.sum(inverse * coefficients[None, :], 1)
        inverse = tl.where(row[None, :] == t, inverse - column[:, None], inverse)
    return inverse
