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
    LARGEST: tl.constexpr,
    tiling: tl.constexpr,
    shape: tl.constexpr,
):
    """Fold `held` records that end before ring position `start` into a program's tiles.

    LARGEST: value channels of a tile at most, so that a kernel that serves other rows, too, needs
    few registers.
    """
    heads: tl.constexpr = (tiling.TILES + tiling.PER_HEAD - 1) // tiling.PER_HEAD
    tiles: tl.constexpr = tiling.TILES // heads
    BF: tl.constexpr = tiling.BV if tiling.BV < LARGEST else LARGEST
    column = tl.arange(0, shape.KP)
    for i in range(heads):
        n = part * tiling.TILES + i * tiles
        head = key_head * shape.GROUP + n // tiling.PER_HEAD
        inverses = ()
        if shape.ERASE and shape.RAW and not shape.CHANNEL:
            for b in tl.static_range(shape.BLOCKS):
                first, count = start - held + b * SIZE, held - b * SIZE
                inverses = inverses + (_inverse(ring, head, first, count, shape),)
        for m in tl.range(0, tiles * (tiling.BV // BF), num_stages=tiling.STAGES):
            channel = n % tiling.PER_HEAD * tiling.BV + m * BF + tl.arange(0, BF)
            in_v = channel < shape.V
            at_v = head * shape.V + channel
            if shape.ERASE and shape.RAW and shape.CHANNEL:
                first = start - held
                _walk(state, ring, head, at_v, in_v, stored, first, held, shape)
            else:
                at = state + at_v[:, None] * shape.K + column[None, :]
                inside = in_v[:, None] & (column < shape.K)[None, :]
                tile = load_f32(at, inside & stored)
                for b in tl.static_range(shape.BLOCKS):
                    tile = _fold_block(
                        tile,
                        inverses[b] if shape.ERASE and shape.RAW else 0.0,
                        ring,
                        head,
                        at_v,
                        in_v,
                        start - held + b * SIZE,
                        held - b * SIZE,
                        shape,
                    )
                tl.store(at, tile.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _walk(state, ring, head, at_v, in_v, stored, first, held, shape: tl.constexpr):
    """Raw records one after the other through the recurrence itself (Eq. 1, 2).

    With a decay per channel and erase, where the products between a block's keys would cost more.
    """
    tile = load_rows(state, at_v * shape.K, in_v & stored, shape)
    for j in tl.range(0, held, loop_unroll_factor=2):
        place = wrapped(first + j, shape.R)
        tile = advance(
            tile,
            load_row(ring.k + place * shape.KEYS, True, shape),
            load_f32(ring.v + at_v + place * shape.VALUES, in_v),
            load_row(ring.log_decay + head * shape.K + place * shape.GATES, True, shape),
            tl.load(ring.beta + head + place * shape.HV),
            True,
            True,
        )
    store_rows(state, at_v * shape.K, in_v, tile, shape)


@triton.jit
def _block(ring, head, first, count, shape: tl.constexpr):
    """(token, there, place, keys [16, KP]) of the block of records that starts at `first`."""
    token = tl.arange(0, SIZE)
    there = token < count
    place = wrapped(first + token, shape.R)
    return token, there, place, load_tile(ring.k, place * shape.KEYS, there, shape)


@triton.jit
def _inverse(ring, head, first, count, shape: tl.constexpr):
    """Transposed inverse of a block's I + B A, from raw records (Eq. 12, 14)."""
    narrow: tl.constexpr = ring.k.dtype.element_ty.primitive_bitwidth == 16
    count = tl.minimum(count, SIZE)
    token, there, place, keys = _block(ring, head, first, count, shape)
    newer = ring.log_decay + head + wrapped(first + 1 + token, shape.R) * shape.HV
    newer = load_f32(newer, token + 1 < count)
    scores = dot_narrow(keys, tl.trans(keys), narrow) * tl.exp(segments(token, newer))
    beta = load_f32(ring.beta + head + place * shape.HV, there)
    older = token[None, :] < token[:, None]
    return tl.trans(inverted(tl.where(older, scores * beta[:, None], 0.0), SIZE))


@triton.jit
def _fold_block(tile, inverse, ring, head, at_v, in_v, first, count, shape: tl.constexpr):
    """A tile [BF, KP] through a block of records."""
    count = tl.minimum(count, SIZE)
    narrow: tl.constexpr = ring.k.dtype.element_ty.primitive_bitwidth == 16
    token, there, place, keys = _block(ring, head, first, count, shape)
    writes = load_f32(
        (ring.v if shape.RAW or not shape.ERASE else ring.u)
        + at_v[:, None]
        + place[None, :] * shape.VALUES,
        in_v[:, None] & there[None, :],
    )
    following = wrapped(first + 1 + token, shape.R)
    if shape.CHANNEL:
        gates = load_tile(ring.log_decay + head * shape.G, place * shape.GATES, there, shape)
        newer = load_tile(
            ring.log_decay + head * shape.G,
            following * shape.GATES,
            token + 1 < count,
            shape,
        )
        write_keys = keys * tl.exp(tl.cumsum(newer, 0, reverse=True))
        decay = tl.exp(tl.sum(gates, 0))[None, :]
    else:
        gates = load_f32(ring.log_decay + head + place * shape.HV, there)
        newer = load_f32(ring.log_decay + head + following * shape.HV, token + 1 < count)
        write_keys = keys
        decay = tl.exp(tl.sum(gates, 0))
    if shape.ERASE and shape.RAW:
        known = dot_exact(tile, tl.trans(keys), narrow) * tl.exp(tl.cumsum(gates, 0))[None, :]
        beta = load_f32(ring.beta + head + place * shape.HV, there)
        writes = tl.dot((writes - known) * beta[None, :], inverse, input_precision="tf32x3")
    elif shape.BETA and not shape.ERASE:
        writes *= load_f32(ring.beta + head + place * shape.HV, there)[None, :]
    if not shape.CHANNEL:
        writes *= tl.exp(tl.cumsum(newer, 0, reverse=True))[None, :]
    return tile * decay + dot_exact(writes, write_keys, narrow and not shape.CHANNEL)
