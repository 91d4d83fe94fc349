"""Metadata of a step for layers of lazystate's, mixed into vLLM's builders.

Acceptance of drafts is not looked at: the next step's sequence lengths say what was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from lazystate.engines.vllm.batch import Part, divide, only, spans_of
from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.paged import Paged
from lazystate.engines.vllm.sketches import Sketches
from lazystate.engines.vllm.widened import numbered
from lazystate.ops.triton.cursors import Rows


@dataclass
class Decided:
    """What is added to vLLM's metadata.

    Attributes:
        short: rows that go through checkpoint and ring. decoding: what they do.
        long: rows of a prefill. filled: their pages. settling: what is done before it; None where
            nothing is.
        prefill: vLLM's metadata of these rows alone.
    """

    short: Part | None = None
    decoding: Rows | None = None
    long: Part | None = None
    filled: Rows | None = None
    settling: Rows | None = None
    prefill: Any = None


class Deciding:
    """A builder that decides a step once for all layers of a group.

    Attributes:
        metadata: vLLM's class with `Decided`.
    """

    metadata: ClassVar[type]
    supports_update_block_table = False  # another group's pages have other cursors
    kv_cache_spec: Any
    vllm_config: Any
    decode_cudagraph_max_bs: int

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        most = max(vllm_config.scheduler_config.max_num_seqs, self.decode_cudagraph_max_bs)
        self._group, self._device = Group(layers, most, device), device
        page = layers[0].page
        if isinstance(page.storage.view, Sketches):
            page.storage.view.check_weights(_gates(context))
        self._tokens: int = page.tokens
        self._widened: bool = page.widened

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *_: Any, **__: Any) -> Any:
        """What is decided of a batch; drafts and acceptance, the other arguments, do not matter."""
        common = common_attn_metadata
        short, long = divide(common.query_start_loc_cpu, self._tokens, self._device)
        blocks = self._blocks(common)
        decoding = filled = settling = prefill = None
        if long is not None:
            filled = self._group.prefill(spans_of(long, common, blocks))
            if bool((common.seq_lens_cpu_upper_bound[long.rows] > long.lengths).any()):
                settling = filled
            behind = only(long, common)
            behind = numbered(behind) if self._widened else behind
            prefill = super().build(common_prefix_len, behind)  # type: ignore[misc]
        if short is not None:
            longest = int(short.lengths.max())
            if long is None:  # a graph is captured for more than its first batch has
                longest = max(longest, common.max_query_len)
            tokens = 1 if longest <= 1 else self._tokens
            decoding = self._group.decode(spans_of(short, common, blocks), tokens)
        return self.metadata(
            **_nothing(self.metadata),
            **_counts(self.metadata, common),
            short=short,
            decoding=decoding,
            long=long,
            filled=filled,
            settling=settling,
            prefill=prefill,
        )

    def _blocks(self, common: Any) -> Tensor:
        """Int32 [B], the page that each row's sequence is in at the end of the step."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = common.block_table_tensor
        return mamba_get_block_table_tensor(table, common.seq_lens, self.kv_cache_spec, mode)[:, 0]


def _gates(context: Mapping[str, Any]) -> dict[int, Tensor]:
    """A_log of the model's layers with pages, by number; Mamba-2's have none as it was stored."""
    layers = [layer for layer in context.values() if isinstance(layer, Paged)]
    return {layer.number: layer.A_log for layer in layers if hasattr(layer, "A_log")}


COUNTED = ("num_reqs", "num_actual_tokens")


def _nothing(metadata: type) -> dict[str, Any]:
    """Values of vLLM's fields that have no default: no row of any kind."""
    needed = [f.name for f in fields(metadata) if f.default is MISSING and f.name not in COUNTED]
    counts = ("num_prefill", "num_decode", "num_spec_decode")
    return {name: 0 if name.startswith(counts) else None for name in needed}


def _counts(metadata: type, common: Any) -> dict[str, Any]:
    known = {f.name for f in fields(metadata)}
    return {name: getattr(common, name) for name in COUNTED if name in known}
