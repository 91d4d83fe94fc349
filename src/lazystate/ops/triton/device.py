"""Device functions that the kernels share: rows of K elements, recurrence, the read of history.

Anything with a K axis is a tuple of KC pieces [n, SIZE], 16 elements wide (`columns`). A state tile
then puts 4 lanes along K and 8 along V: a sum over K is additions in registers and two shuffles,
where one [n, K] tensor would take five shuffles for every row. K need not be a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.arguments import PIECE

SIZE = tl.constexpr(PIECE)


@triton.jit
def load_f32(pointer, mask):
    """A masked load in FP32, zeros where masked."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def bf16_nearest(x):
    """FP32 rounded to BF16, to nearest even, in bits: NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x != x, x, even.to(tl.float32, bitcast=True))


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """FP32 rounded to a dtype and back; by hand to BF16, for the interpreter, whose cast cuts."""
    if dtype == tl.bfloat16:
        x = bf16_nearest(x)
    else:
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def wrapped(position, R: tl.constexpr):
    """A position in -R..R-1 as one in 0..R-1."""
    return tl.where(position < 0, position + R, position)


@triton.jit
def columns(c, shape: tl.constexpr):
    """Elements of K that are in piece c: neighbours, or what is alike in the bytes of a format."""
    order: tl.constexpr = shape.ORDER
    return tl.arange(0, SIZE) * order + (c // order * order * SIZE + c % order)


@triton.jit
def load_rows(base, at, there, shape: tl.constexpr):
    """n rows of K elements in FP32 from base + at [n]; zeros where not there [n]."""
    rows = ()
    for c in tl.static_range(shape.KC):
        i = columns(c, shape)
        mask = (
            there[:, None]
            if shape.K == shape.KC * SIZE
            else there[:, None] & (i < shape.K)[None, :]
        )
        rows = rows + (load_f32(base + at[:, None] + i[None, :], mask),)
    return rows


@triton.jit
def load_row(base, there, shape: tl.constexpr):
    """One row [1, K] in FP32; zeros unless there."""
    row = ()
    for c in tl.static_range(shape.KC):
        i = columns(c, shape)
        row = row + (
            load_f32(base + i, there if shape.K == shape.KC * SIZE else there & (i < shape.K))[
                None, :
            ],
        )
    return row


@triton.jit
def store_rows(base, at, there, rows, shape: tl.constexpr):
    """Store n rows of K elements to base + at [n] where there [n], in the pointer's dtype."""
    for c in tl.static_range(shape.KC):
        i = columns(c, shape)
        tl.store(
            base + at[:, None] + i[None, :],
            rows[c].to(base.dtype.element_ty),
            mask=there[:, None] & (i < shape.K)[None, :],
        )


@triton.jit
def store_row(base, there, row, shape: tl.constexpr):
    """Store one row [1, K]."""
    for c in tl.static_range(shape.KC):
        i = columns(c, shape)
        tl.store(
            base + i[None, :],
            row[c].to(base.dtype.element_ty),
            mask=(there & (i < shape.K))[None, :],
        )


@triton.jit
def zeros(n: tl.constexpr, shape: tl.constexpr):
    """n rows of zeros."""
    rows = ()
    for _ in tl.static_range(shape.KC):
        rows = rows + (tl.zeros([n, SIZE], tl.float32),)
    return rows


@triton.jit
def _paired(parts, apart: tl.constexpr):
    """Half as many parts: parts so far apart element by element, or, if 0, one behind the next."""
    n: tl.constexpr = parts[0].shape[0]
    pairs = ()
    for i in tl.static_range(len(parts) // 2):
        if apart > 0:
            both = tl.join(parts[i // apart * apart + i], parts[i // apart * apart + i + apart])
        else:
            both = tl.permute(tl.join(parts[2 * i], parts[2 * i + 1]), [0, 2, 1])
        pairs = pairs + (tl.reshape(both, [n, both.shape[1] * both.shape[2]]),)
    return pairs


@triton.jit
def joined(rows, shape: tl.constexpr):
    """Pieces of K as one tile [n, KP] in order, zeros behind K."""
    parts = rows
    for _ in tl.static_range(shape.KP // SIZE - len(rows)):
        parts = parts + (tl.zeros_like(rows[0]),)
    for level in tl.static_range(8):
        if len(parts) > 1:
            parts = _paired(parts, shape.ORDER >> (level + 1))
    return parts[0]


@triton.jit
def dot_k(a, b):
    """Sum over K of a [n, K] times b [n or 1, K] -> [n]."""
    total = a[0] * b[0]
    for c in tl.static_range(1, len(a)):
        total += a[c] * b[c]
    return tl.sum(total, 1)


@triton.jit
def add(a, b):
    """a + b."""
    out = ()
    for c in tl.static_range(len(a)):
        out = out + (a[c] + b[c],)
    return out


@triton.jit
def decayed(a, log_decay):
    """a times exp(log_decay), element by element."""
    out = ()
    for c in tl.static_range(len(a)):
        out = out + (a[c] * tl.exp(log_decay[c]),)
    return out


@triton.jit
def advance(state, k, v, log_decay, beta, ERASE: tl.constexpr, CHANNEL: tl.constexpr):
    """One token of the recurrence (Eq. 1, 2) on a tile [BV, K]; log_decay scalar or [1, K]."""
    moved = ()
    for c in tl.static_range(len(k)):
        moved = moved + (state[c] * tl.exp(log_decay[c] if CHANNEL else log_decay),)
    u = v
    if ERASE:
        u = u - dot_k(moved, k)
    u = (u * beta)[:, None]
    state = ()
    for c in tl.static_range(len(k)):
        state = state + (moved[c] + u * k[c],)
    return state
