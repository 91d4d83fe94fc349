"""Commit and rollback: what is kept is kept, what is not leaves no trace."""

from __future__ import annotations

import itertools

import pytest
import torch

import samples
import tolerance
from lazystate import StateCache, StepError


@pytest.mark.parametrize("window", [4, 5, 7])
@pytest.mark.parametrize("kind", samples.KINDS)
def test_every_acceptance_is_the_accepted_stream(kind: str, window: int) -> None:
    """T = 4, kept 1 to 4 in every sequence of three steps: the state is that of the kept tokens."""
    spec = samples.layer(kind)
    patterns = list(itertools.product(range(1, 5), repeat=3))
    rows = torch.arange(len(patterns))
    cache, model = samples.pair(
        spec, len(patterns), window=window, max_tokens=4, checkpoint=torch.float64
    )
    for kept in torch.tensor(patterns).T:
        inputs = samples.draw(spec, len(patterns), 4)
        out = samples.advance(cache, rows, inputs, kept)
        drafts = model.begin(rows.tolist(), [4] * len(patterns))
        expected = model.step(drafts, 0, *inputs)
        model.commit(drafts, kept.tolist())
        assert tolerance.error(out, expected) <= tolerance.EXACT
    (states,) = cache.materialize(rows)
    expected = torch.stack([model.materialize(row)[0] for row in rows.tolist()])
    assert tolerance.error(states, expected) <= tolerance.EXACT


@pytest.mark.parametrize("kind", samples.KINDS)
def test_a_rejected_draft_leaves_no_trace(kind: str) -> None:
    """Kept tokens and later steps are the same bits whatever was drafted, infinities included."""
    spec = samples.layer(kind, torch.float32)
    calm, wild = (StateCache(spec, 2, window=5, max_tokens=3) for _ in range(2))
    kept = torch.tensor([1, 2])
    for _ in range(9):
        inputs = samples.draw(spec, 2, 3)
        junk = inputs._replace(
            **{n: x.clone() for n, x in inputs._asdict().items() if x is not None}
        )
        for x in (junk.k, junk.v, junk.beta):
            if x is not None:
                x[0, 1:], x[1, 2:] = 1e3, float("inf")
        calm_out = samples.advance(calm, torch.arange(2), inputs, kept)
        wild_out = samples.advance(wild, torch.arange(2), junk, kept)
        assert torch.equal(wild_out[0, :1], calm_out[0, :1])
    states = [cache.materialize(torch.arange(2))[0] for cache in (calm, wild)]
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("kind", samples.KINDS)
def test_rows_without_drafts_among_drafted_rows(kind: str) -> None:
    """A row with one token beside rows with drafts, alternating, follows its own stream."""
    spec = samples.layer(kind)
    cache, model = samples.pair(spec, 3, window=6, max_tokens=4, checkpoint=torch.float64)
    for step in range(12):
        lengths = [[1, 4, 2], [4, 1, 1], [1, 1, 3]][step % 3]
        kept = [max(1, n - step % 2) for n in lengths]
        inputs = samples.draw(spec, 3, 4)
        ticket = cache.begin(torch.arange(3), 4, torch.tensor(lengths))
        out = cache.step(ticket, 0, *inputs)
        cache.commit(ticket, torch.tensor(kept))
        drafts = model.begin([0, 1, 2], lengths)
        assert tolerance.error(out, model.step(drafts, 0, *inputs)) <= tolerance.EXACT
        model.commit(drafts, kept)


@pytest.mark.parametrize("kind", samples.KINDS)
def test_no_kept_means_all(kind: str) -> None:
    """commit(ticket) keeps every row's whole length."""
    spec = samples.layer(kind, torch.bfloat16)
    named, unnamed = (StateCache(spec, 2, window=6, max_tokens=3) for _ in range(2))
    inputs, lengths = samples.draw(spec, 2, 3), torch.tensor([3, 1])
    for cache, kept in ((named, lengths), (unnamed, None)):
        ticket = cache.begin(torch.arange(2), 3, lengths)
        cache.step(ticket, 0, *inputs)
        cache.commit(ticket, kept)
    states = [cache.materialize(torch.arange(2))[0] for cache in (named, unnamed)]
    assert torch.equal(states[0], states[1])


