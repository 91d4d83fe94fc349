"""A discarded step leaves no trace, also where it has made a row fold."""

from __future__ import annotations

import pytest
import torch

import samples
import tolerance
from lazystate import StateCache, StepError, Ticket

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
@pytest.mark.parametrize("before", [1, 4])
def test_a_discarded_step_leaves_no_trace(kind: str, before: int) -> None:
    """The state after `discard` is the one before the step; with 4 records of 4 the step folds."""
    spec = samples.layer(kind, torch.float64)
    cache = StateCache(spec, 2, window=4, max_tokens=3, checkpoint=torch.float64)
    rows = torch.arange(2)
    for _ in range(before):
        samples.advance(cache, rows, samples.draw(spec, 2, 1))
    expected = cache.materialize(rows)[0]
    ticket = cache.begin(rows, 3)
    cache.step(ticket, 0, *samples.draw(spec, 2, 3))
    cache.discard(ticket)
    assert tolerance.error(cache.materialize(rows)[0], expected) <= tolerance.EXACT
    samples.advance(cache, rows, samples.draw(spec, 2, 3))
    with pytest.raises(StepError, match="ticket"):
        cache.discard(ticket)


@pytest.mark.parametrize(
    ("backend", "before", "stepped"),
    [
        *(("torch", before, stepped) for before in (1, 4) for stepped in ([], [1], [0, 2])),
        ("triton", 4, [0]),
    ],
)
def test_a_half_done_step_can_be_discarded(backend: str, before: int, stepped: list[int]) -> None:
    """Some layers have folded and some not: those are folded too, and the state is unchanged."""
    sizes = {"heads": 1, "key_heads": 1, "key_dim": 16}
    specs = [samples.layer(kind, torch.float32, **sizes) for kind in ("mamba2", "gdn", "kda")]
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    options = {"window": 4, "max_tokens": 2, "backend": backend, "device": device}
    caches = [StateCache(specs, 2, **options) for _ in range(2)]
    rows = torch.arange(2)
    for seed in range(before):
        for cache in caches:
            _advance(cache, rows, 1, seed)
    cache, other = caches
    expected = cache.materialize(rows)
    ticket = cache.begin(rows, 2)
    for layer in stepped:
        _step(cache, ticket, layer, None)
    cache.discard(ticket)
    for spec, now, then in zip(specs, cache.materialize(rows), expected, strict=True):
        assert tolerance.error(now, then) <= 2 * tolerance.state(spec, 4, torch.float32, 1)
    for seed in range(10, 12 if backend == "triton" else 16):
        outs = _advance(cache, rows, 2, seed), _advance(other, rows, 2, seed)
        for spec, a, b in zip(specs, *outs, strict=True):
            assert tolerance.error(a, b) <= 2 * tolerance.outputs(spec, 4, torch.float32, 4)


def _advance(cache: StateCache, rows: torch.Tensor, tokens: int, seed: int) -> list[torch.Tensor]:
    """One model step over all layers."""
    generator = torch.Generator().manual_seed(seed)
    ticket = cache.begin(rows, tokens)
    outs = [_step(cache, ticket, layer, generator) for layer in range(cache.layers)]
    cache.commit(ticket)
    return outs


def _step(
    cache: StateCache, ticket: Ticket, layer: int, generator: torch.Generator | None
) -> torch.Tensor:
    """One layer's step with random inputs where the cache is."""
    drawn = samples.draw(cache.specs[layer], 2, ticket.tokens, generator=generator)
    there = (None if x is None else x.to(cache.device) for x in drawn)
    return cache.step(ticket, layer, *there)


def test_a_half_done_step_cannot_be_committed() -> None:
    """The layers that have not stepped are named, and the way out."""
    spec = samples.layer("mamba2", torch.float32)
    cache = StateCache([spec, spec], 1)
    ticket = cache.begin(samples.slots(0))
    cache.step(ticket, 0, *samples.draw(spec, 1, 1))
    with pytest.raises(StepError, match=r"commit before layers \[1\].*discard"):
        cache.commit(ticket)
    cache.discard(ticket)
