"""Counted bytes are those of a count by hand."""

from __future__ import annotations

import pytest
import torch

import samples
from lazystate import StateCache, count_traffic

HEADS, KEY_HEADS, K, V, WINDOW = 4, 2, 8, 5, 3
STATE = HEADS * V * K * 4

# Bytes of one record with BF16 activations: what a step reads of it, what a fold reads besides.
# mamba2: k, log_decay, v, beta. gdn: k, log_decay, u; v, beta. kda: four key heads, K log-decays.
RECORD = {
    "mamba2": (KEY_HEADS * K * 2 + HEADS * 4 + HEADS * V * 2 + HEADS * 4, 0),
    "gdn": (KEY_HEADS * K * 2 + HEADS * 4 + HEADS * V * 2, HEADS * V * 2 + HEADS * 4),
    "kda": (HEADS * K * 2 + HEADS * K * 4 + HEADS * V * 2, HEADS * V * 2 + HEADS * 4),
    "gla": (KEY_HEADS * K * 2 + HEADS * K * 4 + HEADS * V * 2, 0),
}


@pytest.mark.parametrize("kind", RECORD)
def test_standard_decoding_by_hand(kind: str) -> None:
    """Window 3, seven tokens: the state is read each time, written twice; records as they are."""
    read, folded = RECORD[kind]
    spec = samples.layer(kind, torch.bfloat16)
    cache = StateCache(spec, 2, window=WINDOW)
    cache.load(torch.arange(2), [torch.zeros(2, *spec.state_shape)])
    with count_traffic() as traffic:
        for _ in range(7):
            samples.advance(cache, torch.arange(2), samples.draw(spec, 2, 1))
    # Records held before each step: 0 1 2 3(folds) 1 2 3(folds).
    assert traffic.read == 2 * (7 * STATE + 12 * read + 2 * 3 * folded)
    assert traffic.written == 2 * (2 * STATE + 7 * (read + folded))
    assert traffic.tokens == 14
    assert traffic.bytes_per_token == (traffic.read + traffic.written) / 14


def test_a_fresh_slot_reads_no_state() -> None:
    """Until its first fold a slot that was never loaded has no checkpoint to read."""
    read, folded = RECORD["gdn"]
    spec = samples.layer("gdn", torch.bfloat16)
    cache = StateCache(spec, 1, window=WINDOW)
    with count_traffic() as traffic:
        for _ in range(5):
            samples.advance(cache, samples.slots(0), samples.draw(spec, 1, 1))
    # Held: 0 1 2 3(folds, from nothing) 1; only the last step reads the state.
    assert traffic.read == STATE + 7 * read + 3 * folded
    assert traffic.written == STATE + 5 * (read + folded)


def test_padding_and_short_rows_are_not_counted() -> None:
    """Only real rows' real tokens move bytes; only kept tokens count as tokens."""
    read, folded = RECORD["gdn"]
    spec = samples.layer("gdn", torch.bfloat16)
    cache = StateCache(spec, 3, window=WINDOW, max_tokens=3)
    cache.load(torch.arange(3), [torch.zeros(3, *spec.state_shape)])
    with count_traffic() as traffic:
        ticket = cache.begin(samples.slots(2, -1, 0), 3, torch.tensor([2, 3, 0]))
        cache.step(ticket, 0, *samples.draw(spec, 3, 3))
        cache.commit(ticket, torch.tensor([1, 3, 0]))
    assert traffic.read == STATE
    assert traffic.written == 2 * (read + folded)
    assert traffic.tokens == 1


def test_a_cached_fold_moves_less() -> None:
    """Without raw v and beta a record is smaller, and a fold reads nothing besides."""
    read, _ = RECORD["gdn"]
    spec = samples.layer("gdn", torch.bfloat16)
    cache = StateCache(spec, 1, window=WINDOW, fold="cached")
    cache.load(samples.slots(0), [torch.zeros(1, *spec.state_shape)])
    with count_traffic() as traffic:
        for _ in range(4):
            samples.advance(cache, samples.slots(0), samples.draw(spec, 1, 1))
    assert traffic.read == 4 * STATE + 6 * read
    assert traffic.written == STATE + 4 * read


def test_counters_nest_and_end() -> None:
    """The innermost counter counts; outside of any, nothing is counted."""
    spec = samples.layer("mamba2", torch.bfloat16)
    cache = StateCache(spec, 1, window=8)
    with count_traffic() as outer:
        samples.advance(cache, samples.slots(0), samples.draw(spec, 1, 1))
        with count_traffic() as inner:
            samples.advance(cache, samples.slots(0), samples.draw(spec, 1, 1))
    samples.advance(cache, samples.slots(0), samples.draw(spec, 1, 1))
    record = RECORD["mamba2"][0]
    assert (outer.read, outer.written, outer.tokens) == (0, record, 1)
    assert (inner.read, inner.written, inner.tokens) == (record, record, 1)
    with count_traffic() as none:
        pass
    assert none.bytes_per_token == 0.0
