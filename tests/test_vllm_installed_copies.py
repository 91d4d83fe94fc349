"""Prefix caching with the kernels by which an installed vLLM copies pages, run on a CPU."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: these run its kernels")
pytest.importorskip(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid",
    reason="vLLM's runner needs what is not installed",
    exc_type=ImportError,
)

from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

from lazystate.engines.vllm.model_state import Replaying
from lazystate.engines.vllm.page import Page
from serving_model import Engine, page

REQUESTS, BLOCKS, SIZE = 3, 16, 8


class VllmEngine(Engine):
    """An engine whose pages vLLM's second runner copies, which keeps its own books."""

    def __init__(self, kept: Page, seed: int) -> None:
        super().__init__(kept, BLOCKS, SIZE, seed)
        self.tables = torch.zeros(REQUESTS, 32, dtype=torch.int32)
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32)
        kind = MambaAttentionBackendEnum.GDN_ATTN
        spec = MambaSpec(
            block_size=SIZE,
            shapes=kept.shapes,
            dtypes=kept.dtypes,
            mamba_type=kind,
            mamba_cache_mode="align",
        )
        groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
        copied = {kind: (get_temporal_copy_spec,) * len(kept.shapes)}
        context = MambaSpecDecodeGPUContext.create(
            REQUESTS,
            groups,  # type: ignore[arg-type]
            copied,
            torch.device("cpu"),
            lambda n, dtype: torch.zeros(n, dtype=dtype),  # type: ignore[arg-type, return-value]
        )
        layers = {"a": SimpleNamespace(kv_cache=self.pages)}
        context.initialize_from_forward_context(groups, layers, copied, [self.tables])  # type: ignore[arg-type]
        self.state: Any = Replaying.__new__(Replaying)
        self.state.vllm_config = SimpleNamespace(num_speculative_tokens=kept.tokens - 1)
        self.state.max_num_reqs, self.state._align_mode = REQUESTS, True
        self.state._mamba_ctx, self.state._mamba_spec = context, spec
        self.state._mamba_group_ids, self.state.recoverssm = [0], None
        for name in ("_mamba_state_idx_gpu", "_mamba_src_col_gpu", "_mamba_src_off_gpu"):
            setattr(self.state, name, torch.zeros(REQUESTS, dtype=torch.int32))
        self.state.num_accepted_tokens_gpu = torch.ones(REQUESTS, dtype=torch.int32)

    def begin(self, name: int, hit: int | None = None) -> None:
        """As the engine's, and as vLLM notes a new request."""
        super().begin(name, hit)
        request = self.requests[name]
        self.tables[name] = 0
        for column, number in request.pages.items():
            self.tables[name, column] = number
        self.lengths[name] = request.length
        self.state._mamba_state_idx_gpu[name] = (request.length - 1) // SIZE

    def enter(self, rows: list[tuple[int, int]]) -> None:
        """What vLLM does before a step."""
        names, tokens = zip(*rows, strict=True)
        for name, count in rows:
            request = self.requests[name]
            request.column = (request.length + count - 1) // SIZE
            self._own(request, request.column)
            self.tables[name, request.column] = request.pages[request.column]
        batch = SimpleNamespace(
            num_reqs=len(rows),
            idx_mapping=torch.tensor(names, dtype=torch.int32),
            query_start_loc=torch.tensor([0, *tokens]).cumsum(0).int(),
        )
        self.state.preprocess_state(batch, (), None, self.lengths)
        for name in names:
            assert self.state._mamba_state_idx_gpu[name] == self.requests[name].column

    def leave(self, rows: list[tuple[int, int]]) -> None:
        """What it does after one."""
        names, kept = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
        sampled = torch.where(kept > self.page.tokens, 0, kept)
        for name, count in rows:
            self.lengths[name] += count
        self.state.postprocess_state(names, sampled, self.lengths)
        for name, count in rows:
            request = self.requests[name]
            if (column := self._completed(request, count)) is not None:
                self._cache(request, column)


@pytest.mark.parametrize("drafts", [0, 3])
def test_prefixes_are_what_vllm_copies(drafts: int) -> None:
    """A prompt, and drafts beyond the ends of blocks; another request goes on from each block."""
    engine = VllmEngine(page("gdn", 5, drafts), drafts)
    engine.begin(0)
    engine.step([(0, 6, 6)])
    pick, beyond = random.Random(drafts), 0
    for number in range(16):
        kept = pick.randint(1, 1 + drafts)
        known = len(engine.cached)
        engine.step([(0, 1 + drafts, kept)])
        if len(engine.cached) == known:
            continue
        beyond += engine.requests[0].length % SIZE > 0
        other = 1 + number % 2
        engine.begin(other, hit=known)
        engine.step([(other, 1 + pick.randrange(6), 1)])
        engine.settle(other)
        engine.end(other)
    assert len(engine.cached) > 1
    assert (beyond > 1) == (drafts > 0)
    assert engine.state.num_accepted_tokens_gpu.tolist() == [1] * REQUESTS
