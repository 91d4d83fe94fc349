"""The step kernel: outputs of T tokens, the append, and the fold of rows that are due (Eq. 8-14).

One program serves a tile of BV value channels of a few value heads that share a key head. It reads
its tile of the checkpoint once and never forms a state, except on a row that folds: there it
replays the committed records through the recurrence itself (Eq. 1, 2), stores the tile, and goes on
from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.device import (
    add,
    advance,
    decayed,
    dot_k,
    history,
    load_f32,
    load_row,
    load_rows,
    scores_of,
    store_row,
    store_rows,
    wrapped,
    zeros,
)


@triton.jit
def step_kernel(
    meta,
    folds,
    q,
    k,
    v,
    log_decay,
    beta,
    skip,
    out,
    checkpoint,
    ring_k,
    ring_v,
    ring_u,
    ring_g,
    ring_b,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    g_row,
    g_token,
    g_head,
    b_row,
    b_token,
    b_head,
    state_slot,
    ring_k_slot,
    ring_v_slot,
    ring_u_slot,
    ring_g_slot,
    ring_b_slot,
    T: tl.constexpr,
    TP: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    KC: tl.constexpr,
    KI: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    RAW: tl.constexpr,
    WHICH: tl.constexpr,
):
    """One model step of one layer; WHICH rows: 0 those that do not fold, 1 those that do, 2 all.

    meta: int64 [B, 8] rows, see `Rows`. folds: int32 [1 + B], the number of folding rows and their
    batch rows. The other pointers are the arguments of `Backend.step` and the ring's tensors;
    strides in elements, all behind a head dense.
    """
    H: tl.constexpr = HV // GROUP
    G: tl.constexpr = K if CHANNEL else 1
    tiles: tl.constexpr = (V + BV - 1) // BV
    chunks: tl.constexpr = GROUP // HEADS
    pid = tl.program_id(0)
    tile = pid % tiles
    chunk = (pid // tiles) % chunks
    key_head = (pid // (tiles * chunks)) % H
    row = pid // (tiles * chunks * H)
    if WHICH == 1:
        if row >= tl.load(folds):
            return
        row = tl.load(folds + 1 + row)
    row = row.to(tl.int64)
    slot = tl.load(meta + row * 8)
    held = tl.load(meta + row * 8 + 1).to(tl.int32)
    length = tl.load(meta + row * 8 + 3).to(tl.int32)
    due = tl.load(meta + row * 8 + 4) != 0
    stored = tl.load(meta + row * 8 + 5) == 0
    start = tl.load(meta + row * 8 + 6).to(tl.int32)
    if WHICH == 0 and due:
        return
    head0 = key_head * GROUP + chunk * HEADS
    channel = tile * BV + tl.arange(0, BV)
    in_v = tl.full([BV], 1, tl.int1) if V % BV == 0 else channel < V
    if (slot < 0) | (length == 0):
        for i in tl.static_range(HEADS):
            for s in range(T):
                at = ((row * T + s) * HV + head0 + i) * V + channel
                tl.store(out + at, tl.zeros([BV], out.dtype.element_ty), mask=in_v)
        return

    # Committed records, newest first; a folding row goes on from its folded tile instead.
    recent = tl.arange(0, LP)
    used = tl.where(due, 0, held) if WHICH == 2 else held
    there = recent < used
    place = wrapped(start - 1 - recent, R)
    ring_k += slot * ring_k_slot + key_head * K
    keys = ()
    if WHICH != 1:
        keys = load_rows(ring_k, place * (H * K), there, K, KC, KI)

    query_in = q + row * q_row + key_head * q_head
    key_in = k + row * k_row + key_head * k_head
    if T == 1:
        qs = load_row(query_in, True, K, KC, KI)
        ks = load_row(key_in, True, K, KC, KI)
        q_scores = scores_of(keys, qs, KC, CHANNEL, WHICH != 1)
        k_scores = scores_of(keys, ks, KC, CHANNEL, WHICH != 1 and ERASE)

    for i in tl.static_range(HEADS):
        head = head0 + i
        at_v = head * V + channel
        tile_base = checkpoint + slot * state_slot
        state = load_rows(tile_base, at_v * K, in_v & stored, K, KC, KI)
        head_v = ring_v + slot * ring_v_slot + at_v
        head_u = ring_u + slot * ring_u_slot + at_v
        head_g = ring_g + slot * ring_g_slot + head * G
        head_b = ring_b + slot * ring_b_slot + head
        if WHICH != 0:
            for j in range(tl.where(due, held, 0)):
                old = wrapped(start - held + j, R)
                values_at = head_v if RAW else head_u
                gate = (
                    load_row(head_g + old * (HV * G), True, K, KC, KI)
                    if CHANNEL
                    else tl.load(head_g + old * HV)
                )
                strength = tl.load(head_b + old * HV) if HAS_BETA and RAW else 1.0
                state = advance(
                    state,
                    load_row(ring_k + old * (H * K), True, K, KC, KI),
                    load_f32(values_at + old * (HV * V), in_v),
                    gate,
                    strength,
                    KC,
                    ERASE and RAW,
                    CHANNEL,
                )
            store_rows(tile_base, at_v * K, in_v & due, state, K, KC, KI)
        values, after, total, weighted = _records(
            head_u if ERASE else head_v,
            head_g,
            head_b,
            keys,
            place,
            wrapped(start - recent, R),
            recent,
            used,
            in_v,
            HV * V,
            HV * G,
            HV,
            K,
            KC,
            KI,
            CHANNEL,
            HAS_BETA and not ERASE,
            WHICH != 1,
        )

        # The step's own tokens, one after the other: U holds their writes, segment the log-decay
        # from each of them to the current one.
        column = tl.arange(0, TP)
        U = tl.zeros([TP, BV], tl.float32)
        own = ()
        if T > 1:
            own = load_rows(key_in, column * k_token, column < length, K, KC, KI)
        segment = zeros(TP, KC, KI) if CHANNEL else tl.zeros([TP], tl.float32)
        prefix = zeros(1, KC, KI) if CHANNEL else 0.0
        for s in range(T):
            alive = s < length
            if T > 1:
                qs = load_row(query_in + s * q_token, alive, K, KC, KI)
                ks = load_row(key_in + s * k_token, alive, K, KC, KI)
                q_scores = scores_of(keys, qs, KC, CHANNEL, WHICH != 1)
                k_scores = scores_of(keys, ks, KC, CHANNEL, WHICH != 1 and ERASE)
            vs = load_f32(v + row * v_row + s * v_token + head * v_head + channel, in_v & alive)
            gate_in = log_decay + row * g_row + s * g_token + head * g_head
            if CHANNEL:
                g = load_row(gate_in, alive, K, KC, KI)
                prefix = add(prefix, g, KC)
                longer = ()
                for c in tl.static_range(KC):
                    longer = longer + (tl.where((column < s)[:, None], segment[c] + g[c], 0.0),)
                segment = longer
            else:
                g = load_f32(gate_in, alive)
                prefix = prefix + g
                segment = tl.where(column < s, segment + g, 0.0)
            strength = 1.0
            if HAS_BETA:
                strength = load_f32(beta + row * b_row + s * b_token + head * b_head, alive)
            u = vs
            if ERASE:
                u -= history(
                    ks,
                    k_scores,
                    state,
                    weighted,
                    values,
                    after,
                    total,
                    prefix,
                    KC,
                    CHANNEL,
                    WHICH != 1,
                )
                if T > 1:
                    inner = _inner(own, ks, segment, KC, CHANNEL)
                    u -= tl.sum(U * tl.where(column < s, inner, 0.0)[:, None], 0)
            u = u * strength
            o = history(
                qs,
                q_scores,
                state,
                weighted,
                values,
                after,
                total,
                prefix,
                KC,
                CHANNEL,
                WHICH != 1,
            )
            if T > 1:
                U = tl.where((column == s)[:, None], u[None, :], U)
                inner = _inner(own, qs, segment, KC, CHANNEL)
                o += tl.sum(U * tl.where(column <= s, inner, 0.0)[:, None], 0)
            else:
                o += u * tl.sum(dot_k(ks, qs, KC), 0)
            if HAS_SKIP:
                o += vs * tl.load(skip + head).to(tl.float32)
            tl.store(out + ((row * T + s) * HV + head) * V + channel, tl.where(alive, o, 0.0), in_v)
            new = wrapped(start + s - R, R)
            if ERASE:
                tl.store(head_u + new * (HV * V), u.to(ring_u.dtype.element_ty), in_v & alive)
            if RAW or not ERASE:
                tl.store(head_v + new * (HV * V), vs.to(ring_v.dtype.element_ty), in_v & alive)
            if tile == 0:
                if CHANNEL:
                    store_row(head_g + new * (HV * G), alive, g, K, KC, KI)
                else:
                    tl.store(head_g + new * HV, g, mask=alive)
                if HAS_BETA and (RAW or not ERASE):
                    tl.store(head_b + new * HV, strength, mask=alive)
                if (i == 0) & (chunk == 0):
                    store_row(ring_k + new * (H * K), alive, ks, K, KC, KI)


@triton.jit
def _records(
    writes,
    gates,
    strengths,
    keys,
    place,
    newer,
    recent,
    used,
    in_v,
    write_stride,
    gate_stride,
    strength_stride,
    K: tl.constexpr,
    KC: tl.constexpr,
    KI: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_STRENGTH: tl.constexpr,
    RING: tl.constexpr,
):
    """The committed records as `history` wants them: (values, after, total, keys).

    The gates are read shifted by one record (`newer`), so that their inclusive sum is the log-decay
    over the records newer than each: no difference is taken, and a reset stays exact.
    """
    values = 0.0
    after = 0.0
    total = zeros(1, KC, KI) if CHANNEL else 0.0
    if RING:
        there = recent < used
        shifted = (recent > 0) & (recent <= used)
        values = load_f32(
            writes[None, :] + (place * write_stride)[:, None],
            there[:, None] & in_v[None, :],
        )
        if HAS_STRENGTH:
            values = values * load_f32(strengths + place * strength_stride, there)[:, None]
        if CHANNEL:
            since = load_rows(gates, newer * gate_stride, shifted, K, KC, KI)
            every = load_rows(gates, place * gate_stride, there, K, KC, KI)
            weighted = ()
            total = ()
            for c in tl.static_range(KC):
                weighted = weighted + (keys[c] * tl.exp(tl.cumsum(since[c], 0)),)
                total = total + (tl.sum(every[c], 0)[None, :],)
            keys = weighted
        else:
            after = tl.exp(tl.cumsum(load_f32(gates + newer * gate_stride, shifted), 0))
            total = tl.sum(load_f32(gates + place * gate_stride, there), 0)
    return values, after, total, keys


@triton.jit
def _inner(own, x, segment, KC: tl.constexpr, CHANNEL: tl.constexpr):
    """Decayed inner products of the step's own keys with x (Eq. 11) -> [TP]."""
    if CHANNEL:
        inner = dot_k(decayed(own, segment, KC), x, KC)
    else:
        inner = dot_k(own, x, KC) * tl.exp(segment)
    return inner
