"""Several tokens a row: all products with the view at once, on tensor cores (Eq. 10-13).

The vectors of a key head are the rows of one matrix: with erase first the T keys, then the T
queries; otherwise the queries. One triangular inverse a head turns what history returns for them
into corrections and outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.block import (
    channel_scores,
    dot_exact,
    dot_narrow,
    inverted,
    load_tile,
    segments,
)
from lazystate.ops.triton.device import SIZE, load_f32, wrapped

FAR = tl.constexpr(1 << 30)  # a ring that never wraps: the step's own tokens


@triton.jit
def verify(
    part,
    key_head,
    stored,
    start,
    length,
    used,
    inputs,
    token_strides,
    head_strides,
    skip,
    out,
    state,
    ring,
    T: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
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
    """Outputs of `length` tokens for a program's tiles; their records, behind `used` others."""
    KP: tl.constexpr = triton.next_power_of_2(K)
    H: tl.constexpr = HV // GROUP
    TH: tl.constexpr = 8 if ERASE and T <= 8 else 16  # rows of keys
    TX: tl.constexpr = 2 * TH if ERASE else TH  # rows of all vectors
    per_head: tl.constexpr = (V + BV - 1) // BV
    narrow: tl.constexpr = ring[0].dtype.element_ty.primitive_bitwidth == 16

    index = tl.arange(0, TX)
    token = index % TH
    column = tl.arange(0, KP)
    alive = token < length
    writes_row = alive & (index < TH)
    reads_row = alive & (index >= TX - TH)
    place = wrapped(start + token - R, R)
    own = load_tile(inputs[1], token * token_strides[1], writes_row, K, KP)
    x = load_tile(inputs[0], token * token_strides[0], reads_row, K, KP)
    if ERASE:
        x += own
    # without a decay per channel the same for all heads that share the keys
    own_scores = 0.0
    past_scores = ()
    if not CHANNEL:
        own_scores = dot_narrow(x, tl.trans(own), narrow)
        past_scores = _past_scores(x, ring, start, used, H, K, BLOCKS, R)
    mixing = tl.zeros([TX, TX], tl.float32)
    beta = tl.zeros([TX], tl.float32)
    upto = tl.zeros([TX], tl.float32)
    whole = 0.0
    reading = tl.zeros([TX, KP if CHANNEL else 1], tl.float32)
    weights = ()
    for _ in tl.static_range(BLOCKS):
        weights = weights + (tl.zeros([TX, SIZE] if CHANNEL else [SIZE], tl.float32),)
    for i in tl.range(0, TILES, num_stages=STAGES):
        n = part * TILES + i
        head = key_head * GROUP + n // per_head
        channel = n % per_head * BV + tl.arange(0, BV)
        in_v = channel < V
        at_v = head * V + channel
        tile = load_tile(state, at_v * K, in_v & stored, K, KP)
        if (i == 0) | (n % per_head == 0):
            mixing, beta, upto, whole, reading, weights = _prepare(
                x,
                own_scores,
                token,
                length,
                n % per_head == 0,
                inputs,
                token_strides,
                head_strides,
                ring,
                head,
                place,
                start,
                used,
                HV,
                GROUP,
                K,
                TH,
                BLOCKS,
                R,
                ERASE,
                CHANNEL,
                HAS_BETA,
                RAW,
            )
        known = dot_exact(tile, tl.trans(reading if CHANNEL else x), narrow and not CHANNEL)
        if not CHANNEL:
            known *= whole
        for b in tl.static_range(BLOCKS):
            recent = b * SIZE + tl.arange(0, SIZE)
            old = wrapped(start - 1 - recent, R)
            values = load_f32(
                (ring[2] if ERASE else ring[1]) + at_v[:, None] + old[None, :] * (HV * V),
                in_v[:, None] & (recent < used)[None, :],
            )
            if CHANNEL:
                known += tl.dot(values, tl.trans(weights[b]), input_precision="tf32x3")
            else:
                known += dot_exact(values * weights[b][None, :], past_scores[b], False)
        if not CHANNEL:
            known *= upto[None, :]
        at_in = (head * head_strides[2] + channel)[:, None] + (token * token_strides[2])[None, :]
        values = load_f32(inputs[2] + at_in, in_v[:, None] & alive[None, :])
        wanted = values - known if ERASE else values
        wanted = tl.where(writes_row[None, :], wanted * beta[None, :], 0.0)
        mixed = tl.dot(wanted, mixing, input_precision="tf32x3")
        output = known + mixed
        if HAS_SKIP:
            output += values * tl.load(skip + head).to(tl.float32)
        tl.store(
            out + at_v[:, None] + (token * (HV * V))[None, :],
            tl.where(alive[None, :], output, 0.0),
            mask=in_v[:, None] & ((index >= TX - TH) & (token < T))[None, :],
        )
        at_ring = at_v[:, None] + (place * (HV * V))[None, :]
        written = in_v[:, None] & writes_row[None, :]
        if ERASE:
            tl.store(ring[2] + at_ring, mixed.to(ring[2].dtype.element_ty), mask=written)
        if RAW or not ERASE:
            tl.store(ring[1] + at_ring, values.to(ring[1].dtype.element_ty), mask=written)
    if part == 0:
        tl.store(
            ring[0] + place[:, None] * (H * K) + column[None, :],
            own.to(ring[0].dtype.element_ty),
            mask=writes_row[:, None] & (column < K)[None, :],
        )