def test_a_row_moves_with_its_slot_between_step_and_commit() -> None:
    """kept belongs to the ticket's rows: two steps over permuted rows commit to the right slots."""
    spec = samples.layer("gdn")
    cache, model = samples.pair(spec, 3, window=8, max_tokens=3, checkpoint=torch.float64)
    for order, kept in (([2, 0, 1], [1, 2, 3]), ([1, 2, 0], [3, 1, 2])):
        inputs = samples.draw(spec, 3, 3)
        samples.advance(cache, samples.slots(*order), inputs, torch.tensor(kept))
        drafts = model.begin(order, [3, 3, 3])
        model.step(drafts, 0, *inputs)
        model.commit(drafts, kept)
    (states,) = cache.materialize(torch.arange(3))
    expected = torch.stack([model.materialize(slot)[0] for slot in range(3)])
    assert tolerance.error(states, expected) <= tolerance.EXACT


@pytest.fixture
def drafted() -> StateCache:
    """Two slots, drafts of up to 3 tokens."""
    return StateCache(samples.layer("gdn", torch.float32), 2, window=4, max_tokens=3)


def test_a_forgotten_commit_is_an_error(drafted: StateCache) -> None:
    """Every verb that would lose the open step raises StepError and names itself."""
    drafted.begin(torch.arange(2), 3)
    one = samples.slots(0)
    exported = {"k": torch.zeros(1)}
    for verb, call in {
        "begin": lambda: drafted.begin(one),
        "load": lambda: drafted.load(one, []),
        "reset": lambda: drafted.reset(one),
        "materialize": lambda: drafted.materialize(one),
        "conv_history": lambda: drafted.conv_history(one),
        "copy": lambda: drafted.copy(one, one),
        "export": lambda: drafted.export(one),
        "import_": lambda: drafted.import_(one, exported),
    }.items():
        with pytest.raises(StepError, match=f"^{verb} while a step is open"):
            call()


def test_a_doubled_commit_is_an_error(drafted: StateCache) -> None:
    """A ticket is consumed by its commit; neither commit nor step takes it again."""
    inputs = samples.draw(drafted.specs[0], 2, 3)
    ticket = drafted.begin(torch.arange(2), 3)
    drafted.step(ticket, 0, *inputs)
    drafted.commit(ticket)
    with pytest.raises(StepError, match="ticket"):
        drafted.commit(ticket)
    drafted.begin(torch.arange(2), 3)
    with pytest.raises(StepError, match="ticket"):
        drafted.step(ticket, 0, *inputs)
    with pytest.raises(StepError, match="ticket"):
        drafted.commit(ticket)


def test_a_commit_before_all_layers_is_an_error() -> None:
    """commit names the layers that have not stepped; a layer steps once."""
    spec = samples.layer("mamba2", torch.float32)
    cache = StateCache([spec, spec, spec], 1)
    inputs = samples.draw(spec, 1, 1)
    ticket = cache.begin(samples.slots(0))
    cache.step(ticket, 1, *inputs)
    with pytest.raises(StepError, match=r"\[0, 2\]"):
        cache.commit(ticket)
    with pytest.raises(StepError, match="layer 1 has already stepped"):
        cache.step(ticket, 1, *inputs)


@pytest.mark.parametrize("kept", [[0, 1], [4, 1], [3, 2], [1], [[1, 1]], [1.0, 1.0]])
def test_kept_out_of_range_is_an_error(drafted: StateCache, kept: list) -> None:
    """kept is 1 to each row's length, an integer for each row; a refused commit can be repeated."""
    ticket = drafted.begin(torch.arange(2), 3, torch.tensor([3, 1]))
    drafted.step(ticket, 0, *samples.draw(drafted.specs[0], 2, 3))
    with pytest.raises(ValueError, match="kept"):
        drafted.commit(ticket, torch.tensor(kept))
    drafted.commit(ticket, torch.tensor([2, 1]))
