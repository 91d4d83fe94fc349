"""Device functions that the kernels share: rows of K elements, recurrence, the read of history.

Anything with a K axis is a tuple of KC pieces [n, KI], KI = 16 elements wide. A state tile then
puts 4 lanes along K and 8 along V: a sum over K is additions in registers and two shuffles, where
one [n, K] tensor would take five shuffles for every row. K need not be a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.spec import LayerSpec

PIECE = 16  # KI, and the records of a block: a block is one more piece beside those of K
SIZE = tl.constexpr(PIECE)


def shape_of(spec: LayerSpec) -> dict[str, int | bool]:
    """The constants that every kernel takes from a layer."""
    return {
        "HV": spec.heads,
        "GROUP": spec.group,
        "K": spec.key_dim,
        "KC": triton.cdiv(spec.key_dim, PIECE),
        "KI": PIECE,
        "V": spec.value_dim,
        "ERASE": spec.erase,
        "CHANNEL": spec.decay == "channel",
        "HAS_BETA": spec.beta,
    }


@triton.jit
def load_f32(pointer, mask):
    """A masked load in FP32, zeros where masked."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def wrapped(position, R: tl.constexpr):
    """A position in -R..R-1 as one in 0..R-1."""
    return tl.where(position < 0, position + R, position)


@triton.jit
def load_rows(base, at, there, K: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr):
    """n rows of K elements in FP32 from base + at [n]; zeros where not there [n]."""
    rows = ()
    for c in tl.static_range(KC):
        i = c * KI + tl.arange(0, KI)
        mask = there[:, None] if K % KI == 0 else there[:, None] & (i < K)[None, :]
        rows = rows + (load_f32(base + at[:, None] + i[None, :], mask),)
    return rows


@triton.jit
def load_row(base, there, K: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr):
    """One row [1, K] in FP32; zeros unless there."""
    row = ()
    for c in tl.static_range(KC):
        i = c * KI + tl.arange(0, KI)
        row = row + (load_f32(base + i, there if K % KI == 0 else there & (i < K))[None, :],)
    return row


@triton.jit
def store_rows(base, at, there, rows, K: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr):
    """Store n rows of K elements to base + at [n] where there [n], in the pointer's dtype."""
    for c in tl.static_range(KC):
        i = c * KI + tl.arange(0, KI)
        tl.store(
            base + at[:, None] + i[None, :],
            rows[c].to(base.dtype.element_ty),
            mask=there[:, None] & (i < K)[None, :],
        )


@triton.jit
def store_row(base, there, row, K: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr):
    """Store one row [1, K]."""
    for c in tl.static_range(KC):
        i = c * KI + tl.arange(0, KI)
        tl.store(
            base + i[None, :], row[c].to(base.dtype.element_ty), mask=(there & (i < K))[None, :]
        )


@triton.jit
def zeros(n: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr):
    """n rows of zeros."""
    rows = ()
    for _ in tl.static_range(KC):
        rows = rows + (tl.zeros([n, KI], tl.float32),)
    return rows


@triton.jit
def dot_k(a, b, KC: tl.constexpr):
    """Sum over K of a [n, K] times b [n or 1, K] -> [n]."""
    total = a[0] * b[0]
    for c in tl.static_range(1, KC):
        total += a[c] * b[c]
    return tl.sum(total, 1)


@triton.jit
def add(a, b, KC: tl.constexpr):
    """a + b."""
    out = ()
    for c in tl.static_range(KC):
        out = out + (a[c] + b[c],)
    return out


@triton.jit
def decayed(a, log_decay, KC: tl.constexpr):
    """a times exp(log_decay), element by element."""
    out = ()
    for c in tl.static_range(KC):
        out = out + (a[c] * tl.exp(log_decay[c]),)
    return out


@triton.jit
def advance(
    state, k, v, log_decay, beta, KC: tl.constexpr, ERASE: tl.constexpr, CHANNEL: tl.constexpr
):
    """One token of the recurrence (Eq. 1, 2) on a tile [BV, K]; log_decay scalar or [1, K]."""
    moved = ()
    for c in tl.static_range(KC):
        moved = moved + (state[c] * tl.exp(log_decay[c] if CHANNEL else log_decay),)
    u = v
    if ERASE:
        u = u - dot_k(moved, k, KC)
    u = (u * beta)[:, None]
    state = ()
    for c in tl.static_range(KC):
        state = state + (moved[c] + u * k[c],)
    return state
