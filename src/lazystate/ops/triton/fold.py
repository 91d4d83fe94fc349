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
from lazystate.ops.triton.device import SIZE, advance, joined, load_f32, load_row, wrapped
from lazystate.ops.triton.formats import (
    LEAST_NORMAL,
    NVFP4,
    largest,
    random_bits,
    read_rows,
    read_tile,
    write_tile,
)
from lazystate.ops.triton.sketch import SKETCH, write_sketch


@triton.jit
def fold(
    part,
    key_head,
    stored,
    start,
    held,
    slot,
    count,
    seed,
    checkpoint,
    view,
    ring,
    LARGEST: tl.constexpr,
    storing: tl.constexpr,
    tiling: tl.constexpr,
    shape: tl.constexpr,
):
    """Fold `held` records that end before ring position `start` into a program's tiles.

    Without a record it only builds the view: a checkpoint rounded again would not be the same.

    A format that needs a state's largest magnitude takes two passes over the tiles of a head. A
    sketch takes a head's whole state as one tile: its factors are sums over all value channels.

    LARGEST: value channels of a tile at most, so that a kernel that serves other rows, too, needs
    few registers. count, seed: of stochastic rounding.
    """
    heads: tl.constexpr = (tiling.TILES + tiling.PER_HEAD - 1) // tiling.PER_HEAD
    tiles: tl.constexpr = tiling.TILES // heads
    BF: tl.constexpr = tiling.BV if tiling.BV < LARGEST else LARGEST
    passes: tl.constexpr = 2 if storing.TOTAL else 1
    for i in range(heads):
        n = part * tiling.TILES + i * tiles
        head = key_head * shape.GROUP + n // tiling.PER_HEAD
        inverses = ()
        if shape.ERASE and shape.RAW and not shape.CHANNEL:
            for b in tl.static_range(shape.BLOCKS):
                first, rest = start - held + b * SIZE, held - b * SIZE
                inverses = inverses + (_inverse(ring, head, first, rest, shape),)
        total = 0.0
        for step in tl.static_range(passes):
            for m in tl.range(0, tiles * (tiling.BV // BF), num_stages=tiling.STAGES):
                channel = n % tiling.PER_HEAD * tiling.BV + m * BF + tl.arange(0, BF)
                in_v = channel < shape.V
                tile = _folded(
                    checkpoint,
                    ring,
                    inverses,
                    head,
                    channel,
                    in_v,
                    stored,
                    start,
                    held,
                    storing.checkpoint,
                    shape,
                )
                if step + 1 < passes:
                    most = largest(tile)
                    bad = tl.max((in_v & (most != most)).to(tl.int32), 0)
                    most = tl.max(tl.where(in_v & (most == most), most, 0.0), 0)
                    broken = (bad > 0) | (total != total)
                    total = tl.where(broken, float("nan"), tl.maximum(total, most))
                else:
                    _keep(
                        tile,
                        head,
                        channel,
                        in_v,
                        held > 0,
                        _scale(total),
                        slot,
                        count,
                        seed,
                        checkpoint,
                        view,
                        storing,
                        shape,
                    )
        _keep_total(checkpoint, view, head, held > 0, _scale(total), storing)  # all tiles are read


@triton.jit
def _keep_total(checkpoint, view, head, changed, total, storing: tl.constexpr):
    """Store the scale of an nvfp4 state of one head."""
    if storing.checkpoint.KIND == NVFP4:
        tl.store(checkpoint.total + head, total, mask=changed)
    if storing.VIEW and storing.view.KIND == NVFP4:
        tl.store(view.total + head, total)


@triton.jit
def _scale(most):
    """FP32 scale of an nvfp4 state with this largest magnitude."""
    scale = tl.math.div_rn(most, 2688.0)  # 448 * 6
    return tl.where(scale < LEAST_NORMAL, 0.0, scale)


@triton.jit
def _folded(
    checkpoint,
    ring,
    inverses,
    head,
    channel,
    in_v,
    stored,
    start,
    held,
    form: tl.constexpr,
    shape: tl.constexpr,
):
    """A tile [BF, KP] of the exact state after the committed records."""
    at_v = head * shape.V + channel
    if shape.ERASE and shape.RAW and shape.CHANNEL:
        there = in_v & stored
        pieces = _walk(checkpoint, ring, head, at_v, in_v, there, start - held, held, form, shape)
        tile = joined(pieces, shape)
    else:
        tile = read_tile(checkpoint, at_v, in_v & stored, form, shape)
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
    return tile


@triton.jit
def _keep(
    tile,
    head,
    channel,
    in_v,
    changed,
    total,
    slot,
    count,
    seed,
    checkpoint,
    view,
    storing: tl.constexpr,
    shape: tl.constexpr,
):
    """Round one folded value into checkpoint, where it has changed, and view: neither from the
    other.
    """
    row = head * shape.V + channel
    bits = None
    if storing.STOCHASTIC:
        bits = random_bits(seed, channel, head, slot, count, shape)
    there = in_v & changed if storing.VIEW else in_v
    write_tile(checkpoint, tile, row, there, total, bits, storing.checkpoint, shape)
    if storing.VIEW and storing.view.KIND == SKETCH:
        write_sketch(view, tile, head, channel, in_v, storing.view, shape)
    elif storing.VIEW:
        write_tile(view, tile, row, in_v, total, None, storing.view, shape)


@triton.jit
def _walk(
    state, ring, head, at_v, in_v, there, first, held, form: tl.constexpr, shape: tl.constexpr
):
    """Raw records one after the other through the recurrence itself (Eq. 1, 2) -> pieces.

    With a decay per channel and erase, where the products between a block's keys would cost more.
    """
    tile = read_rows(state, at_v, there, form, shape)
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
    return tile


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
