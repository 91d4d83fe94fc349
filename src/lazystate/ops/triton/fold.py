"""The fold: the records of a row that is due replayed into its checkpoint (Eq. 8, 14).

Done before the step reads the checkpoint, by the programs that will read it: each folds the value
channels that it serves, 16 records at a time, with the state in registers throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.block import (
    dot_exact,
    dot_narrow,
    inverted,
    load_tile,
    segments,
)
from lazystate.ops.triton.device import (
    SIZE,
    advance,
    load_f32,
    load_row,
    load_rows,
    store_rows,
    wrapped,
)


@triton.jit
def fold(
    part,
    key_head,
    stored,
    start,
    held,
    state,
    ring,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KC: tl.constexpr,
    KI: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    RAW: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Fold `held` records that end before ring position `start` into a program's tiles.

    SMALL: largest tile, so that a kernel that serves other rows, too, needs few registers.
    """
    KP: tl.constexpr = triton.next_power_of_2(K)
    per_head: tl.constexpr = (V + BV - 1) // BV
    heads: tl.constexpr = (TILES + per_head - 1) // per_head
    tiles: tl.constexpr = TILES // heads
    BF: tl.constexpr = BV if BV < SMALL else SMALL
    H: tl.constexpr = HV // GROUP
    column = tl.arange(0, KP)
    for i in range(heads):
        n = part * TILES + i * tiles
        head = key_head * GROUP + n // per_head
        inverses = ()
        if ERASE and RAW and not CHANNEL:
            for b in tl.static_range(BLOCKS):
                first, count = start - held + b * SIZE, held - b * SIZE
                inverses = inverses + (_inverse(ring, head, first, count, H, HV, K, R),)
        for m in tl.range(0, tiles * (BV // BF), num_stages=STAGES):
            channel = n % per_head * BV + m * BF + tl.arange(0, BF)
            in_v = channel < V
            at_v = head * V + channel
            if ERASE and RAW and CHANNEL:
                first = start - held
                _walk(state, ring, head, at_v, in_v, stored, first, held, H, HV, K, KC, KI, V, R)
            else:
                at = state + at_v[:, None] * K + column[None, :]
                inside = in_v[:, None] & (column < K)[None, :]
                tile = load_f32(at, inside & stored)
                for b in tl.static_range(BLOCKS):
                    tile = _fold_block(
                        tile,
                        inverses[b] if ERASE and RAW else 0.0,
                        ring,
                        head,
                        at_v,
                        in_v,
                        start - held + b * SIZE,
                        held - b * SIZE,
                        H,
                        HV,
                        K,
                        V,
                        R,
                        ERASE,
                        CHANNEL,
                        HAS_BETA,
                        RAW,
                    )
                tl.store(at, tile.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _walk(
    state,
    ring,
    head,
    at_v,
    in_v,
    stored,
    first,
    held,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KC: tl.constexpr,
    KI: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
):
    """Raw records one after the other through the recurrence itself (Eq. 1, 2).

    With a decay per channel and erase, where the products between a block's keys would cost more.
    """
    tile = load_rows(state, at_v * K, in_v & stored, K, KC, KI)
    for j in tl.range(0, held, loop_unroll_factor=2):
        place = wrapped(first + j, R)
        tile = advance(
            tile,
            load_row(ring[0] + place * (H * K), True, K, KC, KI),
            load_f32(ring[1] + at_v + place * (HV * V), in_v),
            load_row(ring[3] + head * K + place * (HV * K), True, K, KC, KI),
            tl.load(ring[4] + head + place * HV),
            KC,
            True,
            True,
        )
    store_rows(state, at_v * K, in_v, tile, K, KC, KI)


@triton.jit
def _block(ring, head, first, count, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, R):
    """(token, there, place, keys [16, KP]) of the block of records that starts at `first`."""
    KP: tl.constexpr = triton.next_power_of_2(K)
    token = tl.arange(0, SIZE)
    there = token < count
    place = wrapped(first + token, R)
    return token, there, place, load_tile(ring[0], place * (H * K), there, K, KP)


@triton.jit
def _inverse(
    ring,
    head,
    first,
    count,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
):
    """Transposed inverse of a block's I + B A, from raw records (Eq. 12, 14)."""
    narrow: tl.constexpr = ring[0].dtype.element_ty.primitive_bitwidth == 16
    count = tl.minimum(count, SIZE)
    token, there, place, keys = _block(ring, head, first, count, H, HV, K, R)
    newer = ring[3] + head + wrapped(first + 1 + token, R) * HV
    newer = load_f32(newer, token + 1 < count)
    scores = dot_narrow(keys, tl.trans(keys), narrow) * tl.exp(segments(token, newer))
    beta = load_f32(ring[4] + head + place * HV, there)
    older = token[None, :] < token[:, None]
    return tl.trans(inverted(tl.where(older, scores * beta[:, None], 0.0), SIZE))


@triton.jit
def _fold_block(
    tile,
    inverse,
    ring,
    head,
    at_v,
    in_v,
    first,
    count,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    RAW: tl.constexpr,
):
    """A tile [BF, KP] through a block of records."""
    count = tl.minimum(count, SIZE)
    narrow: tl.constexpr = ring[0].dtype.element_ty.primitive_bitwidth == 16
    G: tl.constexpr = K if CHANNEL else 1
    token, there, place, keys = _block(ring, head, first, count, H, HV, K, R)
    writes = load_f32(
        (ring[1] if RAW or not ERASE else ring[2]) + at_v[:, None] + place[None, :] * (HV * V),
        in_v[:, None] & there[None, :],
    )
    following = wrapped(first + 1 + token, R)
    if CHANNEL:
        gates = load_tile(ring[3] + head * G, place * (HV * G), there, K, keys.shape[1])
        newer = load_tile(
            ring[3] + head * G, following * (HV * G), token + 1 < count, K, keys.shape[1]
        )
        write_keys = keys * tl.exp(tl.cumsum(newer, 0, reverse=True))
        decay = tl.exp(tl.sum(gates, 0))[None, :]
    else:
        gates = load_f32(ring[3] + head + place * HV, there)
        newer = load_f32(ring[3] + head + following * HV, token + 1 < count)
        write_keys = keys
        decay = tl.exp(tl.sum(gates, 0))
    if ERASE and RAW:
        known = dot_exact(tile, tl.trans(keys), narrow) * tl.exp(tl.cumsum(gates, 0))[None, :]
        beta = load_f32(ring[4] + head + place * HV, there)
        writes = tl.dot((writes - known) * beta[None, :], inverse, input_precision="tf32x3")
    elif HAS_BETA and not ERASE:
        writes *= load_f32(ring[4] + head + place * HV, there)[None, :]
    if not CHANNEL:
        writes *= tl.exp(tl.cumsum(newer, 0, reverse=True))[None, :]
    return tile * decay + dot_exact(writes, write_keys, narrow and not CHANNEL)