@triton.jit
def _prepare(
    x,
    own_scores,
    token,
    length,
    leading,
    inputs,
    token_strides,
    head_strides,
    ring,
    head,
    place,
    start,
    used,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    TH: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    RAW: tl.constexpr,
):
    """What all tiles of a head share; with `leading` also appends the head's gates.

    Returns:
        (mixing [TX, TX] as of `_mixing`, beta [TX], decay up to each vector [TX] and over the
        committed records, each 1 with CHANNEL, decayed vectors [TX, KP] with CHANNEL, weights of
        the records as of `_weights`).
    """
    TX: tl.constexpr = x.shape[0]
    KP: tl.constexpr = x.shape[1]
    index = tl.arange(0, TX)
    column = tl.arange(0, KP)
    writes_row = (token < length) & (index < TH)
    at_gate = inputs[3] + head * head_strides[3]
    step: tl.constexpr = HV * K if CHANNEL else HV
    whole = 1.0
    if CHANNEL:
        scores = channel_scores(
            inputs[0],
            inputs[1],
            at_gate,
            token_strides[0],
            token_strides[1],
            token_strides[3],
            0,
            length,
            FAR,
            K,
            TX,
            0 if ERASE else -1,
            TX - TH,
        )
        scores = tl.trans(scores)
        gates = load_tile(at_gate, token * token_strides[3], writes_row, K, KP)
        prefix = tl.cumsum(gates, 0)
        if ERASE:
            again = (token < length) & (index >= TH)
            again = load_tile(at_gate, token * token_strides[3], again, K, KP)
            prefix = tl.where((index < TH)[:, None], prefix, tl.cumsum(again, 0))
        reading = x * tl.exp(prefix)
        weights, total = _weights(
            reading, ring, head, start, used, HV, GROUP, K, BLOCKS, R, ERASE, CHANNEL, HAS_BETA
        )
        reading = reading * tl.exp(total)[None, :]
        upto = tl.full([TX], 1.0, tl.float32)
        tl.store(
            ring[3] + head * K + place[:, None] * step + column[None, :],
            gates,
            mask=(writes_row & leading)[:, None] & (column < K)[None, :],
        )
    else:
        gates = load_f32(at_gate + token * token_strides[3], writes_row)
        newer = (token + 1 < length) & (index < TH)
        newer = load_f32(at_gate + (token + 1) * token_strides[3], newer)
        scores = own_scores * tl.exp(segments(token, newer))
        earlier = (index[None, :] <= token[:, None]) & (index < TH)[None, :]
        upto = tl.exp(tl.sum(tl.where(earlier, gates[None, :], 0.0), 1))
        reading = tl.zeros([TX, 1], tl.float32)
        weights, total = _weights(
            reading, ring, head, start, used, HV, GROUP, K, BLOCKS, R, ERASE, CHANNEL, HAS_BETA
        )
        whole = tl.exp(total)
        tl.store(ring[3] + head + place * step, gates, mask=writes_row & leading)
    beta = tl.full([TX], 1.0, tl.float32)
    if HAS_BETA:
        beta = inputs[4] + head * head_strides[4] + token * token_strides[4]
        beta = load_f32(beta, writes_row)
        if RAW or not ERASE:
            tl.store(ring[4] + head + place * HV, beta, mask=writes_row & leading)
    mixing = _mixing(scores, beta, token, length, TH, ERASE)
    return mixing, beta, upto, whole, reading, weights


