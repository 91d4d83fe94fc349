"""What an installed vLLM copies and allots where pages are lazystate's: prefixes, and drafts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: these are about what it copies")

from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.kv_cache_interface import MambaSpec

pytest.importorskip(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid",
    reason="vLLM's runner needs what is not installed",
    exc_type=ImportError,
)

from lazystate.engines.vllm import gdn, models
from lazystate.engines.vllm.model_state import Replaying, completed, replaying
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import page_of
from serving_model import Layer
from test_vllm_installed import SHAPES, builder, common_of  # noqa: F401

DRAFTS = 3
PAGE = page_of(
    "gdn",
    ((SHAPES[0][0] + DRAFTS, SHAPES[0][1]), SHAPES[1]),
    (torch.float32,) * 2,
    torch.float32,
    Options(),
    tokens=1 + DRAFTS,
)


def test_a_block_is_complete_when_kept_tokens_reach_its_end() -> None:
    """Of 8 tokens: none, up to its end, beyond it, and a prompt that ends there."""
    lengths = torch.tensor([7, 8, 10, 9, 16], dtype=torch.int32)
    ended, columns = completed(lengths, torch.tensor([3, 2, 3, 1, 0], dtype=torch.int32), 8)
    assert ended.tolist() == [False, True, True, False, True]
    assert columns[ended].tolist() == [0, 0, 1]


def state_of(drafts: int, calls: list[Any]) -> Replaying:
    """A model state of 4 requests with blocks of 8 tokens, that notes what it has copied."""
    state = Replaying.__new__(Replaying)
    state.vllm_config = SimpleNamespace(num_speculative_tokens=drafts)
    state.max_num_reqs = 4
    state.num_accepted_tokens_gpu = torch.ones(4, dtype=torch.int32)
    state._mamba_spec = SimpleNamespace(block_size=8)
    state._mamba_state_idx_gpu = torch.tensor([1, 1, 0, 2], dtype=torch.int32)
    state._mamba_ctx = SimpleNamespace(run_fused_precopy=lambda *given: calls.append(given))
    return state


def test_pages_of_completed_blocks_are_copied_as_they_are() -> None:
    """Rows in another order than requests; one without a request changes nothing."""
    calls: list[Any] = []
    state = state_of(DRAFTS, calls)
    lengths = torch.tensor([9, 12, 5, 17], dtype=torch.int32)
    rows = torch.tensor([3, -1, 0, 1], dtype=torch.int32)
    state.postprocess_state(rows, torch.tensor([1, 4, 2, 3], dtype=torch.int32), lengths)
    ((count, target, source, bias, mapping),) = calls
    assert count == 4 and mapping is rows and not bias.any()
    assert source[:4].tolist() == [1, -1, 0, -1]  # request 0 has gone from 7 to 9
    assert target[0] == 0
    assert state.num_accepted_tokens_gpu.tolist() == [1, 1, 1, 1]


def test_without_drafts_or_prefixes_nothing_is_copied_after_a_step() -> None:
    """vLLM copies before a step, from the page of the block before."""
    calls: list[Any] = []
    state = state_of(0, calls)
    rows, lengths = torch.tensor([0], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    state.postprocess_state(rows, 1, lengths)
    state = state_of(DRAFTS, calls)
    del state._mamba_ctx
    state.postprocess_state(rows, torch.tensor([4], dtype=torch.int32), lengths)
    assert not calls


@pytest.mark.parametrize("asked", [True, False])
def test_a_model_says_how_its_pages_are_copied(asked: bool, monkeypatch: Any) -> None:
    """All parts whole, by functions that vLLM knows; without lazystate what vLLM says."""
    config = SimpleNamespace(additional_config={"lazystate": {}} if asked else {})
    monkeypatch.setattr(models, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(models, "page_asked", lambda *_: PAGE if asked else None)

    class Stock(torch.nn.Module):
        def __init__(self, *, vllm_config: Any) -> None:
            super().__init__()
            self.config = vllm_config

        @classmethod
        def get_mamba_state_shape_from_config(cls, _: Any) -> Any:
            return SHAPES

        @classmethod
        def get_mamba_state_dtype_from_config(cls, _: Any) -> Any:
            return (torch.float32,) * 2

        @classmethod
        def get_mamba_state_copy_func(cls) -> Any:
            return ("theirs",)

    model: Any = models._paged(Stock)(vllm_config=config)
    if not asked:
        assert model.get_mamba_state_copy_func() == ("theirs",)
        assert not hasattr(model, "get_model_state_cls")
        return
    funcs = (get_temporal_copy_spec,) * len(PAGE.shapes)
    assert model.get_mamba_state_copy_func() == funcs
    assert model.get_mamba_state_copy_funcs({"gdn"}) == {"gdn": funcs}
    assert model.get_model_state_cls() is Replaying
    made = PAGE.named(Layer(PAGE, 4, "cpu").kv_cache)
    assert made["conv"].stride(0) * 4 == made["k"].stride(0) * made["k"].element_size()


def test_a_models_own_state_does_what_it_did_before() -> None:
    """Its start, and all but what comes after drafts; once, also for a model inside of a model."""

    class Own(Replaying.__mro__[1]):  # type: ignore[misc]
        started = True

        def postprocess_state(self, *_: Any) -> None:
            raise AssertionError("counts of accepted drafts would be kept")

    made = replaying(Own)
    assert issubclass(made, Own) and made.started
    assert made.postprocess_state is Replaying.postprocess_state
    assert replaying(made) is made and replaying(None) is Replaying


def test_drafts_take_no_pages(monkeypatch: Any) -> None:
    """A layer's cache has one page a request, whatever is drafted."""
    spec = MambaSpec(block_size=64, shapes=SHAPES, dtypes=(torch.float32,) * 2)
    stock = gdn.ReplayDeltaNet.__mro__[2]
    theirs = replace(spec, num_speculative_blocks=DRAFTS)
    monkeypatch.setattr(stock, "get_kv_cache_spec", lambda *_: theirs)
    layer = gdn.ReplayDeltaNet.__new__(gdn.ReplayDeltaNet)
    assert layer.get_kv_cache_spec(None) is theirs
    layer.page = PAGE
    assert layer.get_kv_cache_spec(None).num_speculative_blocks == 0


