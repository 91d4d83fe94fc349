"""A discarded step leaves no trace, also where it has made a row fold."""

from __future__ import annotations

import pytest
import torch

import samples
import tolerance
from lazystate import StateCache, StepError


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


def test_a_half_done_step_cannot_be_discarded() -> None:
    """Some layers may have folded and some not: the layers that have not stepped are named."""
    spec = samples.layer("mamba2", torch.float32)
    cache = StateCache([spec, spec], 1)
    ticket = cache.begin(samples.slots(0))
    cache.step(ticket, 0, *samples.draw(spec, 1, 1))
    with pytest.raises(StepError, match=r"discard before layers \[1\]"):
        cache.discard(ticket)
