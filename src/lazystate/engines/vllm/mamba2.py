"""Mamba-2 in vLLM: its layer, whose decoding reads checkpoints and rings, and its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends.mamba2_attn import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
)

from lazystate.engines.vllm.batch import placed, taken
from lazystate.engines.vllm.builder import Decided, Deciding
from lazystate.engines.vllm.paged import Paged
from lazystate.gates import Prologue
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.launch import step


@dataclass
class ReplayMetadata(Decided, Mamba2AttentionMetadata):
    """vLLM's metadata, and what is decided of the step."""


class ReplayBuilder(Deciding, Mamba2AttentionMetadataBuilder):
    """vLLM's builder, which decides the step once for all layers of a group."""

    metadata = ReplayMetadata


class ReplayBackend(Mamba2AttentionBackend):
    """vLLM's backend with `ReplayBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[Mamba2AttentionMetadataBuilder]:
        """The builder of its metadata."""
        return ReplayBuilder


class ReplayMixer2(Paged, MambaMixer2):
    """vLLM's layer; where lazystate is asked for, short rows go through checkpoint and ring.

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
        """Convolution and recurrence of a batch.

        Args:
            projected_states: [tokens, ...] of in_proj. output: [tokens, HV * V], written.
        """
        own = self.decided()
        if own is None:
            return super().conv_ssm_forward(projected_states, output)
        if own.long is not None:
            with self.prefilling(own), placed(output, own.long) as out:
                super().conv_ssm_forward(taken(projected_states, own.long), out)
        if own.short is not None and own.decoding is not None:
            tokens = own.short.tokens
            self._decode(own.decoding, projected_states[tokens], output[tokens])
        return None

    def _decode(self, rows: Rows, projected: Tensor, output: Tensor) -> None:
        assert self.page is not None
        spec = self.page.spec
        mixed, dt = projected[:, self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        mixed = self.convolved(rows, mixed, self.conv_weights, self.conv1d.bias)
        x, B, C = self.split_hidden_states_B_C_fn(mixed)
        keys, values = (spec.key_heads, spec.key_dim), (spec.heads, spec.value_dim)
        step(
            self.pool(),
            rows,
            C.unflatten(-1, keys),
            B.unflatten(-1, keys),
            x.unflatten(-1, values),
            dt.unsqueeze(0),
            None,
            self.D,
            self._gates(),
            out=output.view(1, -1, *values),
        )

    def _gates(self) -> Prologue:
        """A_log from vLLM's A = -exp(A_log); where random weights have A >= 0, no decay."""
        if self._prologue is None:
            A_log = (-self.A.detach()).clamp(min=torch.finfo(torch.float32).tiny).log()
            self._prologue = Prologue("mamba2", A_log, self.dt_bias.detach())
        return self._prologue
