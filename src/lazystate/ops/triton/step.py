"""The step kernel: outputs of T tokens, the append, and the fold of rows that are due (Eq. 8-14).

One program serves a tile of BV value channels of a few value heads that share a key head. It reads
its tile of the checkpoint once and never forms a state, except on a row that folds: there it
replays the committed records through the recurrence itself (Eq. 1, 2), stores the tile, and goes on
from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.device import advance, chunked, dot_k, load_f32


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

    meta: int64 [B, 6] rows (slot, committed h, tokens seen, length, folds, empty). folds: int32
    [1 + B], the number of folding rows and their batch rows; the other pointers are as in
    `lazystate.ops.step`, strides in elements, everything behind a head dense.
    """
    H: tl.constexpr = HV // GROUP
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
    slot = tl.load(meta + row * 6)
    due = tl.load(meta + row * 6 + 4)
    length = tl.load(meta + row * 6 + 3)
    if WHICH == 0 and due != 0:
        return
    head0 = key_head * GROUP + chunk * HEADS
    channel = tile * BV + tl.arange(0, BV)
    in_v = channel < V
    if (slot < 0) | (length == 0):
        for i in tl.static_range(HEADS):
            for s in range(T):
                at = ((row * T + s) * HV + head0 + i) * V + channel
                tl.store(out + at, tl.zeros([BV], tl.float32), mask=in_v)
        return
    held = tl.load(meta + row * 6 + 1)
    seen = tl.load(meta + row * 6 + 2)
    stored = tl.load(meta + row * 6 + 5) == 0
    ki = chunked(KC, KI)
    in_k = ki < K

    # Committed records, newest first; a folding row goes on from its folded tile instead.
    recent = tl.arange(0, LP)
    used = held
    if WHICH == 2:
        used = tl.where(due != 0, 0, held)
    place = (seen - 1 - recent + R) % R
    there = recent < used
    if WHICH != 1:
        keys = load_f32(
            ring_k + slot * ring_k_slot + (place * (H * K) + key_head * K)[None, :, None] + ki,
            in_k & there[None, :, None],
        )

    for i in tl.static_range(HEADS):
        head = head0 + i
        at_tile = slot * state_slot + (head * V + channel)[None, :, None] * K + ki
        in_tile = in_k & in_v[None, :, None]
        state = load_f32(checkpoint + at_tile, in_tile & stored)
        if WHICH != 0:
            state = _replay(
                state,
                ring_k + slot * ring_k_slot + key_head * K,
                (ring_v + slot * ring_v_slot if RAW else ring_u + slot * ring_u_slot)
                + head * V
                + channel,
                ring_g + slot * ring_g_slot + (head * K if CHANNEL else head),
                ring_b + slot * ring_b_slot + head,
                seen - held,
                tl.where(due != 0, held, 0),
                ki,
                in_k,
                in_v,
                H * K,
                HV * V,
                HV,
                R,
                ERASE and RAW,
                CHANNEL,
                HAS_BETA and RAW,
                K,
            )
            tl.store(
                checkpoint + at_tile,
                state.to(checkpoint.dtype.element_ty),
                mask=in_tile & (due != 0),
            )
        if WHICH != 1:
            if ERASE:
                values = load_f32(
                    ring_u
                    + slot * ring_u_slot
                    + (place * (HV * V) + head * V)[:, None]
                    + channel[None, :],
                    there[:, None] & in_v[None, :],
                )
            else:
                values = load_f32(
                    ring_v
                    + slot * ring_v_slot
                    + (place * (HV * V) + head * V)[:, None]
                    + channel[None, :],
                    there[:, None] & in_v[None, :],
                )
                if HAS_BETA:
                    values = (
                        values
                        * load_f32(ring_b + slot * ring_b_slot + place * HV + head, there)[:, None]
                    )
            # Shifted by one record: the inclusive sum is then over the records newer than each.
            newer = (seen - recent + R) % R
            shifted = (recent > 0) & (recent <= used)
            if CHANNEL:
                at_g = ring_g + slot * ring_g_slot + head * K + ki
                after = load_f32(
                    at_g + (newer * (HV * K))[None, :, None], in_k & shifted[None, :, None]
                )
                weighted = keys * tl.exp(tl.cumsum(after, 1))
                every = load_f32(
                    at_g + (place * (HV * K))[None, :, None], in_k & there[None, :, None]
                )
                total = tl.sum(every, 1)[:, None, :]
            else:
                at_g = ring_g + slot * ring_g_slot + head
                after = tl.exp(tl.cumsum(load_f32(at_g + newer * HV, shifted), 0))
                total = tl.sum(load_f32(at_g + place * HV, there), 0)
        else:
            total = 0.0

        # The step's own tokens, one after the other: U holds their writes, segment the log-decay
        # from each of them to the current one.
        column = tl.arange(0, TP)
        U = tl.zeros([BV, TP], tl.float32)
        own = load_f32(
            k + row * k_row + column[None, :, None] * k_token + key_head * k_head + ki,
            in_k & (column < length)[None, :, None],
        )
        if CHANNEL:
            segment = tl.zeros([KC, TP, KI], tl.float32)
            prefix = tl.zeros([KC, 1, KI], tl.float32)
        else:
            segment = tl.zeros([TP], tl.float32)
            prefix = 0.0
        for s in range(T):
            alive = s < length
            qs = load_f32(q + row * q_row + s * q_token + key_head * q_head + ki, in_k & alive)
            vs = load_f32(v + row * v_row + s * v_token + head * v_head + channel, in_v & alive)
            g_at = log_decay + row * g_row + s * g_token + head * g_head
            if HAS_BETA:
                strength = load_f32(beta + row * b_row + s * b_token + head * b_head, alive)
            else:
                strength = 1.0
            position = (seen + s) % R
            if CHANNEL:
                g = load_f32(g_at + ki, in_k & alive)
                segment = tl.where((column < s)[None, :, None], segment + g, 0.0)
            else:
                g = load_f32(g_at, alive)
                segment = tl.where(column < s, segment + g, 0.0)
            prefix = prefix + g
            u = vs
            if ERASE:
                ks = load_f32(k + row * k_row + s * k_token + key_head * k_head + ki, in_k & alive)
                if CHANNEL:
                    decayed = ks * tl.exp(prefix)
                    u -= dot_k(state, decayed * tl.exp(total))
                    inner = dot_k(own * tl.exp(segment), ks)
                    if WHICH != 1:
                        u -= tl.sum(values * dot_k(weighted, decayed)[:, None], 0)
                else:
                    u -= dot_k(state, ks) * tl.exp(total + prefix)
                    inner = dot_k(own, ks) * tl.exp(segment)
                    if WHICH != 1:
                        scores = dot_k(keys, ks) * after * tl.exp(prefix)
                        u -= tl.sum(values * scores[:, None], 0)
                if T > 1:
                    u -= tl.sum(U * tl.where(column < s, inner, 0.0)[None, :], 1)
            u = u * strength
            U = tl.where((column == s)[None, :], u[:, None], U)
            if CHANNEL:
                decayed = qs * tl.exp(prefix)
                o = dot_k(state, decayed * tl.exp(total))
                inner = dot_k(own * tl.exp(segment), qs)
                if WHICH != 1:
                    o += tl.sum(values * dot_k(weighted, decayed)[:, None], 0)
            else:
                o = dot_k(state, qs) * tl.exp(total + prefix)
                inner = dot_k(own, qs) * tl.exp(segment)
                if WHICH != 1:
                    scores = dot_k(keys, qs) * after * tl.exp(prefix)
                    o += tl.sum(values * scores[:, None], 0)
            o += tl.sum(U * tl.where(column <= s, inner, 0.0)[None, :], 1)
            if HAS_SKIP:
                o += vs * tl.load(skip + head).to(tl.float32)
            tl.store(
                out + ((row * T + s) * HV + head) * V + channel,
                tl.where(alive, o, 0.0),
                mask=in_v,
            )
            at_v = position * (HV * V) + head * V + channel
            if ERASE:
                tl.store(
                    ring_u + slot * ring_u_slot + at_v,
                    u.to(ring_u.dtype.element_ty),
                    mask=in_v & alive,
                )
            if RAW or not ERASE:
                tl.store(
                    ring_v + slot * ring_v_slot + at_v,
                    vs.to(ring_v.dtype.element_ty),
                    mask=in_v & alive,
                )
            if tile == 0:
                if CHANNEL:
                    tl.store(
                        ring_g + slot * ring_g_slot + (position * HV + head) * K + ki,
                        g,
                        mask=in_k & alive,
                    )
                else:
                    tl.store(ring_g + slot * ring_g_slot + position * HV + head, g, mask=alive)
                if HAS_BETA and (RAW or not ERASE):
                    tl.store(
                        ring_b + slot * ring_b_slot + position * HV + head, strength, mask=alive
                    )
    if (tile == 0) & (chunk == 0):
        for s in range(T):
            kept = s < length
            ks = load_f32(k + row * k_row + s * k_token + key_head * k_head + ki, in_k & kept)
            position = (seen + s) % R
            tl.store(
                ring_k + slot * ring_k_slot + (position * H + key_head) * K + ki,
                ks.to(ring_k.dtype.element_ty),
                mask=in_k & kept,
            )


@triton.jit
def _replay(
    state,
    keys,
    values,
    gates,
    strengths,
    first,
    held,
    ki,
    in_k,
    in_v,
    key_stride,
    value_stride,
    gate_stride,
    R: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    K: tl.constexpr,
):
    """The tile after `held` records from position `first` on, token by token (Eq. 14 unrolled)."""
    for j in range(held):
        place = (first + j) % R
        ks = load_f32(keys + place * key_stride + ki, in_k)
        vs = load_f32(values + place * value_stride, in_v)
        if CHANNEL:
            decay = tl.exp(load_f32(gates + place * gate_stride * K + ki, in_k))
        else:
            decay = tl.exp(tl.load(gates + place * gate_stride))
        strength = 1.0
        if HAS_BETA:
            strength = tl.load(strengths + place * gate_stride)
        state, _ = advance(state, ks, vs, decay, strength, ERASE)
    return state
