"""Kimi Delta Attention in vLLM 0.26: its layer, which decodes from checkpoint and ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

from lazystate.engines.vllm.gdn import ReplayBackend, ReplayMetadata
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import Prologue
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.settle import settle


class ReplayKimiDelta(Paged, KimiGatedDeltaNetAttention):
    """vLLM's layer; where lazystate is asked for, rows that decode go through checkpoint and ring.

    Prefill is vLLM's own: it reads and writes the checkpoint, with the ring empty.
    """

    backend = ReplayBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ask_for_page()

    def _forward(
        self,
        q_proj_states: Tensor,
        k_proj_states: Tensor,
        v_proj_states: Tensor,
        g1: Tensor,
        beta: Tensor,
        core_attn_out: Tensor,
    ) -> None:
        """Convolutions and recurrence of a batch, rows that decode first.

        Args:
            q_proj_states, k_proj_states, v_proj_states: [tokens, H * K].
            g1: [1, tokens, H, K], raw. beta: [1, tokens, H]. core_attn_out: [1, tokens, H, K],
                written.
        """
        projected, gated = (q_proj_states, k_proj_states, v_proj_states), (g1, beta, core_attn_out)
        metadata = get_forward_context().attn_metadata
        own = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if self.page is None or own is None:
            super()._forward(*projected, *gated)
            return
        assert isinstance(own, ReplayMetadata) and isinstance(metadata, dict)
        decoded = 0 if own.decoding is None else own.decoding.meta.shape[0]
        if own.prefill is not None:
            if own.settling is not None:
                settle(self.pool(), own.settling)
            parts, self.kv_cache = self.kv_cache, self.kv_cache[:2]  # it unpacks two states
            metadata[self.prefix] = own.prefill
            super()._forward(*(x[decoded:] for x in projected), *(x[:, decoded:] for x in gated))
            metadata[self.prefix] = own
            self.kv_cache = parts
        if own.decoding is not None:
            first = (*(x[:decoded] for x in projected), *(x[0, :decoded] for x in gated))
            self._decode(first, own.decoding, own.non_spec_state_indices_tensor[:decoded])

    def _decode(self, given: tuple[Tensor, ...], rows: Rows, blocks: Tensor) -> None:
        assert self.page is not None
        spec = self.page.spec
        *projected, gate, beta, out = given
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        states = self.kv_cache[0].transpose(-1, -2).chunk(3, dim=-2)
        q, k, v = (
            causal_conv1d_update(
                x, state, conv.weight.flatten(1), conv.bias, "silu", conv_state_indices=blocks
            ).unflatten(-1, (spec.heads, spec.key_dim))
            for x, state, conv in zip(projected, states, convs, strict=True)
        )
        step(
            self.pool(),
            rows,
            q.unsqueeze(1),
            k.unsqueeze(1),
            v.unsqueeze(1),
            gate.unsqueeze(1),
            torch.logit(beta).unsqueeze(1),  # the kernel applies the sigmoid that vLLM has applied
            None,
            Prologue(
                "kda_softplus", self.A_log.detach().flatten(), self.dt_bias.detach().flatten()
            ),
            out=out.unsqueeze(1),
        )
