"""Ling's (Bailing V3) Kimi Delta Attention in vLLM 0.33, whose gates are done when it is called."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from lazystate.engines.vllm.batch import placed, taken
from lazystate.engines.vllm.gdn import ReplayBackend
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import normalised
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step

DIMS = (0, 0, 0, 1, 1)  # of the tokens in what `_forward` is given


class ReplayBailingDelta(Paged, BailingMoeV3KimiDeltaAttention):
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
        """Convolutions and recurrence of a batch.

        Args:
            q_proj_states, k_proj_states, v_proj_states: [tokens, H * K].
            g1: [1, tokens, H, K], log-decay. beta: [1, tokens, H], write strength.
            core_attn_out: [1, tokens, H, K], written.
        """
        given = (q_proj_states, k_proj_states, v_proj_states, g1, beta)
        own = self.decided()
        if own is None:
            super()._forward(*given, core_attn_out)
            return
        if own.long is not None:
            behind = (taken(x, own.long, dim) for x, dim in zip(given, DIMS, strict=True))
            with self.prefilling(own), placed(core_attn_out, own.long, 1) as out:
                super()._forward(*behind, out)
        if own.short is not None and own.decoding is not None:
            first = [taken(x, own.short, dim) for x, dim in zip(given, DIMS, strict=True)]
            self._decode(own.decoding, first, taken(core_attn_out, own.short, 1))

    def _decode(self, rows: Rows, given: list[Tensor], out: Tensor) -> None:
        assert self.page is not None
        spec = self.page.spec
        *projected, log_decay, beta = given
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        rings = self.parts()["conv"].chunk(3, -1)
        q, k, v = (
            self.convolved(rows, x, conv.weight, conv.bias, ring).unflatten(
                -1, (spec.heads, spec.key_dim)
            )
            for x, conv, ring in zip(projected, convs, rings, strict=True)
        )
        step(self.pool(), rows, *normalised(q, k), v, log_decay, beta, None, out=out)
