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
    load_row,
    load_rows,
    store_row,
    wrapped,
    zeros,
)


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
    HAS_SKIP: tl.constexpr,
    RAW: tl.constexpr,
):
    """Outputs of one token for a program's tiles, and its record, behind `used` committed ones."""
    H: tl.constexpr = HV // GROUP
    G: tl.constexpr = K if CHANNEL else 1
    per_head: tl.constexpr = (V + BV - 1) // BV
    first = key_head * GROUP + part * TILES // per_head
    qs = load_row(inputs[0], True, K, KC, KI)
    ks = load_row(inputs[1], True, K, KC, KI)
    fresh_key = ks
    gate = ()
    early = ()
    if TILES == 1:  # on its way while the scores are formed
        at = (first * V + part % per_head * BV + tl.arange(0, BV)) * K
        early = load_rows(state, at, (at < (first + 1) * V * K) & stored, K, KC, KI)
    q_scores, k_scores = _scores(
        inputs,
        ring[0],
        ring[3] + first * G,
        inputs[3] + first * strides[3],
        start,
        used,
        H,
        HV,
        K,
        BLOCKS,
        R,
        ERASE,
        CHANNEL,
    )
    own = tl.sum(dot_k(ks, qs, KC), 0)
    if CHANNEL:
        gate = load_row(inputs[3] + first * strides[3], True, K, KC, KI)
        total = _total(ring[3] + first * G, start, used, HV * G, K, KC, KI, BLOCKS, R)
        since = add(total, gate, KC)
        qs = decayed(qs, since, KC)
        ks = decayed(ks, since, KC)
    for i in tl.range(0, TILES, num_stages=STAGES):
        n = part * TILES + i
        head = key_head * GROUP + n // per_head
        channel = n % per_head * BV + tl.arange(0, BV)
        in_v = tl.full([BV], 1, tl.int1) if V % BV == 0 else channel < V
        at_v = head * V + channel
        if TILES == 1:
            tile = early
        else:
            tile = load_rows(state, at_v * K, in_v & stored, K, KC, KI)
        vs = load_f32(inputs[2] + head * strides[2] + channel, in_v)
        strength = 1.0
        if HAS_BETA:
            strength = tl.load(inputs[4] + head * strides[4]).to(tl.float32)
        g = 0.0
        last = 0.0
        if not CHANNEL:
            g = tl.load(inputs[3] + head * strides[3])
            oldest = ring[3] + head + wrapped(start - used, R) * HV
            last = tl.load(oldest, mask=used > 0, other=0.0)
        q_past, k_past, later = _past(
            ring,
            head,
            at_v,
            in_v,
            start,
            used,
            g,
            q_scores,
            k_scores,
            HV,
            V,
            KI,
            BLOCKS,
            R,
            ERASE,
            CHANNEL,
            HAS_BETA,
        )
        scale = 1.0
        if not CHANNEL:
            scale = tl.exp(later + last)
        q_sum, k_sum = _read(tile, qs, ks, KC, ERASE)
        u = vs
        if ERASE:
            u -= tl.sum(k_sum * scale + k_past, 1)
        u = u * strength
        o = tl.sum(q_sum * scale + q_past, 1) + u * own
        if HAS_SKIP:
            o += vs * tl.load(skip + head).to(tl.float32)
        tl.store(out + at_v, o, mask=in_v)
        new = wrapped(start - R, R)
        if ERASE:
            tl.store(ring[2] + at_v + new * (HV * V), u.to(ring[2].dtype.element_ty), mask=in_v)
        if RAW or not ERASE:
            tl.store(ring[1] + at_v + new * (HV * V), vs.to(ring[1].dtype.element_ty), mask=in_v)
        leading = n % per_head == 0
        if not CHANNEL:
            tl.store(ring[3] + head + new * HV, g, mask=leading)
        if HAS_BETA and (RAW or not ERASE):
            tl.store(ring[4] + head + new * HV, strength, mask=leading)
    new = wrapped(start - R, R)
    store_row(ring[0] + new * (H * K), part == 0, fresh_key, K, KC, KI)
    if CHANNEL:
        leading = part % (per_head // TILES) == 0
        store_row(ring[3] + first * G + new * (HV * G), leading, gate, K, KC, KI)


@triton.jit
def _past(
    ring,
    head,
    at_v,
    in_v,
    start,
    used,
    later,
    q_scores,
    k_scores,
    HV: tl.constexpr,
    V: tl.constexpr,
    KI: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
):
    """What the committed records return for q and k, not yet summed -> two [BV, KI] (Eq. 10).

    later: log-decay of the token itself. Also returns its sum with all records' but the oldest's.
    """
    q_past = tl.zeros([at_v.shape[0], KI], tl.float32)
    k_past = tl.zeros([at_v.shape[0], KI], tl.float32)
    for b in tl.static_range(BLOCKS):
        recent = b * KI + tl.arange(0, KI)
        there = recent < used
        place = wrapped(start - 1 - recent, R)
        values = load_f32(
            (ring[2] if ERASE else ring[1]) + at_v[:, None] + place[None, :] * (HV * V),
            in_v[:, None] & there[None, :],
        )
        weight = tl.full([KI], 1.0, tl.float32)
        if not CHANNEL:
            newer = ring[3] + head + wrapped(start - recent, R) * HV
            newer = load_f32(newer, (recent > 0) & there)
            weight = tl.exp(later + tl.cumsum(newer, 0))
            later += tl.sum(newer, 0)
        if HAS_BETA and not ERASE:
            weight *= load_f32(ring[4] + head + place * HV, there)
        q_past += values * (q_scores[b] * weight)[None, :]
        if ERASE:
            k_past += values * (k_scores[b] * weight)[None, :]
    return q_past, k_past, later


@triton.jit
def _read(tile, qs, ks, KC: tl.constexpr, ERASE: tl.constexpr):
    """Products of a tile with q and k, not yet summed along K -> two [BV, KI]."""
    q_sum = tile[0] * qs[0]
    k_sum = tile[0] * ks[0]
    for c in tl.static_range(1, KC):
        q_sum += tile[c] * qs[c]
        if ERASE:
            k_sum += tile[c] * ks[c]
    return q_sum, k_sum


@triton.jit
def _scores(
    inputs,
    keys,
    gates,
    gate,
    start,
    used,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
):
    """Inner products of the committed keys with q and k, a [SIZE] a block of records.

    With CHANNEL they are decayed from each record to the token; otherwise the same for all value
    heads of the key head, which decay them.
    """
    KP: tl.constexpr = triton.next_power_of_2(K)
    column = tl.arange(0, KP)
    in_k = column < K
    query = load_f32(inputs[0] + column, in_k)
    key = load_f32(inputs[1] + column, in_k)
    q_scores = ()
    k_scores = ()
    later = tl.zeros([KP], tl.float32)
    if CHANNEL:
        later += load_f32(gate + column, in_k)
    for b in tl.static_range(BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        place = wrapped(start - 1 - recent, R)
        there = (recent < used)[:, None] & in_k[None, :]
        block = load_f32(keys + place[:, None] * (H * K) + column[None, :], there)
        if CHANNEL:
            shifted = ((recent > 0) & (recent < used))[:, None] & in_k[None, :]
            newer = wrapped(start - recent, R)
            newer = load_f32(gates + newer[:, None] * (HV * K) + column[None, :], shifted)
            block *= tl.exp(later[None, :] + tl.cumsum(newer, 0))
            later += tl.sum(newer, 0)
        q_scores = q_scores + (tl.sum(block * query[None, :], 1),)
        k_scores = k_scores + (tl.sum(block * key[None, :], 1) if ERASE else 0.0,)
    return q_scores, k_scores


@triton.jit
def _total(
    gates,
    start,
    used,
    stride,
    K: tl.constexpr,
    KC: tl.constexpr,
    KI: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
):
    """Log-decay per channel over all committed records, as pieces [1, KI]."""
    total = zeros(1, KC, KI)
    for b in tl.static_range(BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        place = wrapped(start - 1 - recent, R)
        block = load_rows(gates, place * stride, recent < used, K, KC, KI)
        summed = ()
        for c in tl.static_range(KC):
            summed = summed + (total[c] + tl.sum(block[c], 0)[None, :],)
        total = summed
    return total
