"""What every layer with a page of lazystate's does alike, mixed into vLLM's classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lazystate.engines.vllm.asked import device_of, layer_page, step_metadata
from lazystate.engines.vllm.batch import Part
from lazystate.engines.vllm.page import Page
from lazystate.engines.vllm.widened import widened
from lazystate.ops.pool import Pool
from lazystate.ops.triton.conv import convolve_ring, turn
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.settle import settle


class Metadata(Protocol):
    """What is decided of a step, see `builder.Decided`."""

    short: Part | None
    decoding: Rows | None
    long: Part | None
    filled: Rows | None
    settling: Rows | None
    prefill: Any


class Paged:
    """A recurrent layer of vLLM that keeps a `Page`; with None it is vLLM's own in all it does.

    Attributes:
        page: what a block holds. backend: whose builder decides steps.
    """

    page: Page | None = None
    backend: ClassVar[type]
    prefix: str
    kv_cache: Sequence[Tensor]
    _pages: object = None  # where those are that the next two are made of
    _parts: dict[str, Tensor]
    _pool: Pool | None = None

    def ask_for_page(self) -> None:
        """Keep the page that the engine's configuration asks for; once vLLM's constructor is done.

        Raises:
            ValueError: for what lazystate cannot do, with the reasons.
        """
        self.page = layer_page(self.get_state_shape(), self.get_state_dtype(), self.number)

    def get_state_shape(self) -> Any:
        """Shapes of a page's parts."""
        return super().get_state_shape() if self.page is None else self.page.shapes  # type: ignore[misc]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of a page's parts."""
        return super().get_state_dtype() if self.page is None else self.page.dtypes  # type: ignore[misc]

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM's; drafts take no pages, since a page holds what is needed to leave them out."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        return spec if self.page is None else replace(spec, num_speculative_blocks=0)

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """None: a prefill writes one page, whose cursor says where it ends."""
        own = getattr(super(), "get_prefill_checkpoint_alignment", lambda: None)
        return own() if self.page is None else None

    def get_attn_backend(self) -> type:
        """The backend whose builder decides steps."""
        return super().get_attn_backend() if self.page is None else self.backend  # type: ignore[misc]

    @contextmanager
    def unpaged(self) -> Iterator[None]:
        """For code of vLLM's that unpacks shapes or dtypes of two states."""
        page, self.page = self.page, None
        try:
            yield
        finally:
            self.page = page

    def parts(self) -> dict[str, Tensor]:
        """The parts of the layer's pages by name, as vLLM has bound them last."""
        first = self.kv_cache[0]
        pages = first.data_ptr(), first.shape
        if self._pages != pages:
            assert self.page is not None
            self._pages, self._parts, self._pool = pages, self.page.named(self.kv_cache), None
        return self._parts

    def pool(self) -> Pool:
        """The same pages as a pool."""
        parts = self.parts()
        if self._pool is None:
            assert self.page is not None
            self._pool = self.page.pool(parts, self.number, device_of())
        return self._pool

    @property
    def number(self) -> int:
        """The layer's in the model."""
        found = re.search(r"\d+", self.prefix)
        return int(found.group()) if found else 0

    def decided(self) -> Metadata | None:
        """What is decided of the step that runs; None where vLLM's own layer is to run."""
        metadata = step_metadata()
        if self.page is None or not isinstance(metadata, dict):
            return None
        return metadata.get(self.prefix)

    @contextmanager
    def prefilling(self, own: Metadata) -> Iterator[None]:
        """vLLM's own layer on the rows of a prefill: pages with empty rings, of two parts; where
        it does not take checkpoints as they are, copies of these rows' in their place.
        """
        assert self.page is not None
        metadata: Any = step_metadata()
        parts = self.parts()
        states = self.page.prefilled(parts)
        if own.settling is not None:
            settle(self.pool(), own.settling)
            turn(parts["conv"], own.settling, states[0].shape[1] + 1)
        bound, metadata[self.prefix] = self.kv_cache, own.prefill
        try:
            if self.page.widened:
                assert own.filled is not None
                with widened(states[0], self.pool().states, own.filled, self.page.state) as wide:
                    self.kv_cache = wide
                    yield
            else:
                self.kv_cache = states
                yield
        finally:
            self.kv_cache, metadata[self.prefix] = bound, own

    def convolved(
        self,
        rows: Rows,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ring: Tensor | None = None,
    ) -> Tensor:
        """The convolution of rows that decode, its inputs appended to the ring.

        Args:
            x: [tokens, C]. weight: [C, 1, width] or [C, width]. ring: None for the page's.

        Returns:
            [1, tokens, C].
        """
        ring = self.parts()["conv"] if ring is None else ring
        return convolve_ring(ring, rows, x.unsqueeze(0), weight.flatten(1), bias, silu=True)
