"""Bytes of a sketched head: SketchSSM's printed figures, and this package's layout."""

from __future__ import annotations

import pytest

from lazystate.sketch.traffic import PaperBytes, largest_rank, step_bytes, view_bytes

# SketchSSM's four models, and their printed reductions at mean rank 8, 4 and 2 (Tables 5-8). An
# allocation spends its budget, and dense heads cost what the budget says: all heads at the mean
# rank move as many bytes.
MODELS = {
    "Nemotron Nano 9B v2": (PaperBytes(128, 80, 16, erase=False), (9.94, 12.26, 13.88)),
    "Nemotron 3 Super": (PaperBytes(128, 64, 16, erase=False), (9.39, 11.84, 13.61)),
    "Qwen3.8 Flash-Next": (PaperBytes(128, 128, 16, erase=True), (10.68, 12.81, 14.23)),
    "GLM 5.3 Flash": (PaperBytes(128, 128, 16, erase=True), (10.68, 12.81, 14.23)),
}


@pytest.mark.parametrize("model", MODELS)
def test_printed_reductions(model: str) -> None:
    """Eq. 47 gives all twelve printed reductions to their last digit."""
    head, printed = MODELS[model]
    for mean_rank, reduction in zip((8, 4, 2), printed, strict=True):
        assert round(head.reduction([mean_rank]), 2) == reduction


def test_reductions_add_bytes_and_not_ratios() -> None:
    """Ranks spread around the mean, a dense head among them, move what the mean does."""
    head = PaperBytes(128, 128, 16, erase=True)
    as_rank = head.dense / head.rank
    spread = [None, *[(8 * 16 - as_rank) / 15] * 15]
    assert head.reduction(spread) == pytest.approx(head.reduction([8] * 16))


def test_dense_head_and_buffered_updates() -> None:
    """A dense head reads half a state (Table 4); reading all of it, as replay does, gives 1.88."""
    head = PaperBytes(128, 64, 16, erase=False)
    assert head.read(None) == (15 * head.state / 2 + head.state) / 16
    assert round(2 * 16 / (16 + 1), 2) == 1.88
    assert head.reduction([head.state / head.rank]) == pytest.approx(2 * 16 / (16 + 1))


def test_largest_rank_of_the_paper() -> None:
    """G* keeps a sketch at or below the copy's bytes; with few values K bounds it."""
    assert PaperBytes(128, 64, 16, erase=False).largest_rank == 42
    assert PaperBytes(128, 128, 16, erase=True).largest_rank == 60
    for head, _ in MODELS.values():
        assert head.largest_rank * head.rank <= head.dense < (head.largest_rank + 1) * head.rank


def test_factors_are_smaller_than_the_map() -> None:
    """At rank 8 a 128 x 64 head reads 2 KiB and its factors, where U and C take 3 KiB."""
    assert view_bytes(128, 64, 8) == 2 * (8 * 64 + 4 * 128) + 2 * 8 * 5
    assert view_bytes(128, 64, 8, map="exact") == PaperBytes(128, 64, 16, erase=False).rank * 8
    assert view_bytes(128, 64, 8, map="offline") == 2 * 8 * 64
    for rank in range(5, 43):
        assert view_bytes(128, 64, rank) < view_bytes(128, 64, rank, map="exact")


def test_largest_rank_of_factors() -> None:
    """The factored map reaches higher ranks before a copy is as cheap, and never beyond K."""
    assert largest_rank(128, 64, 2 * 128 * 64) == 111
    assert largest_rank(128, 128, 2 * 128 * 128) == 119
    assert largest_rank(16, 4, 10_000) == 16
    assert largest_rank(128, 64, 10) == 0


def test_folds_dominate_short_windows() -> None:
    """8 K V / L bytes are the fold's share: more than the sketch at L = 16, less at L = 64."""
    view, state = view_bytes(128, 64, 8), 4 * 128 * 64
    moved = [step_bytes(view, state, window) for window in (16, 32, 64)]
    assert moved == sorted(moved, reverse=True)
    assert [8 * 128 * 64 / window > view for window in (16, 32, 64)] == [True, False, False]
    assert step_bytes(view, state, 16) == view + 8 * 128 * 64 / 16
