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
    load_tile,
    segments,
    substitute,
)
from lazystate.ops.triton.device import load_f32, wrapped

SIZE = tl.constexpr(16)  # records of a block of history
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
    G: tl.constexpr = K if CHANNEL else 1
    H: tl.constexpr = HV // GROUP
    TH: tl.constexpr = 8 if ERASE and T <= 8 else 16  # rows of keys
    TX: tl.constexpr = 2 * TH if ERASE else TH  # rows of all vectors
    per_head: tl.constexpr = (V + BV - 1) // BV
    heads: tl.constexpr = (TILES + per_head - 1) // per_head
    tiles: tl.constexpr = TILES // heads
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
    if part == 0:
        tl.store(
            ring[0] + place[:, None] * (H * K) + column[None, :],
            own.to(ring[0].dtype.element_ty),
            mask=writes_row[:, None] & (column < K)[None, :],
        )
    for i in range(heads):
        n = part * TILES + i * tiles
        head = key_head * GROUP + n // per_head
        first_tile = n % per_head == 0
        gate_in = inputs[3] + head * head_strides[3]
        if CHANNEL:
            scores, prefix, _, _ = channel_scores(
                x,
                token,
                inputs[1],
                gate_in,
                token_strides[1],
                token_strides[3],
                0,
                length,
                FAR,
                K,
                TX,
            )
            at_gate = ring[3] + head * G + place[:, None] * (HV * G) + column[None, :]
            gates = load_tile(gate_in, token * token_strides[3], writes_row & first_tile, K, KP)
            kept = (writes_row & first_tile)[:, None] & (column < K)[None, :]
            tl.store(at_gate, gates, mask=kept)
            reading = x * tl.exp(prefix)
        else:
            gates = load_f32(gate_in + token * token_strides[3], writes_row)
            newer = load_f32(
                gate_in + (token + 1) * token_strides[3], (token + 1 < length) & (index < TH)
            )
            tl.store(ring[3] + head + place * HV, gates, mask=writes_row & first_tile)
            scores = dot_narrow(x, tl.trans(own), narrow) * tl.exp(segments(token, newer))
            upto = (index[None, :] <= token[:, None]) & (index < TH)[None, :]
            prefix = tl.sum(tl.where(upto, gates[None, :], 0.0), 1)
            reading = x
        beta = tl.full([TX], 1.0, tl.float32)
        if HAS_BETA:
            beta = load_f32(
                inputs[4] + head * head_strides[4] + token * token_strides[4], writes_row
            )
            if RAW or not ERASE:
                tl.store(ring[4] + head + place * HV, beta, mask=writes_row & first_tile)
        mixing = _mixing(scores, beta, token, length, TH, T, ERASE)
        weights, total = _history(
            reading,
            prefix,
            ring,
            head,
            start,
            used,
            HV,
            GROUP,
            K,
            BLOCKS,
            R,
            ERASE,
            CHANNEL,
            HAS_BETA,
        )
        scale = prefix
        if CHANNEL:
            reading = reading * tl.exp(total)[None, :]
        else:
            scale = tl.exp(prefix + total)
        for m in tl.range(0, tiles, num_stages=STAGES):
            channel = (n + m) % per_head * BV + tl.arange(0, BV)
            in_v = channel < V
            at_v = head * V + channel
            tile = load_tile(state, at_v * K, in_v & stored, K, KP)
            known = dot_exact(tile, tl.trans(reading), narrow and not CHANNEL)
            if not CHANNEL:
                known *= scale[None, :]
            for b in tl.static_range(BLOCKS):
                recent = b * SIZE + tl.arange(0, SIZE)
                old = wrapped(start - 1 - recent, R)
                values = load_f32(
                    (ring[2] if ERASE else ring[1]) + at_v[:, None] + old[None, :] * (HV * V),
                    in_v[:, None] & (recent < used)[None, :],
                )
                known += tl.dot(values, tl.trans(weights[b]), input_precision="tf32x3")
            at_in = (head * head_strides[2] + channel)[:, None] + (token * token_strides[2])[
                None, :
            ]
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


@triton.jit
def _mixing(scores, beta, token, length, TH: tl.constexpr, T: tl.constexpr, ERASE: tl.constexpr):
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
        inverse = substitute(lower * strength[:, None], T)
        queries = tl.where((is_key == 0)[:, None] & seen, scores, 0.0)
        keys_only = tl.where(is_key[None, :], inverse, 0.0)
        mixing = keys_only + tl.dot(keys_only, tl.trans(queries), input_precision="tf32x3")
    else:
        mixing = tl.trans(tl.where(seen, scores, 0.0))
    return mixing


@triton.jit
def _history(
    reading,
    prefix,
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
    """Weights of the committed records' writes in each row, a [TX, 16] a block, and their total
    log-decay.
    """
    KP: tl.constexpr = reading.shape[1]
    G: tl.constexpr = K if CHANNEL else 1
    narrow: tl.constexpr = ring[0].dtype.element_ty.primitive_bitwidth == 16
    weights = ()
    if CHANNEL:
        total = tl.zeros([KP], tl.float32)
    else:
        total = 0.0
    for b in tl.static_range(BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        there = recent < used
        old = wrapped(start - 1 - recent, R)
        newer = wrapped(start - recent, R)
        shifted = (recent > b * SIZE) & there
        keys = load_tile(ring[0], old * (HV // GROUP * K), there, K, KP)
        if CHANNEL:
            gates = load_tile(ring[3] + head * G, newer * (HV * G), shifted, K, KP)
            keys *= tl.exp(total[None, :] + tl.cumsum(gates, 0))
            total += tl.sum(load_tile(ring[3] + head * G, old * (HV * G), there, K, KP), 0)
            weight = tl.dot(reading, tl.trans(keys), input_precision="tf32x3")
        else:
            gates = load_f32(ring[3] + head + newer * HV, shifted)
            decay = total + tl.cumsum(gates, 0)
            total += tl.sum(load_f32(ring[3] + head + old * HV, there), 0)
            weight = dot_narrow(reading, tl.trans(keys), narrow)
            weight *= tl.exp(prefix[:, None] + decay[None, :])
        if HAS_BETA and not ERASE:
            weight *= load_f32(ring[4] + head + old * HV, there)[None, :]
        weights = weights + (weight,)
    return weights, total
