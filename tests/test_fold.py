"""When a row folds, and what may enter the checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import samples
import tolerance
from lazystate import StateCache

ERASING = [kind for kind in samples.KINDS if samples.SPECS[kind].erase]


def folds(cache: StateCache, steps: int, tokens: int = 1) -> list[list[int]]:
    """For each of some full steps, the slots whose checkpoint it wrote."""
    spec, everyone = cache.specs[0], torch.arange(cache.slots)
    seen = []
    for _ in range(steps):
        before = cache.export(everyone)["0.checkpoint"]
        samples.advance(cache, everyone, samples.draw(spec, cache.slots, tokens))
        after = cache.export(everyone)["0.checkpoint"]
        written = ~torch.eq(before, after).flatten(1).all(1)
        seen.append(written.nonzero().flatten().tolist())
    return seen


def loaded(kind: str, slots: int, phase: Tensor | None = None, **options) -> StateCache:
    """A cache of FP32 activations and random states."""
    spec = samples.layer(kind, torch.float32)
    cache = StateCache(spec, slots, **options)
    cache.load(torch.arange(slots), [torch.randn(slots, *spec.state_shape)], phase=phase)
    return cache


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_row_folds_when_its_window_would_overflow(tokens: int) -> None:
    """A step folds exactly if the committed records and its own pass the window: h + T > L."""
    window, held, expected = 7, 0, []
    for _ in range(12):
        overflow = held + tokens > window
        expected.append([0] if overflow else [])
        held = tokens if overflow else held + tokens
    assert folds(loaded("gdn", 1, window=window, max_tokens=4), 12, tokens) == expected


def test_phases_fold_when_promised() -> None:
    """A row loaded with phase p folds p tokens early, once; then every window."""
    cache = loaded("mamba2", 4, phase=torch.tensor([0, 1, 2, 3]), window=4)
    expected = [[], [3], [2], [1], [0], [3], [2], [1], [0]]
    assert folds(cache, 9) == expected


def test_a_reset_slot_has_no_phase() -> None:
    """A phase belongs to the loaded request and goes with it."""
    cache = loaded("mamba2", 1, phase=torch.tensor([3]), window=4)
    cache.reset(samples.slots(0))
    assert folds(cache, 5) == [[], [], [], [], [0]]


@pytest.mark.parametrize("kind", samples.KINDS)
def test_the_window_does_not_change_outputs(kind: str) -> None:
    """Whether and when a row folds is invisible: windows 3, 8 and 40 give the same outputs."""
    spec = samples.layer(kind)
    state = torch.randn(2, *spec.state_shape, dtype=torch.float64)
    caches = [
        StateCache(spec, 2, window=window, max_tokens=3, checkpoint=torch.float64)
        for window in (3, 8, 40)
    ]
    for cache in caches:
        cache.load(torch.arange(2), [state])
    for step in range(20):
        inputs = samples.draw(spec, 2, step % 3 + 1)
        outs = [samples.advance(cache, torch.arange(2), inputs) for cache in caches]
        assert max(tolerance.error(out, outs[0]) for out in outs) <= tolerance.EXACT


@pytest.mark.parametrize("kind", ERASING)
def test_a_raw_fold_reads_raw_records_only(kind: str) -> None:
    """No cached correction enters the state: it is the same with NaN in place of all of them."""
    cache = loaded(kind, 2, window=8)
    for _ in range(5):
        samples.advance(cache, torch.arange(2), samples.draw(cache.specs[0], 2, 1))
    (state,) = cache.materialize(torch.arange(2))
    exported = cache.export(torch.arange(2))
    exported["0.u"].fill_(float("nan"))
    cache.import_(torch.arange(2), exported)
    assert torch.equal(cache.materialize(torch.arange(2))[0], state)


@pytest.mark.parametrize("kind", ERASING)
def test_a_cached_fold_stores_corrections_only(kind: str) -> None:
    """A ring for cached folds has no v and no beta: that is what it saves."""
    names = StateCache(samples.layer(kind), 1, fold="cached").export(samples.slots(0)).keys()
    assert {"0.k", "0.u", "0.log_decay"} <= names
    assert not {"0.v", "0.beta"} & names


@pytest.mark.parametrize("kind", ERASING)
def test_a_raw_fold_is_closer_than_a_cached_one(kind: str) -> None:
    """With BF16 activations the raw fold is exact to FP32, the cached fold to its rounding of u."""
    spec = samples.layer(kind, torch.bfloat16)
    truth = samples.layer(kind)
    caches = {
        "raw": StateCache(spec, 1, window=4),
        "cached": StateCache(spec, 1, window=4, fold="cached"),
        "exact": StateCache(truth, 1, window=4, checkpoint=torch.float64),
    }
    for _ in range(40):
        inputs = samples.draw(spec, 1, 1)
        wide = inputs._replace(
            **{n: x.double() for n, x in inputs._asdict().items() if x is not None}
        )
        for name, cache in caches.items():
            samples.advance(cache, samples.slots(0), wide if name == "exact" else inputs)
    states = {name: cache.materialize(samples.slots(0))[0] for name, cache in caches.items()}
    raw, cached = (tolerance.error(states[name], states["exact"]) for name in ("raw", "cached"))
    assert raw <= tolerance.state(spec, 4, torch.float32, folds=10)
    assert raw < cached <= 40 * tolerance.eps(torch.float16)


@pytest.mark.parametrize("kind", samples.KINDS)
def test_a_fresh_slot_does_not_read_its_checkpoint(kind: str) -> None:
    """Until the first fold a fresh slot's checkpoint holds whatever was there, NaN included."""
    cache = StateCache(samples.layer(kind), 1, window=3, checkpoint=torch.float64)
    assert cache.export(samples.slots(0))["0.checkpoint"].isnan().all()
    for _ in range(5):
        out = samples.advance(cache, samples.slots(0), samples.draw(cache.specs[0], 1, 1))
        assert out.isfinite().all()
        assert cache.materialize(samples.slots(0))[0].isfinite().all()


@pytest.mark.parametrize("kind", samples.KINDS)
def test_materialize_is_exact_at_every_moment(kind: str) -> None:
    """The materialised state is the recurrence's after every token of several windows."""
    spec = samples.layer(kind)
    cache, model = samples.pair(spec, 1, window=4, checkpoint=torch.float64)
    for _ in range(13):
        inputs = samples.draw(spec, 1, 1)
        samples.advance(cache, samples.slots(0), inputs)
        drafts = model.begin([0], [1])
        model.step(drafts, 0, *inputs)
        model.commit(drafts, [1])
        (state,) = cache.materialize(samples.slots(0))
        assert tolerance.error(state[0], model.materialize(0)[0]) <= tolerance.EXACT
