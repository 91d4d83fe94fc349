"""Gated DeltaNet in vLLM: its layer, which decodes from checkpoint and ring, and its metadata."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import Prologue
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.settle import settle


@dataclass
class ReplayMetadata(GDNAttentionMetadata):
    """vLLM's metadata, and how the batch is divided, rows that decode first.

    Attributes:
        decoding: rows that decode, one token each. settling: rows of prefill that may hold records.
        prefill: vLLM's metadata of the rows behind those that decode.
    """

    decoding: Rows | None = None
    settling: Rows | None = None
    prefill: GDNAttentionMetadata | None = None


class ReplayBuilder(GDNAttentionMetadataBuilder):
    """vLLM's builder, which decides the step once for all layers of a group."""

    supports_update_block_table = False  # another group's blocks have other cursors

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self._layers: list[Paged] = [context[name] for name in layer_names]
        most = max(vllm_config.scheduler_config.max_num_seqs, self.decode_cudagraph_max_bs)
        self._group = Group.of(self._layers, most, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> ReplayMetadata:
        """As vLLM's, with `ReplayMetadata`."""
        common = common_attn_metadata
        stock = super().build(common_prefix_len, common, *args, **kwargs)
        blocks = self._layers[0].kv_cache[1].shape[0]
        decoding = settling = prefill = None
        indices = stock.non_spec_state_indices_tensor
        first = stock.num_decodes
        if stock.num_prefills > 0:
            prefill = stock
            if first > 0:
                behind = _behind(common, first, stock.num_decode_tokens)
                prefill = super().build(common_prefix_len, behind)
            rows = self._group.prefill(blocks, stock.prefill_state_indices)
            new = common.query_start_loc_cpu.diff()[first:]
            if bool((common.seq_lens_cpu_upper_bound[first:] > new).any()):
                settling = rows
            indices = indices[:first]
        if first > 0:
            self._start(common.seq_lens_cpu_upper_bound[:first] == 1, blocks, indices)
            decoding = self._group.decode(blocks, indices)
        known = {field.name: getattr(stock, field.name) for field in fields(stock)}
        return ReplayMetadata(
            **{**known, "decoding": decoding, "settling": settling, "prefill": prefill}
        )

    def _start(self, fresh: Tensor, blocks: int, indices: Tensor) -> None:
        """Forget what blocks hold whose request begins in this step: 0.26 decodes prompts of one
        token, without a look at what the request before has left. fresh: bool [B] on the host.
        """
        if not bool(fresh.any()):
            return
        begun = indices[: fresh.numel()][fresh.to(indices.device)].long()
        self._group.prefill(blocks, begun)
        for layer in self._layers:
            for state in layer.kv_cache[:2]:
                state[begun] = 0  # the step that reads it stores its view


class ReplayBackend(GDNAttentionBackend):
    """vLLM's backend with `ReplayBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        """The builder of its metadata."""
        return ReplayBuilder


class ReplayDeltaNet(Paged, QwenGatedDeltaNetAttention):
    """vLLM's layer; where lazystate is asked for, rows that decode go through checkpoint and ring.

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
        metadata = get_forward_context().attn_metadata
        own = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if self.page is None or own is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        assert isinstance(own, ReplayMetadata) and isinstance(metadata, dict)
        decoded = 0 if own.decoding is None else own.decoding.meta.shape[0]
        if own.prefill is not None:
            if own.settling is not None:
                settle(self.pool(), own.settling)
            behind = (x[decoded:] for x in (mixed_qkv, b, a, core_attn_out))
            metadata[self.prefix] = own.prefill
            super()._forward_core(*behind)
            metadata[self.prefix] = own
        if own.decoding is not None:
            first = (x[:decoded] for x in (mixed_qkv, b, a, core_attn_out))
            self._decode(*first, own.decoding, own.non_spec_state_indices_tensor[:decoded])

    def _decode(
        self, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor, rows: Rows, blocks: Tensor
    ) -> None:
        assert self.page is not None
        spec = self.page.spec
        mixed = causal_conv1d_update(
            mixed,
            self.kv_cache[0].transpose(-1, -2),
            self.conv1d.weight.flatten(1),
            self.conv1d.bias,
            self.activation,
            conv_state_indices=blocks,
        )
        keys, values = (spec.key_heads, spec.key_dim), (spec.heads, spec.value_dim)
        sizes = [spec.key_heads * spec.key_dim] * 2 + [spec.heads * spec.value_dim]
        q, k, v = mixed.split(sizes, -1)
        step(
            self.pool(),
            rows,
            q.unflatten(-1, keys).unsqueeze(1),
            k.unflatten(-1, keys).unsqueeze(1),
            v.unflatten(-1, values).unsqueeze(1),
            a.unsqueeze(1),
            b.unsqueeze(1),
            None,
            Prologue("gdn", self.A_log.detach(), self.dt_bias.detach()),
            out=out.view(-1, 1, *values),
        )


def _behind(common: Any, rows: int, tokens: int) -> Any:
    """A batch's metadata without its first rows and their tokens."""
    names = ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound")
    # 0.26 keeps copies on the host as well
    copies = (
        name for name in ("_seq_lens_cpu", "_num_computed_tokens_cpu") if hasattr(common, name)
    )
    per_row = {name: getattr(common, name) for name in (*names, *copies)}
    return common.replace(
        **{name: None if x is None else x[rows:] for name, x in per_row.items()},
        query_start_loc=common.query_start_loc[rows:] - tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[rows:] - tokens,
        num_reqs=common.num_reqs - rows,
        num_actual_tokens=common.num_actual_tokens - tokens,
        slot_mapping=common.slot_mapping[tokens:],
        _num_computed_tokens_cache=None,
    )
