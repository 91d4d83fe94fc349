"""One token a row: products of the view with a query (and a key) by multiplying and adding.

A block of 16 records is one more piece of K: its values, read as [BV, 16], are weighted by the
decayed scores of its keys and summed along with the state's own pieces (Eq. 10).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.device import (
    SIZE,
    add,
    decayed,
    dot_k,
    load_f32,
    load_rows,
    store_row,
    wrapped,
    zeros,
)
from lazystate.ops.triton.formats import DENSE, read_pieces
from lazystate.ops.triton.gates import (
    channel_decay,
    load_channel_gates,
    load_gates,
    load_vector,
    normalised,
)
from lazystate.ops.triton.sketch import SKETCH, read_sketch


@triton.jit
def decode(
    part,
    key_head,
    stored,
    start,
    used,
    inputs,
    strides,
    skip,
    out,
    state,
    ring,
    form: tl.constexpr,
    tiling: tl.constexpr,
    shape: tl.constexpr,
):
    """Outputs of one token for a program's tiles, and its record, behind `used` committed ones.

    form: of the states that are read.
    """
    first = key_head * shape.GROUP + part * tiling.TILES // tiling.PER_HEAD
    qs, q_unit = load_vector(inputs.q, shape.gate.SCALE, shape)
    ks, k_unit = load_vector(inputs.k, 1.0, shape)
    fresh_key = ks
    gate = ()
    early = ()
    sketched: tl.constexpr = form.KIND == SKETCH
    if tiling.TILES == 1 and not sketched:  # on its way while the scores are formed
        at = first * shape.V + part % tiling.PER_HEAD * tiling.BV + tl.arange(0, tiling.BV)
        early = read_pieces(state, at, (at < (first + 1) * shape.V) & stored, form, shape)
    q_scores, k_scores = _scores(
        inputs,
        strides,
        q_unit,
        k_unit,
        ring.k,
        ring.log_decay + first * shape.G,
        first,
        start,
        used,
        shape,
    )
    own = tl.sum(dot_k(ks, qs), 0)
    if shape.CHANNEL:
        gate = load_channel_gates(inputs, strides, first, 0, shape)
        total = _total(ring.log_decay + first * shape.G, start, used, shape.GATES, shape)
        since = add(total, gate)
        qs = decayed(qs, since)
        ks = decayed(ks, since)
    for i in tl.range(0, tiling.TILES, num_stages=tiling.STAGES):
        n = part * tiling.TILES + i
        head = key_head * shape.GROUP + n // tiling.PER_HEAD
        channel = n % tiling.PER_HEAD * tiling.BV + tl.arange(0, tiling.BV)
        in_v = tl.full([tiling.BV], 1, tl.int1) if shape.V % tiling.BV == 0 else channel < shape.V
        at_v = head * shape.V + channel
        tile = early
        if tiling.TILES > 1 and not sketched:
            tile = read_pieces(state, at_v, in_v & stored, form, shape)
        vs = load_f32(inputs.v + head * strides.v + channel, in_v)
        g, strength = load_gates(inputs, strides, head, 0, 0, True, shape)
        last = 0.0
        if not shape.CHANNEL:
            oldest = ring.log_decay + head + wrapped(start - used, shape.R) * shape.HV
            last = tl.load(oldest, mask=used > 0, other=0.0)
        q_past, k_past, later = _past(
            ring, head, at_v, in_v, start, used, g, q_scores, k_scores, shape
        )
        scale = 1.0
        if not shape.CHANNEL:
            scale = tl.exp(later + last)
        if sketched:
            q_sum, k_sum = read_sketch(state, head, channel, in_v & stored, qs, ks, form, shape)
        else:
            q_sum, k_sum = _read(tile[0], tile[1], qs, ks, form, shape.ERASE)
        u = vs
        if shape.ERASE:
            u -= tl.sum(k_sum * scale + k_past, 1)
        u = u * strength
        o = tl.sum(q_sum * scale + q_past, 1) + u * own
        if skip is not None:
            o += vs * tl.load(skip + head).to(tl.float32)
        tl.store(out + at_v, o, mask=in_v)
        new = wrapped(start - shape.R, shape.R)
        if shape.ERASE:
            tl.store(
                ring.u + at_v + new * shape.VALUES,
                u.to(ring.u.dtype.element_ty),
                mask=in_v,
            )
        if shape.RAW or not shape.ERASE:
            tl.store(
                ring.v + at_v + new * shape.VALUES,
                vs.to(ring.v.dtype.element_ty),
                mask=in_v,
            )
        leading = n % tiling.PER_HEAD == 0
        if not shape.CHANNEL:
            tl.store(ring.log_decay + head + new * shape.HV, g, mask=leading)
        if shape.BETA and (shape.RAW or not shape.ERASE):
            tl.store(ring.beta + head + new * shape.HV, strength, mask=leading)
    new = wrapped(start - shape.R, shape.R)
    store_row(ring.k + new * shape.KEYS, part == 0, fresh_key, shape)
    if shape.CHANNEL:
        leading = part % (tiling.PER_HEAD // tiling.TILES) == 0
        store_row(ring.log_decay + first * shape.G + new * shape.GATES, leading, gate, shape)


@triton.jit
def _past(ring, head, at_v, in_v, start, used, later, q_scores, k_scores, shape: tl.constexpr):
    """What the committed records return for q and k, not yet summed -> two [BV, KI] (Eq. 10).

    later: log-decay of the token itself. Also returns its sum with all records' but the oldest's.
    """
    q_past = tl.zeros([at_v.shape[0], SIZE], tl.float32)
    k_past = tl.zeros([at_v.shape[0], SIZE], tl.float32)
    for b in tl.static_range(shape.BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        there = recent < used
        place = wrapped(start - 1 - recent, shape.R)
        values = load_f32(
            (ring.u if shape.ERASE else ring.v) + at_v[:, None] + place[None, :] * shape.VALUES,
            in_v[:, None] & there[None, :],
        )
        weight = tl.full([SIZE], 1.0, tl.float32)
        if not shape.CHANNEL:
            newer = ring.log_decay + head + wrapped(start - recent, shape.R) * shape.HV
            newer = load_f32(newer, (recent > 0) & there)
            weight = tl.exp(later + tl.cumsum(newer, 0))
            later += tl.sum(newer, 0)
        if shape.BETA and not shape.ERASE:
            weight *= load_f32(ring.beta + head + place * shape.HV, there)
        q_past += values * (q_scores[b] * weight)[None, :]
        if shape.ERASE:
            k_past += values * (k_scores[b] * weight)[None, :]
    return q_past, k_past, later


@triton.jit
def _read(pieces, units, qs, ks, form: tl.constexpr, ERASE: tl.constexpr):
    """Products of a tile with q and k, not yet summed along K -> two [BV, SIZE]."""
    q_sum = tl.zeros(pieces[0].shape, tl.float32)
    k_sum = tl.zeros(pieces[0].shape, tl.float32)
    many: tl.constexpr = 1 if form.KIND == DENSE else form.ORDER
    for part in tl.static_range(len(pieces) // many):
        q_part = pieces[part * many] * qs[part * many]
        k_part = pieces[part * many] * ks[part * many]
        for c in tl.static_range(part * many + 1, (part + 1) * many):
            q_part += pieces[c] * qs[c]
            k_part += pieces[c] * ks[c]
        if form.KIND != DENSE:  # elements of a word share a scale
            q_part *= form.STEP * units[part]
            k_part *= form.STEP * units[part]
        q_sum += q_part
        if ERASE:
            k_sum += k_part
    return q_sum, k_sum


@triton.jit
def _scores(inputs, strides, q_unit, k_unit, keys, gates, head, start, used, shape: tl.constexpr):
    """Inner products of the committed keys with q and k, a [SIZE] a block of records.

    With CHANNEL they are decayed from each record to the token; otherwise the same for all value
    heads of the key head, which decay them.

    q_unit, k_unit: what q and k are multiplied by, [1]. keys, gates: the ring's, of the head.
    """
    column = tl.arange(0, shape.KP)
    in_k = column < shape.K
    dtype: tl.constexpr = inputs.k.dtype.element_ty
    query = normalised(load_f32(inputs.q + column, in_k), q_unit, dtype, shape)
    key = normalised(load_f32(inputs.k + column, in_k), k_unit, dtype, shape)
    q_scores = ()
    k_scores = ()
    later = tl.zeros([shape.KP], tl.float32)
    if shape.CHANNEL:
        raw = load_f32(inputs.log_decay + head * strides.log_decay + column, in_k)
        later += channel_decay(raw, head, column, inputs, shape)
    for b in tl.static_range(shape.BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        place = wrapped(start - 1 - recent, shape.R)
        there = (recent < used)[:, None] & in_k[None, :]
        block = load_f32(keys + place[:, None] * shape.KEYS + column[None, :], there)
        if shape.CHANNEL:
            shifted = ((recent > 0) & (recent < used))[:, None] & in_k[None, :]
            newer = wrapped(start - recent, shape.R)
            newer = load_f32(gates + newer[:, None] * shape.GATES + column[None, :], shifted)
            block *= tl.exp(later[None, :] + tl.cumsum(newer, 0))
            later += tl.sum(newer, 0)
        q_scores = q_scores + (tl.sum(block * query[None, :], 1),)
        k_scores = k_scores + (tl.sum(block * key[None, :], 1) if shape.ERASE else 0.0,)
    return q_scores, k_scores


@triton.jit
def _total(gates, start, used, stride, shape: tl.constexpr):
    """Log-decay per channel over all committed records, as pieces [1, KI]."""
    total = zeros(1, shape)
    for b in tl.static_range(shape.BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        place = wrapped(start - 1 - recent, shape.R)
        block = load_rows(gates, place * stride, recent < used, shape)
        summed = ()
        for c in tl.static_range(shape.KC):
            summed = summed + (total[c] + tl.sum(block[c], 0)[None, :],)
        total = summed
    return total
