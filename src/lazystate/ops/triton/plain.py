"""The conventional step: read the state, advance it, write it (Eq. 1-3): baseline and tails.

With `snapshots` the state after each token goes to a slot of its own, as serving engines do to be
able to roll back drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazystate.ops.tables import setting
from lazystate.ops.triton.device import (
    advance,
    dot_k,
    load_f32,
    load_row,
    load_rows,
    shape_of,
    store_rows,
)
from lazystate.spec import LayerSpec


@triton.jit
def plain_kernel(
    source,
    target,
    q,
    k,
    v,
    log_decay,
    beta,
    skip,
    out,
    state_pool,
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
    T: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KC: tl.constexpr,
    KI: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):
    """One tile of one value head through T tokens; target: int64 [B] or, with SNAPSHOTS, [B, T]."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    channel = pid % tiles * BV + tl.arange(0, BV)
    head = (pid // tiles) % HV
    row = (pid // (tiles * HV)).to(tl.int64)
    key_head = head // GROUP
    in_v = channel < V
    slot = tl.load(source + row)
    at_tile = (head * V + channel) * K
    state = load_rows(state_pool + slot * state_slot, at_tile, in_v & (slot >= 0), K, KC, KI)
    for s in range(T):
        qs = load_row(q + row * q_row + s * q_token + key_head * q_head, True, K, KC, KI)
        ks = load_row(k + row * k_row + s * k_token + key_head * k_head, True, K, KC, KI)
        vs = load_f32(v + row * v_row + s * v_token + head * v_head + channel, in_v)
        gate = log_decay + row * g_row + s * g_token + head * g_head
        g = load_row(gate, True, K, KC, KI) if CHANNEL else tl.load(gate)
        strength = 1.0
        if HAS_BETA:
            strength = tl.load(beta + row * b_row + s * b_token + head * b_head)
        state = advance(state, ks, vs, g, strength, KC, ERASE, CHANNEL)
        o = dot_k(state, qs, KC)
        if HAS_SKIP:
            o += vs * tl.load(skip + head).to(tl.float32)
        at_out = ((row * T + s) * HV + head) * V + channel
        tl.store(out + at_out, tl.where(slot >= 0, o, 0.0), mask=in_v)
        if SNAPSHOTS or s == T - 1:
            to = tl.load(target + (row * T + s if SNAPSHOTS else row))
            store_rows(state_pool + to * state_slot, at_tile, in_v & (to >= 0), state, K, KC, KI)


def plain_step(
    spec: LayerSpec,
    states: Tensor,
    source: Tensor,
    target: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    block_v: int | None = None,
    warps: int | None = None,
) -> Tensor:
    """T tokens in the conventional way.

    Args:
        states: [slots, HV, V, K], dense behind the slot. source: int64 [B] slots to read, negative
            on padded rows. target: int64 [B] slots to write, or [B, T] for a snapshot a token.
        q, k, v, log_decay, beta, skip: as in `StateCache.step`; skip is [HV].
        block_v, warps: value channels of a program and its warps; None for what is tuned.

    Returns:
        [B, T, HV, V], dtype of v; zeros on padded rows.
    """
    batch, tokens = q.shape[:2]
    snapshots = target.dim() == 2
    method = "snapshot" if snapshots else "plain"
    tuned = setting(method, spec, batch, tokens, device=v.device) or {}
    block_v = block_v or tuned.get("block_v", 8)
    warps = warps or tuned.get("warps", 1)
    out = torch.empty(batch, tokens, spec.heads, spec.value_dim, dtype=v.dtype, device=v.device)
    inputs = (q, k, v, log_decay, log_decay if beta is None else beta)
    plain_kernel[(batch * spec.heads * triton.cdiv(spec.value_dim, block_v),)](
        source,
        target,
        *inputs,
        log_decay if skip is None else skip,
        out,
        states,
        *(stride for x in inputs for stride in x.stride()[:3]),
        states.stride(0),
        T=tokens,
        BV=block_v,
        **shape_of(spec),
        HAS_SKIP=skip is not None,
        SNAPSHOTS=snapshots,
        num_warps=warps,
    )
    return out
