"""Kimi Delta Attention in vLLM 0.33: one projection of q, k and v, and its norm in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from lazystate.engines.vllm.batch import placed, taken
from lazystate.engines.vllm.gdn import ReplayBackend
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import Prologue
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step


def kda_gates(A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Prologue:
    """A layer's gates, bounded or not. A_log: any shape of H numbers. dt_bias: [H * K]."""
    weights = A_log.detach().flatten(), dt_bias.detach().flatten()
    if lower_bound is None:
        return Prologue("kda_softplus", *weights)
    return Prologue("kda_bounded", *weights, lower_bound=lower_bound)


def one_page(spec: Any) -> Any:
    """A cache's specification without pages for states inside of a prefill."""
    return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)


class PackedKimi(Paged):
    """What both of vLLM's Kimi layers with packed q, k and v do alike."""

    if TYPE_CHECKING:
        conv1d: Any
        A_log: Tensor
        dt_bias: Tensor
        gate_lower_bound: float | None
        o_norm: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ask_for_page()

    @eager_break_during_capture
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """Convolution, recurrence and norm of a batch.

        Args:
            mixed_qkv: [tokens, 3 * H * K]. g1: [1, tokens, H, K], raw. g2: [tokens, H, K], of the
                norm. beta: [1, tokens, H], raw. core_attn_out: [1, tokens, H, K], written.
        """
        own = self.decided()
        if own is None:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)  # type: ignore[misc]
            return
        if own.short is not None and own.decoding is not None:  # first: its norm takes all tokens
            part = own.short
            out = taken(core_attn_out, part, 1)
            given = (taken(x, part, dim) for x, dim in ((mixed_qkv, 0), (g1, 1), (beta, 1)))
            self._decode(own.decoding, *given, out)
            out.copy_(self.o_norm(out, taken(g2, part)))
        if own.long is not None:
            pairs = ((mixed_qkv, 0), (g1, 1), (g2, 0), (beta, 1))
            given = (taken(x, own.long, dim) for x, dim in pairs)
            with self.prefilling(own), placed(core_attn_out, own.long, 1) as out:
                super()._forward(*given, out)  # type: ignore[misc]

    def _decode(self, rows: Rows, mixed: Tensor, gate: Tensor, beta: Tensor, out: Tensor) -> None:
        assert self.page is not None
        spec = self.page.spec
        mixed = self.convolved(rows, mixed, self.conv1d.weight, self.conv1d.bias)
        q, k, v = (x.unflatten(-1, (spec.heads, spec.key_dim)) for x in mixed.chunk(3, -1))
        prologue = kda_gates(self.A_log, self.dt_bias, self.gate_lower_bound)
        step(self.pool(), rows, q, k, v, gate, beta, None, prologue, out=out)


class ReplayKimiDelta(PackedKimi, KimiGatedDeltaNetAttention):
    """vLLM's layer; where lazystate is asked for, short rows go through checkpoint and ring.

    Prefill is vLLM's own: it reads and writes the checkpoint, with the ring empty.
    """

    backend = ReplayBackend
