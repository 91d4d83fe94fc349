"""The conventional step: read the state, advance it, write it (Eq. 1-3): baseline and tails.

With `snapshots` the state after each token goes to a slot of its own, as serving engines do to be
able to roll back drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazystate.gates import Prologue
from lazystate.ops.tables import setting
from lazystate.ops.triton.arguments import gate_of, inputs_of, shape_of
from lazystate.ops.triton.device import (
    advance,
    dot_k,
    load_f32,
    load_rows,
    store_rows,
)
from lazystate.ops.triton.gates import load_channel_gates, load_gates, load_vector
from lazystate.spec import LayerSpec


@triton.jit
def plain_kernel(
    source,
    target,
    inputs,
    strides,
    skip,
    out,
    states,
    state_slot,
    T: tl.constexpr,
    BV: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    shape: tl.constexpr,
):
    """One tile of one value head through T tokens; target: int64 [B] or, with SNAPSHOTS, [B, T]."""
    tiles: tl.constexpr = (shape.V + BV - 1) // BV
    pid = tl.program_id(0)
    channel = pid % tiles * BV + tl.arange(0, BV)
    head = (pid // tiles) % shape.HV
    row = (pid // (tiles * shape.HV)).to(tl.int64)
    key_head = head // shape.GROUP
    in_v = channel < shape.V
    slot = tl.load(source + row)
    at_tile = (head * shape.V + channel) * shape.K
    state = load_rows(states + slot * state_slot, at_tile, in_v & (slot >= 0), shape)
    query = inputs.q + row * strides.row.q + key_head * strides.head.q
    key = inputs.k + row * strides.row.k + key_head * strides.head.k
    value = inputs.v + row * strides.row.v + head * strides.head.v + channel
    for s in range(T):
        qs, _ = load_vector(query + s * strides.token.q, shape.gate.SCALE, shape)
        ks, _ = load_vector(key + s * strides.token.k, 1.0, shape)
        vs = load_f32(value + s * strides.token.v, in_v)
        at_decay = row * strides.row.log_decay + s * strides.token.log_decay
        at_beta = row * strides.row.beta + s * strides.token.beta
        g, strength = load_gates(inputs, strides.head, head, at_decay, at_beta, True, shape)
        if shape.CHANNEL:
            g = load_channel_gates(inputs, strides.head, head, at_decay, shape)
        state = advance(state, ks, vs, g, strength, shape.ERASE, shape.CHANNEL)
        o = dot_k(state, qs)
        if skip is not None:
            o += vs * tl.load(skip + head).to(tl.float32)
        at_out = ((row * T + s) * shape.HV + head) * shape.V + channel
        tl.store(out + at_out, tl.where(slot >= 0, o, 0.0), mask=in_v)
        if SNAPSHOTS or s == T - 1:
            to = tl.load(target + (row * T + s if SNAPSHOTS else row))
            store_rows(states + to * state_slot, at_tile, in_v & (to >= 0), state, shape)


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
    prologue: Prologue | None = None,
    *,
    block_v: int | None = None,
    warps: int | None = None,
) -> Tensor:
    """T tokens in the conventional way.

    Args:
        states: [slots, HV, V, K], dense behind the slot. source: int64 [B] slots to read, negative
            on padded rows. target: int64 [B] slots to write, or [B, T] for a snapshot a token.
        q, k, v, log_decay, beta, skip, prologue: as in `StateCache.step`; skip is [HV].
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
    inputs, strides = inputs_of(q, k, v, log_decay, beta, prologue)
    plain_kernel[(batch * spec.heads * triton.cdiv(spec.value_dim, block_v),)](
        source,
        target,
        inputs,
        strides,
        skip,
        out,
        states,
        states.stride(0),
        T=tokens,
        BV=block_v,
        SNAPSHOTS=snapshots,
        shape=shape_of(spec, gate_of(prologue, spec.key_dim)),
        num_warps=warps,
    )
    return out
