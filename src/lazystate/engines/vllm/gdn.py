"""Gated DeltaNet in vLLM: its layer, which decodes from checkpoint and ring, and its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from lazystate.engines.vllm.batch import placed, taken
from lazystate.engines.vllm.builder import Decided, Deciding
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import Prologue
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step


@dataclass
class ReplayMetadata(Decided, GDNAttentionMetadata):
    """vLLM's metadata, and what is decided of the step."""


class ReplayBuilder(Deciding, GDNAttentionMetadataBuilder):
    """vLLM's builder, which decides the step once for all layers of a group."""

    metadata = ReplayMetadata


class ReplayBackend(GDNAttentionBackend):
    """vLLM's backend with `ReplayBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        """The builder of its metadata."""
        return ReplayBuilder


class ReplayDeltaNet(Paged, QwenGatedDeltaNetAttention):
    """vLLM's layer; where lazystate is asked for, short rows go through checkpoint and ring.

    Prefill is vLLM's own: it reads and writes the checkpoint, with the ring empty.
    """

    backend = ReplayBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ask_for_page()

    def _warmup_prefill_kernels(self, *args: Any, **kwargs: Any) -> None:
        with self.unpaged():
            super()._warmup_prefill_kernels(*args, **kwargs)

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Convolution and recurrence of a batch.

        Args:
            mixed_qkv: [tokens, C]. b, a: [tokens, HV]. core_attn_out: [tokens, HV, V], written.
        """
        own = self.decided()
        if own is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        if own.long is not None:
            given = (taken(x, own.long) for x in (mixed_qkv, b, a))
            with self.prefilling(own), placed(core_attn_out, own.long) as out:
                super()._forward_core(*given, out)
        if own.short is not None and own.decoding is not None:
            tokens = own.short.tokens
            given = (x[tokens] for x in (mixed_qkv, b, a, core_attn_out))
            self._decode(own.decoding, *given)

    def _decode(self, rows: Rows, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
        assert self.page is not None
        spec = self.page.spec
        mixed = self.convolved(rows, mixed, self.conv1d.weight, self.conv1d.bias)
        keys, values = (spec.key_heads, spec.key_dim), (spec.heads, spec.value_dim)
        sizes = [spec.key_heads * spec.key_dim] * 2 + [spec.heads * spec.value_dim]
        q, k, v = mixed.split(sizes, -1)
        step(
            self.pool(),
            rows,
            q.unflatten(-1, keys),
            k.unflatten(-1, keys),
            v.unflatten(-1, values),
            a.unsqueeze(0),
            b.unsqueeze(0),
            None,
            Prologue("gdn", self.A_log.detach(), self.dt_bias.detach()),
            out=out.unsqueeze(0),
        )
