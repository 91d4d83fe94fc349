"""What every layer with a page of lazystate's does alike, mixed into vLLM's classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from lazystate.engines.vllm.asked import device_of, layer_page
from lazystate.engines.vllm.page import Page
from lazystate.ops.pool import Pool


class Paged:
    """A recurrent layer of vLLM that keeps a `Page`; with None it is vLLM's own in all it does.

    Attributes:
        page: what a block holds. backend: whose builder decides steps.
    """

    page: Page | None = None
    backend: ClassVar[type]
    prefix: str
    kv_cache: Sequence[Tensor]
    _pool: Pool | None = None

    def ask_for_page(self) -> None:
        """Keep the page that the engine's configuration asks for; once vLLM's constructor is done.

        Raises:
            ValueError: for what lazystate cannot do, with the reasons.
        """
        self.page = layer_page(self.get_state_shape(), self.get_state_dtype(), self._number())

    def get_state_shape(self) -> Any:
        """Shapes of a page's parts."""
        return super().get_state_shape() if self.page is None else self.page.shapes  # type: ignore[misc]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of a page's parts."""
        return super().get_state_dtype() if self.page is None else self.page.dtypes  # type: ignore[misc]

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

    def pool(self) -> Pool:
        """The layer's pages as vLLM has bound them last."""
        assert self.page is not None
        state = self.kv_cache[1]
        known = None if self._pool is None else self._pool.checkpoint
        if known is None or (known.data_ptr(), known.shape) != (state.data_ptr(), state.shape):
            self._pool = self.page.pool(self.kv_cache, self._number(), device_of())
        assert self._pool is not None
        return self._pool

    def _number(self) -> int:
        found = re.search(r"\d+", self.prefix)
        return int(found.group()) if found else 0
