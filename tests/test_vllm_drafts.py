"""Pages that tell by positions where a sequence stands: drafts, copies, pages used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import samples
from lazystate.engines.vllm.support import Kind
from lazystate.ops.triton.conv import convolve_ring
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.positions import Spans
from serving_model import Engine, page

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_what_the_next_length_leaves_out_was_never_there(kind: Kind) -> None:
    """Ragged drafts of which some are kept, over several windows, beside a padded row."""
    engine = Engine(page(kind, 4, 3), 6, None, 0, DEVICE)
    engine.begin(0)
    engine.begin(1)
    engine.step([(0, 9, 9), (1, 1, 1)])
    for number in range(5):
        drafted = number % 4 + 1
        rows = [(0, drafted, number % drafted + 1), (-1, 0, 0), (1, 4 - number % 4, 1)]
        engine.step(rows if number % 2 else rows[::-1])
    engine.settle(0)
    engine.settle(1)


def test_a_step_that_repeats_does_so_from_the_same_records() -> None:
    """Rows without drafts, in a batch with and without others that have some."""
    engine = Engine(page("gdn", 5, 2), 6, None, 1, DEVICE)
    engine.begin(0)
    engine.begin(1)
    engine.step([(0, 5, 5), (1, 4, 4)])
    for _ in range(2):
        engine.step([(0, 1, 1), (1, 1, 1)])
        engine.step([(0, 1, 1), (1, 3, 2)])
        engine.step([(1, 2, 1), (0, 3, 1)])
    engine.settle(0)


def test_a_prefill_may_come_before_rows_that_decode() -> None:
    """Rows in an order that vLLM rarely has: the tokens of a prefill lie between the others'."""
    engine = Engine(page("mamba2", 4, 1), 6, None, 2, DEVICE)
    for name in range(3):
        engine.begin(name)
    engine.step([(0, 3, 3), (1, 3, 3)])
    engine.step([(0, 2, 1), (2, 7, 7), (1, 1, 1)])
    engine.step([(2, 1, 1), (0, 5, 5), (1, 2, 2)])
    engine.step([(0, 1, 1), (1, 2, 1), (2, 2, 2)])
    for name in range(3):
        engine.settle(name)


def test_a_prefix_is_read_where_its_block_ends() -> None:
    """Drafts cross a block's end; who finds its page later goes on from exactly there."""
    engine = Engine(page("gdn", 4, 3), 12, 8, 3, DEVICE)
    engine.begin(0)
    engine.step([(0, 6, 6)])
    engine.step([(0, 4, 3)])  # 6 to 9, and 10 was rejected
    assert [position for _, position, _ in engine.cached] == [8]
    engine.step([(0, 4, 2)])
    engine.begin(1, hit=0)
    engine.begin(2, hit=0)
    engine.step([(1, 2, 2), (0, 1, 1), (2, 7, 7)])
    engine.settle(1)
    engine.settle(2)
    engine.settle(0)


class Captured(Engine):
    """Decoding in one CUDA graph for 4 rows, captured before there are requests, as vLLM does it.

    Without a GPU the same launches are repeated on the same memory.
    """

    ROWS = 4

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        tokens = self.ROWS * self.page.tokens
        self.x = torch.zeros(tokens, self.spec.conv_channels, device=DEVICE)
        drawn = samples.draw(self.spec, 1, tokens, generator=self.generator)
        self.inputs = [y if y is None else y.to(DEVICE) for y in drawn]
        self.out = torch.zeros(1, tokens, *self.spec.state_shape[:2], device=DEVICE)
        self.on = self.weight.to(DEVICE)
        none = torch.zeros(self.ROWS, dtype=torch.int32, device=DEVICE)
        self.rows = self.group.decode(Spans(none, none, none, none), self.page.tokens)
        self.launch()  # compiles
        self.replay = self.launch
        if DEVICE == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.launch()
            self.replay = graph.replay

    def launch(self) -> None:
        """The kernels of a layer."""
        ring, given = self.parts["conv"], self.x.unsqueeze(0)
        self.convolved = convolve_ring(ring, self.rows, given, self.on, None, True)
        step(self.pool, self.rows, *self.inputs, out=self.out)

    def decode(
        self, spans: Spans, longest: int, x: torch.Tensor, inputs: samples.Inputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the engine's; rows and tokens behind the batch's are padded, or left from before."""
        del longest
        total, rows = len(x), spans.blocks.numel()
        self.x[:total] = x.to(DEVICE)
        for memory, new in zip(self.inputs, inputs, strict=True):
            if memory is not None and new is not None:
                memory[:, :total] = new.to(DEVICE)
        behind = torch.full((self.ROWS - rows,), total, dtype=torch.int32, device=DEVICE)
        named = spans.blocks, spans.starts, spans.stops, spans.lengths
        ends = (torch.zeros_like(behind), behind, behind, torch.zeros_like(behind))
        padded = Spans(*(torch.cat(pair) for pair in zip(named, ends, strict=True)))
        decided = self.group.decode(padded, self.page.tokens)
        assert decided.meta.data_ptr() == self.rows.meta.data_ptr()
        self.replay()
        return self.convolved[0, :total].cpu(), self.out[0, :total].cpu()


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_one_graph_serves_every_batch(kind: Kind) -> None:
    """Ragged drafts, fewer rows, rows that begin and that fold: captured once, with no request."""
    engine = Captured(page(kind, 4, 2), 6, None, 4, DEVICE)
    for name in range(3):
        engine.begin(name)
    engine.step([(0, 3, 3), (1, 1, 1)])
    engine.step([(1, 2, 1), (0, 3, 1), (2, 3, 3)])
    engine.step([(0, 1, 1), (1, 3, 2)])
    engine.end(2)
    engine.begin(2)
    engine.step([(2, 1, 1), (1, 3, 3), (0, 3, 2)])
    for name in range(3):
        engine.settle(name)


LENGTHS = st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 8))
STEPS = st.lists(
    st.tuples(
        st.lists(LENGTHS, min_size=1, max_size=3, unique_by=lambda r: r[0]), st.integers(0, 5)
    ),
    min_size=1,
    max_size=5,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    kind=st.sampled_from(["mamba2", "gdn", "kda"]),
    window=st.integers(4, 6),
    drafts=st.integers(0, 3),
    size=st.sampled_from([None, 4, 8]),
    steps=STEPS,
    seed=st.integers(0, 2**32),
)
def test_random_programs(
    kind: Kind,
    window: int,
    drafts: int,
    size: int | None,
    steps: list[tuple[list[tuple[int, int, int]], int]],
    seed: int,
) -> None:
    """Requests come, prefill, draft, accept, find prefixes, are preempted; pages go around."""
    engine = Engine(page(kind, window, drafts), 20, size, seed, DEVICE)
    for rows, event in steps:
        batch = []
        for name, tokens, kept in rows:
            if name not in engine.requests:
                engine.begin(name, kept if size is not None else None)
            if size is not None:  # vLLM lets prefill end at a block's end
                left = size - engine.requests[name].length % size
                tokens = tokens if tokens <= 1 + drafts else min(tokens, left)
            batch.append((name, tokens, kept % tokens + 1))
        engine.step(batch)
        if event in engine.requests:
            engine.settle(event)
            engine.end(event)
    for name in engine.requests:
        engine.settle(name)
