"""Kimi-K3's layer in vLLM 0.33, that of a full-rank gate, with metadata of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
from vllm.models.kimi_k3.nvidia.kda_metadata import (
    KimiK3KDAAttentionBackend,
    KimiK3KDAMetadata,
    KimiK3KDAMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from lazystate.engines.vllm.builder import Decided, Deciding
from lazystate.engines.vllm.kimi import PackedKimi, one_page


@dataclass
class ReplayMetadata(Decided, KimiK3KDAMetadata):
    """vLLM's metadata, and what is decided of the step."""


class _Builder(KimiK3KDAMetadataBuilder):
    """vLLM's builder of metadata for some rows of a batch: it looks up the pages of these."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> KimiK3KDAMetadata:
        """As vLLM's, which is given the pages of all rows where prefixes are cached."""
        common, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        if mode == "align":
            table = common.block_table_tensor
            self.mamba_aligned_state_indices = mamba_get_block_table_tensor(
                table, common.seq_lens, self.kv_cache_spec, mode
            )
        return super().build(common_prefix_len, common, *args, **kwargs)


class ReplayBuilder(Deciding, _Builder):
    """vLLM's builder, which decides the step once for all layers of a group."""

    metadata = ReplayMetadata
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH  # how a batch is divided is in the graph


class ReplayBackend(KimiK3KDAAttentionBackend):
    """vLLM's backend with `ReplayBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[KimiK3KDAMetadataBuilder]:
        """The builder of its metadata."""
        return ReplayBuilder


class ReplayKimiK3Delta(PackedKimi, KimiK3DeltaAttention):
    """vLLM's layer; where lazystate is asked for, short rows go through checkpoint and ring.

    Prefill is vLLM's own: it reads and writes the checkpoint, with the ring empty.
    """

    backend = ReplayBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM's; a prefill writes one page."""
        spec = super().get_kv_cache_spec(vllm_config)
        return spec if self.page is None else one_page(spec)
