"""Pages of the vLLM engine: what a block holds, and steps on strided blocks."""

from __future__ import annotations

import pytest
import torch

from lazystate import StateCache, gates
from lazystate.engines.vllm.group import NULL_BLOCK, Group
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import ALIGN, Page, page_of
from lazystate.engines.vllm.support import Kind
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.settle import settle
from samples import slots
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


def bound(page: Page) -> list[torch.Tensor]:
    """Pages of noise, NaN among it, and their parts as vLLM binds them."""
    size = sum(part.nbytes for part in page.parts)
    raw = torch.full((BLOCKS, size + 64), -1, dtype=torch.int8, device=DEVICE)
    parts, offset = [], 0
    for part in page.parts:
        piece = raw[:, offset : offset + part.nbytes].view(part.dtype)
        parts.append(piece.unflatten(1, part.shape))
        offset += part.nbytes
    return parts


def test_a_page_states_the_layer_that_vllm_keeps() -> None:
    """Key heads follow from the convolution's channels; vLLM's own states come first."""
    page = small(window=16)
    assert (page.spec.heads, page.spec.key_heads) == (HEADS, GROUPS)
    named = [part.name for part in page.parts if part.name != "pad"]
    assert named == ["conv", "state", "k", "log_decay", "v", "beta"]
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
    assert dict(zip([p.name for p in page.parts], page.dtypes, strict=True))["state"] == (
        torch.float16
    )


def raw_inputs(batch: int, kind: Kind = "mamba2") -> tuple[torch.Tensor | None, ...]:
    """C, B, x, dt and None of one token, or q, k, v, a and b."""
    keys, values, heads = (batch, 1, GROUPS, K), (batch, 1, HEADS, V), (batch, 1, HEADS)
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
    parts = bound(page)
    pool, group = page.pool(parts, 0), Group(page.window, 8, torch.device(DEVICE))
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
    for number in range(11):
        blocks = [3, NULL_BLOCK, 1] if number % 3 else [1, 3, NULL_BLOCK]
        inputs = raw_inputs(3, kind)
        rows = group.decode(BLOCKS, torch.tensor(blocks, dtype=torch.int32, device=DEVICE))
        out = torch.full((3, 1, HEADS, V), float("nan"), device=DEVICE)
        step(pool, rows, *inputs, skip, prologue, out=out)
        ticket = cache.begin(slots(*(b if b else -1 for b in blocks)).to(DEVICE))
        want = cache.step(ticket, 0, *inputs, skip=skip, prologue=prologue)
        cache.commit(ticket)
        assert error(out, want) <= output_bound(page.spec, page.window, torch.float32, 3)
    settle(pool, group.prefill(BLOCKS, torch.tensor([1, 3, 5], device=DEVICE)))
    (exact,) = cache.materialize(slots(1, 3).to(DEVICE))
    assert error(pool.checkpoint[[1, 3]], exact) <= state_bound(
        page.spec, page.window, torch.float32, 3
    )
    held = group.cursors(BLOCKS).filled
    assert not held.any()
    before = pool.checkpoint.clone()
    settle(pool, group.prefill(BLOCKS, torch.tensor([1, 3, 5], device=DEVICE)))
    torch.testing.assert_close(pool.checkpoint, before, rtol=0, atol=0, equal_nan=True)


def test_a_block_used_again_starts_with_an_empty_ring() -> None:
    """Records of the request before it do not reach the next one."""
    torch.manual_seed(1)
    page = small()
    pool = page.pool(bound(page), 0)
    group = Group(page.window, 8, torch.device(DEVICE))
    block = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    prologue = gates.Prologue("mamba2", torch.randn(HEADS, device=DEVICE))
    pool.checkpoint[2] = torch.randn(page.spec.state_shape).to(DEVICE)
    for _ in range(3):
        step(pool, group.decode(BLOCKS, block), *raw_inputs(1), None, prologue)
    group.prefill(BLOCKS, block)  # a fresh prompt: vLLM's prefill writes the whole state
    pool.checkpoint[2] = 0
    inputs = raw_inputs(1)
    out = step(pool, group.decode(BLOCKS, block), *inputs, None, prologue)
    cache = StateCache(page.spec, 1, device=DEVICE, backend="torch")
    want = cache.step(cache.begin(slots(0).to(DEVICE)), 0, *inputs, prologue=prologue)
    assert error(out, want) <= output_bound(page.spec, page.window, torch.float32, 0)
