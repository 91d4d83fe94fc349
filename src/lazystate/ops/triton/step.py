"""The step kernel: outputs of T tokens, the append, and the fold of rows that are due (Eq. 8-14).

The state of the value heads that share a key head is one matrix of rows [K]. A program serves a
few tiles of BV of these rows, reads each once, and never forms a state; on a row that folds it
first replays the records into the checkpoint, and reads that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.decode import decode
from lazystate.ops.triton.fold import fold
from lazystate.ops.triton.verify import verify


@triton.jit
def step_kernel(
    meta,
    order,
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
    batch,
    T: tl.constexpr,
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
    WHICH: tl.constexpr,
):
    """One model step of one layer; WHICH rows: 0 those that do not fold, 1 those that do, 2 all.

    meta: int64 [B, 8] and order: int32 [1 + B], see `Rows`. The other pointers are the arguments of
    `Backend.step` and the ring's tensors; strides in elements, all behind a head dense.
    """
    inputs = (q, k, v, log_decay, beta)
    row_strides = (q_row, k_row, v_row, g_row, b_row)
    token_strides = (q_token, k_token, v_token, g_token, b_token)
    head_strides = (q_head, k_head, v_head, g_head, b_head)
    ring = (ring_k, ring_v, ring_u, ring_g, ring_b)
    slot_strides = (ring_k_slot, ring_v_slot, ring_u_slot, ring_g_slot, ring_b_slot)
    programs: tl.constexpr = HV * ((V + BV - 1) // BV) // TILES  # of one row
    first = 0
    end = batch * programs
    if WHICH == 0:
        first = tl.load(order) * programs
    if WHICH == 1:
        end = tl.load(order) * programs
    # rows that fold are few, and how many only the device knows: some programs take turns
    for index in range(first + tl.program_id(0), end, tl.num_programs(0)):
        _row(
            index,
            meta,
            order,
            inputs,
            row_strides,
            token_strides,
            head_strides,
            skip,
            out,
            checkpoint,
            state_slot,
            ring,
            slot_strides,
            T,
            HV,
            GROUP,
            K,
            KC,
            KI,
            V,
            BV,
            TILES,
            STAGES,
            BLOCKS,
            R,
            ERASE,
            CHANNEL,
            HAS_BETA,
            HAS_SKIP,
            RAW,
            WHICH,
        )


@triton.jit
def _row(
    index,
    meta,
    order,
    inputs,
    row_strides,
    token_strides,
    head_strides,
    skip,
    out,
    checkpoint,
    state_slot,
    ring,
    slot_strides,
    T: tl.constexpr,
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
    WHICH: tl.constexpr,
):
    """A few tiles of one row."""
    H: tl.constexpr = HV // GROUP
    per_head: tl.constexpr = (V + BV - 1) // BV
    parts: tl.constexpr = GROUP * per_head // TILES
    part = index % parts
    key_head = (index // parts) % H
    row = tl.load(order + 1 + index // (parts * H)).to(tl.int64)
    slot = tl.load(meta + row * 8)
    held = tl.load(meta + row * 8 + 1).to(tl.int32)
    length = tl.load(meta + row * 8 + 3).to(tl.int32)
    due = tl.load(meta + row * 8 + 4) != 0
    stored = tl.load(meta + row * 8 + 5) == 0
    start = tl.load(meta + row * 8 + 6).to(tl.int32)
    out += row * T * HV * V
    if (slot < 0) | (length == 0):
        _clear(out, part, key_head, T, HV, GROUP, V, BV, TILES)
    else:
        state = checkpoint + slot * state_slot
        ring = (
            ring[0] + slot * slot_strides[0] + key_head * K,
            ring[1] + slot * slot_strides[1],
            ring[2] + slot * slot_strides[2],
            ring[3] + slot * slot_strides[3],
            ring[4] + slot * slot_strides[4],
        )
        used = held
        if WHICH != 0:
            if due:
                fold(
                    part,
                    key_head,
                    stored,
                    start,
                    held,
                    state,
                    ring,
                    HV,
                    GROUP,
                    K,
                    KC,
                    KI,
                    V,
                    BV,
                    TILES,
                    STAGES,
                    BLOCKS,
                    R,
                    ERASE,
                    CHANNEL,
                    HAS_BETA,
                    RAW,
                    16 if WHICH == 2 else BV,
                )
                tl.debug_barrier()  # other lanes read what this one stored
            used = tl.where(due, 0, held)
            stored = stored | due
        inputs = (
            inputs[0] + row * row_strides[0] + key_head * head_strides[0],
            inputs[1] + row * row_strides[1] + key_head * head_strides[1],
            inputs[2] + row * row_strides[2],
            inputs[3] + row * row_strides[3],
            inputs[4] + row * row_strides[4],
        )
        if T == 1:
            decode(
                part,
                key_head,
                stored,
                start,
                used,
                inputs,
                head_strides,
                skip,
                out,
                state,
                ring,
                HV,
                GROUP,
                K,
                KC,
                KI,
                V,
                BV,
                TILES,
                STAGES,
                BLOCKS,
                R,
                ERASE,
                CHANNEL,
                HAS_BETA,
                HAS_SKIP,
                RAW,
            )
        else:
            verify(
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
                T,
                HV,
                GROUP,
                K,
                V,
                BV,
                TILES,
                STAGES,
                BLOCKS,
                R,
                ERASE,
                CHANNEL,
                HAS_BETA,
                HAS_SKIP,
                RAW,
            )


@triton.jit
def _clear(
    out,
    part,
    key_head,
    T: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILES: tl.constexpr,
):
    """Zero outputs of a padded row."""
    per_head: tl.constexpr = (V + BV - 1) // BV
    for i in range(TILES):
        n = part * TILES + i
        channel = n % per_head * BV + tl.arange(0, BV)
        for s in range(T):
            at = (s * HV + key_head * GROUP + n // per_head) * V + channel
            tl.store(out + at, tl.zeros([BV], out.dtype.element_ty), mask=channel < V)
