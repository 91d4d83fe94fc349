"""Pages of the vLLM engine: what a block holds, and steps on strided blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazystate import StateCache, gates
from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import ALIGN, Page, page_of
from lazystate.engines.vllm.support import Kind
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.positions import Spans
from lazystate.ops.triton.settle import settle
from samples import slots
from serving_model import Layer
from tolerance import error
from tolerance import outputs as output_bound
from tolerance import state as state_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HEADS, GROUPS, V, K, WIDTH, BLOCKS = 4, 2, 20, 32, 4, 6


def small(window: int = 4, kind: Kind = "mamba2", **options: object) -> Page:
    """The page of a small layer in FP32."""
    channels = HEADS * V + 2 * GROUPS * K
    shapes = ((WIDTH - 1, channels), (HEADS, V, K))
    dtypes = (torch.float32, torch.float32)
    given = Options(window=window, **options)  # type: ignore[arg-type]
    return page_of(kind, shapes, dtypes, torch.float32, given)


def group_of(page: Page) -> tuple[Group, dict[str, torch.Tensor]]:
    """The group of one layer with pages of noise, and the parts of these by name."""
    layer: Any = Layer(page, BLOCKS, DEVICE)
    return Group([layer], 8, torch.device(DEVICE)), layer.named


def spans(blocks: list[int], lengths: list[int], tokens: int = 1) -> Spans:
    """Rows of so many tokens each, in pages (0: padded), of sequences of these lengths then."""
    starts = torch.arange(len(blocks) + 1) * tokens
    made = (torch.tensor(blocks), starts[:-1], starts[1:], torch.tensor(lengths))
    return Spans(*(x.int().to(DEVICE) for x in made))


def test_a_page_states_the_layer_that_vllm_keeps() -> None:
    """Key heads follow from the convolution's channels; vLLM's own states come first."""
    page = small(window=16)
    assert (page.spec.heads, page.spec.key_heads) == (HEADS, GROUPS)
    named = [part.name for part in page.parts if part.name != "pad"]
    assert named == ["conv", "state", "cursor", "k", "log_decay", "v", "beta"]
    assert page.shapes[0] == (WIDTH - 1, HEADS * V + 2 * GROUPS * K)


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_heads_and_groups_divide_over_devices(parallel: int) -> None:
    """A device's page is that of its heads, with at least one group each, aligned throughout."""
    heads, groups = 32 // parallel, max(8 // parallel, 1)
    shapes = ((3, heads * 64 + 2 * groups * 128), (heads, 64, 128))
    dtypes = (torch.bfloat16, torch.float32)
    page = page_of("mamba2", shapes, dtypes, torch.bfloat16, Options(window=3))
    assert (page.spec.heads, page.spec.key_heads) == (heads, groups)
    offset = 0
    for part in page.parts:
        if part.name != "pad":
            assert offset % ALIGN == 0
        offset += part.nbytes


def test_a_narrower_checkpoint_is_what_the_page_keeps() -> None:
    """The option decides the dtype that vLLM's prefill writes."""
    page = small(checkpoint="fp16")
    assert dict(zip([p.name for p in page.stated], page.dtypes, strict=True))["state"] == (
        torch.float16
    )


def raw_inputs(batch: int, kind: Kind = "mamba2") -> tuple[torch.Tensor | None, ...]:
    """C, B, x, dt and None of one token, or q, k, v, a and b."""
    keys, values, heads = (1, batch, GROUPS, K), (1, batch, HEADS, V), (1, batch, HEADS)
    gate = (*heads, K) if kind == "kda" else heads
    made = (torch.randn(shape, device=DEVICE) for shape in (keys, keys, values, gate))
    return *made, None if kind == "mamba2" else torch.randn(heads, device=DEVICE)