@triton.jit
def _past_scores(
    x,
    ring,
    start,
    used,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
):
    """Products of the committed keys with all vectors, not decayed, a [16, TX] a block."""
    narrow: tl.constexpr = ring[0].dtype.element_ty.primitive_bitwidth == 16
    scores = ()
    for b in tl.static_range(BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        old = wrapped(start - 1 - recent, R)
        keys = load_tile(ring[0], old * (H * K), recent < used, K, x.shape[1])
        scores = scores + (dot_narrow(keys, tl.trans(x), narrow),)
    return scores


@triton.jit
def _mixing(scores, beta, token, length, TH: tl.constexpr, ERASE: tl.constexpr):
    """From wanted writes to corrections (columns of keys) and their part of outputs (queries).

    scores: [TX, TX], decayed products of all vectors with the keys. Returns [writes in, rows out].
    """
    index = tl.arange(0, token.shape[0])
    is_key = index < TH
    older = index[None, :] < token[:, None]
    seen = older | (index[None, :] == token[:, None])
    seen = seen & (is_key & (index < length))[None, :]
    if ERASE:
        lower = tl.where(is_key[:, None] & older & seen, scores, 0.0)
        strength = tl.sum(tl.where(index[:, None] == index[None, :], beta[None, :], 0.0), 1)
        inverse = tl.where(is_key[:, None], inverted(lower * strength[:, None], TH), 0.0)
        queries = tl.where((is_key == 0)[:, None] & seen, scores, 0.0)
        mixing = tl.trans(inverse + tl.dot(queries, inverse, input_precision="tf32x3"))
    else:
        mixing = tl.trans(tl.where(seen, scores, 0.0))
    return mixing


@triton.jit
def _weights(
    reading,
    ring,
    head,
    start,
    used,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
):
    """Weights of the committed records' writes, a block each, and the records' total log-decay.

    With CHANNEL [TX, 16], in each decayed vector; otherwise [16], before products with the keys.
    """
    KP: tl.constexpr = reading.shape[1]
    G: tl.constexpr = K if CHANNEL else 1
    weights = ()
    total = tl.zeros([KP], tl.float32) if CHANNEL else 0.0
    for b in tl.static_range(BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        there = recent < used
        old = wrapped(start - 1 - recent, R)
        newer = wrapped(start - recent, R)
        shifted = (recent > b * SIZE) & there
        if CHANNEL:
            keys = load_tile(ring[0], old * (HV // GROUP * K), there, K, KP)
            gates = load_tile(ring[3] + head * G, newer * (HV * G), shifted, K, KP)
            keys *= tl.exp(total[None, :] + tl.cumsum(gates, 0))
            total += tl.sum(load_tile(ring[3] + head * G, old * (HV * G), there, K, KP), 0)
            weight = tl.dot(reading, tl.trans(keys), input_precision="tf32x3")
            if HAS_BETA and not ERASE:
                weight *= load_f32(ring[4] + head + old * HV, there)[None, :]
        else:
            gates = load_f32(ring[3] + head + newer * HV, shifted)
            weight = tl.exp(total + tl.cumsum(gates, 0))
            total += tl.sum(load_f32(ring[3] + head + old * HV, there), 0)
            if HAS_BETA and not ERASE:
                weight *= load_f32(ring[4] + head + old * HV, there)
        weights = weights + (weight,)
    return weights, total
