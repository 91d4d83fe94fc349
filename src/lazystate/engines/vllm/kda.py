"""Kimi Delta Attention in vLLM 0.26: its layer, which decodes from checkpoint and ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from lazystate.engines.vllm.batch import placed, taken
from lazystate.engines.vllm.gdn import ReplayBackend
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import Prologue
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step


class ReplayKimiDelta(Paged, KimiGatedDeltaNetAttention):
    """vLLM's layer; where lazystate is asked for, short rows go through checkpoint and ring.

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
        own = self.decided()
        given = (q_proj_states, k_proj_states, v_proj_states, g1, beta)
        dims = (0, 0, 0, 1, 1)
        if own is None:
            super()._forward(*given, core_attn_out)
            return
        if own.long is not None:
            behind = (taken(x, own.long, dim) for x, dim in zip(given, dims, strict=True))
            with self.prefilling(own), placed(core_attn_out, own.long, 1) as out:
                super()._forward(*behind, out)
        if own.short is not None and own.decoding is not None:
            *projected, gate, strength = (
                taken(x, own.short, dim) for x, dim in zip(given, dims, strict=True)
            )
            out = taken(core_attn_out, own.short, 1)
            self._decode(own.decoding, projected, gate, strength, out)

    def _decode(
        self, rows: Rows, projected: Sequence[Tensor], gate: Tensor, beta: Tensor, out: Tensor
    ) -> None:
        assert self.page is not None
        spec = self.page.spec
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        rings = self.parts()["conv"].chunk(3, -1)
        q, k, v = (
            self.convolved(rows, x, conv.weight, conv.bias, ring).unflatten(
                -1, (spec.heads, spec.key_dim)
            )
            for x, conv, ring in zip(projected, convs, rings, strict=True)
        )
        step(
            self.pool(),
            rows,
            q,
            k,
            v,
            gate,
            torch.logit(beta),  # the kernel applies the sigmoid that vLLM has applied
            None,
            Prologue(
                "kda_softplus", self.A_log.detach().flatten(), self.dt_bias.detach().flatten()
            ),
            out=out,
        )