@pytest.mark.parametrize(
    ("kind", "fold"), [("mamba2", "raw"), ("gdn", "raw"), ("gdn", "cached"), ("kda", "raw")]
)
def test_blocks_decode_as_a_cache_does_and_settle_to_its_state(kind: Kind, fold: str) -> None:
    """Steps over several windows with padded rows, then the ring folded before prefill."""
    torch.manual_seed(0)
    page = small(kind=kind, fold=fold)
    group, parts = group_of(page)
    pool = page.pool(parts, 0)
    rates, biases = torch.randn(HEADS), torch.randn(HEADS * (K if kind == "kda" else 1))
    prologue = gates.Prologue(
        "kda_softplus" if kind == "kda" else kind, rates.to(DEVICE), biases.to(DEVICE)
    )
    skip = torch.randn(HEADS, device=DEVICE) if kind == "mamba2" else None
    start = torch.randn(2, *page.spec.state_shape)
    pool.checkpoint[[3, 1]] = start.to(DEVICE)
    cache = StateCache(
        page.spec, BLOCKS, window=page.window, fold=fold, device=DEVICE, backend="torch"
    )
    cache.load(slots(3, 1), [start])
    group.prefill(spans([3, 1], [40, 7], 5))
    lengths = {3: 40, 1: 7}
    for number in range(11):
        blocks = [3, 0, 1] if number % 3 else [1, 3, 0]
        inputs = raw_inputs(3, kind)
        lengths = {block: n + 1 for block, n in lengths.items()}
        rows = group.decode(spans(blocks, [lengths.get(b, 0) for b in blocks]), 1)
        out = torch.full((1, 3, HEADS, V), float("nan"), device=DEVICE)
        step(pool, rows, *inputs, skip, prologue, out=out)
        ticket = cache.begin(slots(*(b if b else -1 for b in blocks)).to(DEVICE))
        turned = (x if x is None else x.transpose(0, 1) for x in inputs)
        want = cache.step(ticket, 0, *turned, skip=skip, prologue=prologue)
        cache.commit(ticket)
        there = torch.tensor(blocks) > 0
        assert error(out[0, there], want[there, 0]) <= output_bound(
            page.spec, page.window, torch.float32, 3
        )
    settle(pool, group.prefill(spans([1, 3, 5], [lengths[1] + 5, lengths[3] + 5, 5], 5)))
    (exact,) = cache.materialize(slots(1, 3).to(DEVICE))
    assert error(pool.checkpoint[[1, 3]], exact) <= state_bound(
        page.spec, page.window, torch.float32, 3
    )
    before = pool.checkpoint.clone()
    settle(pool, group.prefill(spans([1, 3, 5], [lengths[1] + 9, lengths[3] + 9, 9], 4)))
    torch.testing.assert_close(pool.checkpoint, before, rtol=0, atol=0, equal_nan=True)


def test_a_step_decided_for_a_graph_is_read_where_the_graph_reads() -> None:
    """One address whatever the batch; a row of no token is padded whatever its page."""
    page = small()
    group, _ = group_of(page)
    group.prefill(spans([1, 2], [6, 8], 4))
    first = group.decode(spans([1, 2], [7, 9]), 1)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    stops = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)
    second = group.decode(
        Spans(spans([1, 2], [8, 9]).blocks, starts, stops, spans([1, 2], [8, 9]).lengths), 1
    )
    assert first.meta.data_ptr() == second.meta.data_ptr()
    assert second.meta[:, 0].tolist() == [1, -1]


def test_a_block_used_again_starts_with_an_empty_ring() -> None:
    """Records of the request before it do not reach the next one."""
    torch.manual_seed(1)
    page = small()
    group, parts = group_of(page)
    pool = page.pool(parts, 0)
    prologue = gates.Prologue("mamba2", torch.randn(HEADS, device=DEVICE))
    group.prefill(spans([2], [6], 6))
    pool.checkpoint[2] = torch.randn(page.spec.state_shape).to(DEVICE)
    for number in range(3):
        step(pool, group.decode(spans([2], [7 + number]), 1), *raw_inputs(1), None, prologue)
    group.prefill(spans([2], [4], 4))  # a fresh prompt: vLLM's prefill writes the whole state
    pool.checkpoint[2] = 0
    inputs = raw_inputs(1)
    out = step(pool, group.decode(spans([2], [5]), 1), *inputs, None, prologue)
    cache = StateCache(page.spec, 1, device=DEVICE, backend="torch")
    want = cache.step(cache.begin(slots(0).to(DEVICE)), 0, *inputs, prologue=prologue)
    assert error(out, want) <= output_bound(page.spec, page.window, torch.float32, 0)
