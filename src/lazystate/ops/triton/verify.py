"""Several tokens a row: all products with the view at once, on tensor cores (Eq. 10-13).

The vectors of a key head are the rows of one matrix: with erase first the T keys, then the T
queries; otherwise the queries. One triangular inverse a head turns what history returns for them
into corrections and outputs.
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
from lazystate.ops.triton.device import SIZE, load_f32, wrapped
from lazystate.ops.triton.formats import read_tile
from lazystate.ops.triton.gates import (
    channel_decay,
    load_gates,
    normalise_rows,
    normalised,
)
from lazystate.ops.triton.sketch import SKETCH, multiply_sketch


@triton.jit
def verify(
    part,
    key_head,
    stored,
    start,
    length,
    reach,
    used,
    inputs,
    strides,
    skip,
    out,
    state,
    ring,
    T: tl.constexpr,
    form: tl.constexpr,
    tiling: tl.constexpr,
    shape: tl.constexpr,
):
    """Outputs of `length` tokens for a program's tiles; their records, behind `used` others.

    form: of the states that are read. reach: outputs up to there are zeros behind `length`.
    """
    TH: tl.constexpr = 8 if shape.ERASE and T <= 8 else 16  # rows of keys
    TX: tl.constexpr = 2 * TH if shape.ERASE else TH  # rows of all vectors
    narrow: tl.constexpr = ring.k.dtype.element_ty.primitive_bitwidth == 16
    sketched: tl.constexpr = form.KIND == SKETCH

    index = tl.arange(0, TX)
    token = index % TH
    column = tl.arange(0, shape.KP)
    alive = token < length
    writes_row = alive & (index < TH)
    reads_row = alive & (index >= TX - TH)
    place = wrapped(start + token - shape.R, shape.R)
    own = load_tile(inputs.k, token * strides.token.k, writes_row, shape)
    x = load_tile(inputs.q, token * strides.token.q, reads_row, shape)
    own, k_unit = normalise_rows(own, 1.0, inputs.k.dtype.element_ty, shape)
    x, q_unit = normalise_rows(x, shape.gate.SCALE, inputs.k.dtype.element_ty, shape)
    if shape.ERASE:
        x += own
    # without a decay per channel the same for all heads that share the keys
    own_scores = 0.0
    past_scores = ()
    if not shape.CHANNEL:
        own_scores = dot_narrow(x, tl.trans(own), narrow)
        past_scores = _past_scores(x, ring, start, used, shape)
    # what is not finite is left out of products that multiply it by zeros, and put in where it is
    # to be: in its own token and later ones
    onward = ((token[:, None] <= token[None, :]) & (index < TH)[:, None]).to(tl.float32)
    mixing = tl.zeros([TX, TX], tl.float32)
    beta = tl.zeros([TX], tl.float32)
    upto = tl.zeros([TX], tl.float32)
    whole = 0.0
    reading = tl.zeros([TX, shape.KP if shape.CHANNEL else 1], tl.float32)
    weights = ()
    for _ in tl.static_range(shape.BLOCKS):
        weights = weights + (tl.zeros([TX, SIZE] if shape.CHANNEL else [SIZE], tl.float32),)
    for i in tl.range(0, tiling.TILES, num_stages=tiling.STAGES):
        n = part * tiling.TILES + i
        head = key_head * shape.GROUP + n // tiling.PER_HEAD
        channel = n % tiling.PER_HEAD * tiling.BV + tl.arange(0, tiling.BV)
        in_v = channel < shape.V
        at_v = head * shape.V + channel
        tile = 0.0
        if not sketched:
            tile = read_tile(state, at_v, in_v & stored, form, shape)
        if (i == 0) | (n % tiling.PER_HEAD == 0):
            mixing, beta, upto, whole, reading, weights = _prepare(
                x,
                k_unit,
                q_unit,
                own_scores,
                token,
                length,
                n % tiling.PER_HEAD == 0,
                inputs,
                strides,
                ring,
                head,
                place,
                start,
                used,
                TH,
                shape,
            )
        vectors = reading if shape.CHANNEL else x
        if sketched:
            known = multiply_sketch(state, head, channel, in_v & stored, vectors, form, shape)
        else:
            known = dot_exact(tile, tl.trans(vectors), narrow and not shape.CHANNEL)
        if not shape.CHANNEL:
            known *= whole
        for b in tl.static_range(shape.BLOCKS):
            recent = b * SIZE + tl.arange(0, SIZE)
            old = wrapped(start - 1 - recent, shape.R)
            values = load_f32(
                (ring.u if shape.ERASE else ring.v) + at_v[:, None] + old[None, :] * shape.VALUES,
                in_v[:, None] & (recent < used)[None, :],
            )
            if shape.CHANNEL:
                known += tl.dot(values, tl.trans(weights[b]), input_precision="tf32x3")
            else:
                known += dot_exact(values * weights[b][None, :], past_scores[b], False)
        if not shape.CHANNEL:
            known *= upto[None, :]
        at_in = (head * strides.head.v + channel)[:, None] + (token * strides.token.v)[None, :]
        values = load_f32(inputs.v + at_in, in_v[:, None] & alive[None, :])
        wanted = values - known if shape.ERASE else values
        wanted = tl.where(writes_row[None, :], wanted * beta[None, :], 0.0)
        broken = (tl.abs(wanted) < float("inf")) == 0
        mixed = tl.dot(tl.where(broken, 0.0, wanted), mixing, input_precision="tf32x3")
        reached = tl.dot(broken.to(tl.float32), onward, input_precision="tf32")
        mixed = tl.where(reached > 0, float("nan"), mixed)
        output = known + mixed
        if skip is not None:
            output += values * tl.load(skip + head).to(tl.float32)
        tl.store(
            out + at_v[:, None] + (token * shape.VALUES)[None, :],
            tl.where(alive[None, :], output, 0.0),
            mask=in_v[:, None] & ((index >= TX - TH) & (token < reach))[None, :],
        )
        at_ring = at_v[:, None] + (place * shape.VALUES)[None, :]
        written = in_v[:, None] & writes_row[None, :]
        if shape.ERASE:
            tl.store(ring.u + at_ring, mixed.to(ring.u.dtype.element_ty), mask=written)
        if shape.RAW or not shape.ERASE:
            tl.store(ring.v + at_ring, values.to(ring.v.dtype.element_ty), mask=written)
    if part == 0:
        tl.store(
            ring.k + place[:, None] * shape.KEYS + column[None, :],
            own.to(ring.k.dtype.element_ty),
            mask=writes_row[:, None] & (column < shape.K)[None, :],
        )


@triton.jit
def _prepare(
    x,
    k_unit,
    q_unit,
    own_scores,
    token,
    length,
    leading,
    inputs,
    strides,
    ring,
    head,
    place,
    start,
    used,
    TH: tl.constexpr,
    shape: tl.constexpr,
):
    """What all tiles of a head share; with `leading` also appends the head's gates.

    Returns:
        (mixing [TX, TX] as of `_mixing`, beta [TX], decay up to each vector [TX] and over the
        committed records, each 1 with CHANNEL, decayed vectors [TX, KP] with CHANNEL, weights of
        the records as of `_weights`).
    """
    TX: tl.constexpr = x.shape[0]
    index = tl.arange(0, TX)
    column = tl.arange(0, shape.KP)
    writes_row = (token < length) & (index < TH)
    at_decay = token * strides.token.log_decay
    at_beta = token * strides.token.beta
    log_decay, beta = load_gates(inputs, strides.head, head, at_decay, at_beta, writes_row, shape)
    step: tl.constexpr = shape.HV * shape.K if shape.CHANNEL else shape.HV
    whole = 1.0
    if shape.CHANNEL:
        scores = _channel_scores(inputs, strides, k_unit, q_unit, head, length, TH, shape)
        at_gate = inputs.log_decay + head * strides.head.log_decay
        gates = _channel_gates(at_gate, at_decay, writes_row, head, inputs, shape)
        prefix = tl.cumsum(gates, 0)
        if shape.ERASE:
            again = (token < length) & (index >= TH)
            again = _channel_gates(at_gate, at_decay, again, head, inputs, shape)
            prefix = tl.where((index < TH)[:, None], prefix, tl.cumsum(again, 0))
        reading = x * tl.exp(prefix)
        weights, total = _weights(reading, ring, head, start, used, shape)
        reading = reading * tl.exp(total)[None, :]
        upto = tl.full([TX], 1.0, tl.float32)
        tl.store(
            ring.log_decay + head * shape.K + place[:, None] * step + column[None, :],
            gates,
            mask=(writes_row & leading)[:, None] & (column < shape.K)[None, :],
        )
    else:
        newer = (token + 1 < length) & (index < TH)
        newer, _ = load_gates(
            inputs,
            strides.head,
            head,
            at_decay + strides.token.log_decay,
            at_beta + strides.token.beta,
            newer,
            shape,
        )
        scores = own_scores * tl.exp(segments(token, newer))
        earlier = (index[None, :] <= token[:, None]) & (index < TH)[None, :]
        upto = tl.exp(tl.sum(tl.where(earlier, log_decay[None, :], 0.0), 1))
        reading = tl.zeros([TX, 1], tl.float32)
        weights, total = _weights(reading, ring, head, start, used, shape)
        whole = tl.exp(total)
        tl.store(ring.log_decay + head + place * step, log_decay, mask=writes_row & leading)
    if shape.BETA and (shape.RAW or not shape.ERASE):
        tl.store(ring.beta + head + place * shape.HV, beta, mask=writes_row & leading)
    beta = tl.zeros([TX], tl.float32) + beta
    mixing = _mixing(scores, beta, token, length, TH, shape)
    return mixing, beta, upto, whole, reading, weights


@triton.jit
def _past_scores(x, ring, start, used, shape: tl.constexpr):
    """Products of the committed keys with all vectors, not decayed, a [16, TX] a block."""
    narrow: tl.constexpr = ring.k.dtype.element_ty.primitive_bitwidth == 16
    scores = ()
    for b in tl.static_range(shape.BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        old = wrapped(start - 1 - recent, shape.R)
        keys = load_tile(ring.k, old * shape.KEYS, recent < used, shape)
        scores = scores + (dot_narrow(keys, tl.trans(x), narrow),)
    return scores


@triton.jit
def _mixing(scores, beta, token, length, TH: tl.constexpr, shape: tl.constexpr):
    """From wanted writes to corrections (columns of keys) and their part of outputs (queries).

    scores: [TX, TX], decayed products of all vectors with the keys. Returns [writes in, rows out].
    """
    index = tl.arange(0, token.shape[0])
    is_key = index < TH
    older = index[None, :] < token[:, None]
    seen = older | (index[None, :] == token[:, None])
    seen = seen & (is_key & (index < length))[None, :]
    if shape.ERASE:
        lower = tl.where(is_key[:, None] & older & seen, scores, 0.0)
        strength = tl.sum(tl.where(index[:, None] == index[None, :], beta[None, :], 0.0), 1)
        lower *= strength[:, None]
        lower = tl.where(tl.abs(lower) < float("inf"), lower, 0.0)  # its token's write is not, too
        inverse = tl.where(is_key[:, None], inverted(lower, TH), 0.0)
        queries = tl.where((is_key == 0)[:, None] & seen, scores, 0.0)
        mixing = tl.trans(inverse + tl.dot(queries, inverse, input_precision="tf32x3"))
    else:
        mixing = tl.trans(tl.where(seen, scores, 0.0))
    return mixing


@triton.jit
def _weights(reading, ring, head, start, used, shape: tl.constexpr):
    """Weights of the committed records' writes, a block each, and the records' total log-decay.

    With CHANNEL [TX, 16], in each decayed vector; otherwise [16], before products with the keys.
    """
    weights = ()
    total = tl.zeros([shape.KP], tl.float32) if shape.CHANNEL else 0.0
    for b in tl.static_range(shape.BLOCKS):
        recent = b * SIZE + tl.arange(0, SIZE)
        there = recent < used
        old = wrapped(start - 1 - recent, shape.R)
        newer = wrapped(start - recent, shape.R)
        shifted = (recent > b * SIZE) & there
        if shape.CHANNEL:
            keys = load_tile(ring.k, old * shape.KEYS, there, shape)
            gates = load_tile(ring.log_decay + head * shape.G, newer * shape.GATES, shifted, shape)
            keys *= tl.exp(total[None, :] + tl.cumsum(gates, 0))
            total += tl.sum(
                load_tile(ring.log_decay + head * shape.G, old * shape.GATES, there, shape), 0
            )
            weight = tl.dot(reading, tl.trans(keys), input_precision="tf32x3")
            if shape.BETA and not shape.ERASE:
                weight *= load_f32(ring.beta + head + old * shape.HV, there)[None, :]
        else:
            gates = load_f32(ring.log_decay + head + newer * shape.HV, shifted)
            weight = tl.exp(total + tl.cumsum(gates, 0))
            total += tl.sum(load_f32(ring.log_decay + head + old * shape.HV, there), 0)
            if shape.BETA and not shape.ERASE:
                weight *= load_f32(ring.beta + head + old * shape.HV, there)
        weights = weights + (weight,)
    return weights, total


@triton.jit
def _channel_gates(base, at, there, head, inputs, shape: tl.constexpr):
    """Log-decays of tokens at base + at [n] as a tile [n, KP]; zeros where not there."""
    column = tl.arange(0, shape.KP)[None, :]
    gates = channel_decay(load_tile(base, at, there, shape), head, column, inputs, shape)
    return tl.where(there[:, None], gates, 0.0)


@triton.jit
def _channel_scores(
    inputs,
    strides,
    k_unit,
    q_unit,
    head,
    length,
    TH: tl.constexpr,
    shape: tl.constexpr,
):
    """Products of the tokens' keys with later vectors, decayed per channel in between.

    A walk along the tokens: every key seen so far decays by one token's gates at a time, so that
    nothing is divided and a reset stays exact.

    k_unit, q_unit: what keys and queries were multiplied by, [TX], each in its own rows.

    Returns:
        [TX, TX], vector t is a row and key s a column; zero where s is newer, and for keys also
        where it is the same.
    """
    TX: tl.constexpr = k_unit.shape[0]
    dtype: tl.constexpr = inputs.k.dtype.element_ty
    row = tl.arange(0, TX)
    column = tl.arange(0, shape.KP)
    in_k = column < shape.K
    gates = inputs.log_decay + head * strides.head.log_decay
    seen = tl.zeros([TX, shape.KP], tl.float32)
    out = tl.zeros([TX, TX], tl.float32)
    for t in tl.range(0, length, num_stages=2):
        key = load_f32(inputs.k + t * strides.token.k + column, in_k)
        gate = load_f32(gates + t * strides.token.log_decay + column, in_k)
        query = load_f32(inputs.q + t * strides.token.q + column, in_k)
        gate = channel_decay(gate, head, column, inputs, shape)
        key_unit = tl.sum(tl.where(row == t, k_unit, 0.0), 0)
        key = normalised(key, key_unit, dtype, shape)
        query_unit = tl.sum(tl.where(row == t + TX - TH, q_unit, 0.0), 0)
        query = normalised(query, query_unit, dtype, shape)
        seen *= tl.exp(gate)[None, :]
        if shape.ERASE:
            scores = tl.sum(seen * key[None, :], 1)
            out = tl.where(row[None, :] == t, scores[:, None], out)
        seen = tl.where(row[:, None] == t, key[None, :], seen)
        scores = tl.sum(seen * query[None, :], 1)
        out = tl.where(row[None, :] == t + TX - TH, scores[:, None], out)
    return tl.trans(out)
