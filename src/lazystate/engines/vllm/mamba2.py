"""Mamba-2 in vLLM: its layer, whose decoding reads checkpoints and rings, and its metadata."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.v1.attention.backends.mamba2_attn import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
)

from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import Prologue
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.settle import settle


@dataclass
class ReplayMetadata(Mamba2AttentionMetadata):
    """vLLM's metadata, and rows of the step: those that decode, and those to settle first."""

    decoding: Rows | None = None
    settling: Rows | None = None


class ReplayBuilder(Mamba2AttentionMetadataBuilder):
    """vLLM's builder, which decides the step once for all layers of a group."""

    metadata_cls = ReplayMetadata
    supports_update_block_table = False  # another group's blocks have other cursors

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self._layers: list[Paged] = [context[name] for name in layer_names]
        most = max(vllm_config.scheduler_config.max_num_seqs, self.decode_cudagraph_max_bs)
        self._group = Group.of(self._layers, most, device)

    def build(self, *args: Any, **kwargs: Any) -> ReplayMetadata:
        """As vLLM's, with `ReplayMetadata`."""
        stock = super().build(*args, **kwargs)
        blocks = self._layers[0].kv_cache[1].shape[0]
        decoding = settling = None
        if stock.num_decodes > 0:
            decoding = self._group.decode(blocks, stock.state_indices_tensor_d[:, 0])
        if stock.num_prefills > 0:
            settling = self._group.prefill(blocks, stock.state_indices_tensor_p)
        known = {field.name: getattr(stock, field.name) for field in fields(stock)}
        return ReplayMetadata(**{**known, "decoding": decoding, "settling": settling})


class ReplayBackend(Mamba2AttentionBackend):
    """vLLM's backend with `ReplayBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[Mamba2AttentionMetadataBuilder]:
        """The builder of its metadata."""
        return ReplayBuilder


class ReplayMixer2(Paged, MambaMixer2):
    """vLLM's layer; where lazystate is asked for, rows that decode go through checkpoint and ring.

    Prefill is vLLM's own: it reads and writes the checkpoint, with the ring empty.
    """

    backend = ReplayBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ask_for_page()
        self._prologue: Prologue | None = None

    def _warmup_ssd_kernels(self, projected_states: Tensor) -> None:
        if self.page is not None:
            self._gates()  # before any graph is captured
        with self.unpaged():
            super()._warmup_ssd_kernels(projected_states)

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> Any:
        """Convolution and recurrence of a batch, rows that decode first.

        Args:
            projected_states: [tokens, ...] of in_proj. output: [tokens, HV * V], written.
        """
        metadata = get_forward_context().attn_metadata
        own = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if self.page is None or own is None:
            return super().conv_ssm_forward(projected_states, output)
        assert isinstance(own, ReplayMetadata) and isinstance(metadata, dict)
        decoded = own.num_decode_tokens
        if own.num_prefills > 0:
            if own.prep_initial_states and own.settling is not None:
                settle(self.pool(), own.settling)
            metadata[self.prefix] = replace(own, num_decodes=0, num_decode_tokens=0)
            super().conv_ssm_forward(projected_states[decoded:], output[decoded:])
            metadata[self.prefix] = own
        if own.num_decodes > 0:
            self._decode(projected_states[:decoded], output[:decoded], own)
        return None

    def _decode(self, projected: Tensor, output: Tensor, metadata: ReplayMetadata) -> None:
        assert self.page is not None and metadata.decoding is not None
        spec = self.page.spec
        mixed, dt = projected[:, self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        mixed = causal_conv1d_update(
            mixed,
            self.kv_cache[0].transpose(-1, -2),
            self.conv_weights,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=metadata.state_indices_tensor_d,
        )
        x, B, C = self.split_hidden_states_B_C_fn(mixed)
        keys, values = (spec.key_heads, spec.key_dim), (spec.heads, spec.value_dim)
        step(
            self.pool(),
            metadata.decoding,
            C.unflatten(-1, keys).unsqueeze(1),
            B.unflatten(-1, keys).unsqueeze(1),
            x.unflatten(-1, values).unsqueeze(1),
            dt.unsqueeze(1),
            None,
            self.D,
            self._gates(),
            out=output.view(-1, 1, *values),
        )

    def _gates(self) -> Prologue:
        """A_log from vLLM's A = -exp(A_log); where random weights have A >= 0, no decay."""
        if self._prologue is None:
            A_log = (-self.A.detach()).clamp(min=torch.finfo(torch.float32).tiny).log()
            self._prologue = Prologue("mamba2", A_log, self.dt_bias.detach())
        return self._prologue
