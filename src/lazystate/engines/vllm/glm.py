"""GLM-5.3's Kimi Delta Attention in vLLM 0.33: three convolutions, a bounded gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention

from lazystate.engines.vllm.batch import placed, taken
from lazystate.engines.vllm.gdn import ReplayBackend
from lazystate.engines.vllm.kimi import kda_gates, one_page
from lazystate.engines.vllm.paged import Paged
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step


class ReplayGlmDelta(Paged, Glm5NextLinearAttention):
    """vLLM's layer; where lazystate is asked for, short rows go through checkpoint and ring.

    Prefill is vLLM's own: it reads and writes the checkpoint, with the ring empty.
    """

    backend = ReplayBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ask_for_page()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM's; a prefill writes one page."""
        spec = super().get_kv_cache_spec(vllm_config)
        return spec if self.page is None else one_page(spec)

    @eager_break_during_capture
    def _forward(
        self, qkv_proj_states: Tensor, g1: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """Convolutions and recurrence of a batch.

        Args:
            qkv_proj_states: [tokens, 3 * H * K]. g1: [1, tokens, H, K], raw.
            beta: [1, tokens, H], raw. core_attn_out: [1, tokens, H, K], written.
        """
        given = (qkv_proj_states, g1, beta)
        own = self.decided()
        if own is None:
            super()._forward(*given, core_attn_out)
            return
        if own.long is not None:
            behind = (taken(x, own.long, dim) for x, dim in zip(given, (0, 1, 1), strict=True))
            with self.prefilling(own), placed(core_attn_out, own.long, 1) as out:
                super()._forward(*behind, out)
        if own.short is not None and own.decoding is not None:
            first = (taken(x, own.short, dim) for x, dim in zip(given, (0, 1, 1), strict=True))
            self._decode(own.decoding, *first, taken(core_attn_out, own.short, 1))

    def _decode(self, rows: Rows, mixed: Tensor, gate: Tensor, beta: Tensor, out: Tensor) -> None:
        assert self.page is not None
        spec = self.page.spec
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        rings = self.parts()["conv"].chunk(3, -1)
        q, k, v = (
            self.convolved(rows, x, conv.weight, conv.bias, ring).unflatten(
                -1, (spec.heads, spec.key_dim)
            )
            for x, conv, ring in zip(mixed.chunk(3, -1), convs, rings, strict=True)
        )
        prologue = kda_gates(self.A_log, self.dt_bias, self.kda_lower_bound)
        step(self.pool(), rows, q, k, v, gate, beta, None, prologue, out=out)