def test_what_was_kept_is_what_the_next_lengths_say(builder: Any) -> None:  # noqa: F811
    """Drafts, a row without any, a prompt's tail and a prompt; then one draft was rejected."""
    builder._tokens = 1 + DRAFTS
    builder._group._page = PAGE
    layer: Any = Layer(PAGE, 8, "cpu")
    builder._group._layers = [layer]
    computed, new = [0, 0, 0, 0], [20, 21, 22, 5]
    builder.build(0, common_of(computed, new, [True] * 4))
    first = builder.build(0, common_of([20, 21, 22, 5], [4, 1, 2, 7], [False, False, True, True]))
    assert first.short.lengths.tolist() == [4, 1, 2] and first.decoding.tokens == 1 + DRAFTS
    assert first.decoding.starts.tolist() == [0, 4, 5]
    assert first.prefill.num_prefills == 1 and first.prefill.num_spec_decodes == 0
    second = builder.build(0, common_of([23, 22, 24], [4, 1, 4], [False] * 3))
    assert second.decoding.meta[:, 1].tolist() == [3, 1, 2]
    assert second.prefill is None


def test_a_graph_is_captured_for_all_that_its_batches_may_have(builder: Any) -> None:  # noqa: F811
    """The longest row that is promised, whatever the first batch has; short prompts are in it."""
    builder._tokens = 1 + DRAFTS
    common = common_of([5, 5], [1, 1], [False, True])
    assert builder.build(0, common).decoding.tokens == 1
    assert builder.build(0, common.replace(max_query_len=4)).decoding.tokens == 1 + DRAFTS
    fresh = builder.build(0, common_of([0, 5], [1, 1], [True, False]))
    assert fresh.prefill is None
    assert fresh.decoding.meta[0, [1, 4, 5]].tolist() == [0, 0, 1]


def copies(tensors: list[Tensor]) -> int:
    """Bytes of one page of the tensors that vLLM copies."""
    return sum(x[0].numel() * x.element_size() for x in tensors)


def test_all_of_a_page_is_copied() -> None:
    """What vLLM is told of is the whole page, alignment included."""
    layer = Layer(PAGE, 4, "cpu")
    assert copies(layer.kv_cache) == sum(part.nbytes for part in PAGE.parts)
