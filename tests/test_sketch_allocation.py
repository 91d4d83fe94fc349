"""Views under a budget: against every choice there is, and the certificate that comes along."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazystate.sketch.allocation import (
    Action,
    Allocation,
    budget_of,
    head_scores,
    paper_actions,
    rank_actions,
    solve,
    uniform,
)
from lazystate.sketch.traffic import PaperBytes

MAMBA = PaperBytes(128, 64, 16, erase=False)


def optimum(scores: Tensor, costs: Tensor, budget: int) -> float:
    """The smallest total score of all choices that fit."""
    heads, actions = scores.shape
    costs = costs.expand(heads, actions)
    return min(
        sum(float(scores[h, a]) for h, a in enumerate(choice))
        for choice in itertools.product(range(actions), repeat=heads)
        if sum(int(costs[h, a]) for h, a in enumerate(choice)) <= budget
    )


def check(found: Allocation, scores: Tensor, costs: Tensor, budget: int) -> None:
    """What holds of every allocation."""
    heads = torch.arange(len(scores))
    costs = costs.expand(scores.shape)
    assert found.bytes == int(costs[heads, found.choice].sum()) <= budget == found.budget
    assert found.objective == pytest.approx(float(scores[heads, found.choice].sum()))
    assert 0 <= found.gap <= 1
    priced = (scores + found.price * costs.double()).min(1).values.sum() - found.price * budget
    assert found.bound == pytest.approx(min(float(priced), found.objective), rel=1e-12, abs=1e-12)


@st.composite
def instances(draw) -> tuple[Tensor, Tensor, int]:
    """Some heads, curves that need not fall, costs of their own, and a budget that suffices."""
    heads, actions = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    score = st.one_of(st.just(0.0), st.floats(1e-6, 1e3), st.just(float("inf")))
    finite = st.floats(0, 1e3)
    scores = [[draw(finite), *(draw(score) for _ in range(actions - 1))] for _ in range(heads)]
    costs = [[draw(st.integers(0, 40)) for _ in range(actions)] for _ in range(heads)]
    least = sum(
        min(c for c, s in zip(row, line, strict=True) if s != float("inf"))
        for row, line in zip(costs, scores, strict=True)
    )
    return torch.tensor(scores).double(), torch.tensor(costs), least + draw(st.integers(0, 60))


@settings(max_examples=300, deadline=None)
@given(instances())
def test_against_every_choice(instance: tuple[Tensor, Tensor, int]) -> None:
    """Never over the budget, and the optimum lies between the bound and what was found."""
    scores, costs, budget = instance
    found = solve(scores, costs, budget)
    check(found, scores, costs, budget)
    best, slack = optimum(scores, costs, budget), 1e-9 * float(found.objective + 1)
    assert found.bound <= best + slack
    assert best <= found.objective + slack
    assert found.objective - best <= found.gap * found.objective + slack


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(2, 5), st.data())
def test_optimal_where_every_rank_helps_less_than_the_last(
    heads: int, ranks: int, data: st.DataObject
) -> None:
    """With diminishing returns at equal costs nothing is left between bound and choice."""
    gains = st.lists(st.floats(0.01, 100), min_size=ranks, max_size=ranks)
    steps = torch.tensor([sorted(data.draw(gains), reverse=True) for _ in range(heads)]).double()
    scores = steps.flip(1).cumsum(1).flip(1)
    costs = torch.arange(1, ranks + 1) * 7
    budget = 7 * data.draw(st.integers(heads, heads * ranks))
    found = solve(scores, costs, budget)
    check(found, scores, costs, budget)
    assert found.objective == pytest.approx(optimum(scores, costs, budget))
    assert found.gap < 1e-9


def test_the_certificate_has_fp64_digits() -> None:
    """A price that is no FP32 number leaves no gap where the choice is the optimum."""
    scores = torch.tensor([[7.0, 2, 1], [11, 6, 1]]).double()
    found = solve(scores, torch.tensor([7, 14, 21]), 28)
    assert found.objective == optimum(scores, torch.tensor([7, 14, 21]), 28)
    assert found.gap < 1e-14


def test_a_real_sized_problem() -> None:
    """5,120 heads whose scores span decades: the budget is spent and the gap is small."""
    actions = paper_actions(MAMBA)
    budget = budget_of(actions, 5120, 8)
    assert budget == 5120 * 8 * MAMBA.rank
    weight = torch.exp(3 * torch.randn(5120, 1, dtype=torch.float64))
    decay = 0.5 + 0.4 * torch.rand(5120, 1, dtype=torch.float64)
    ranks = torch.tensor([float(action.rank) for action in actions])
    scores = weight * decay**ranks
    scores[:, -1] = 0
    costs = torch.tensor([action.bytes for action in actions])
    found = solve(scores, costs, budget)
    check(found, scores, costs, budget)
    assert budget - found.bytes < MAMBA.rank
    assert found.gap < 1e-4
    same = torch.arange(5120), uniform(actions, 5120, budget)
    assert found.objective < 0.1 * float(scores[same].sum())
    chosen = [actions[i] for i in found.choice.tolist()]
    moved = MAMBA.reduction([None if a.view == "bf16" else a.rank for a in chosen])
    assert moved == pytest.approx(9.394, abs=0.002)  # dense heads change nothing in the sum


def test_spent_to_the_end_among_equals() -> None:
    """Heads that all tie still share out what is left, one after the other."""
    scores = (0.5 ** torch.arange(1.0, 6)).expand(1000, -1)
    found = solve(scores, torch.arange(1, 6), 2700)
    assert found.bytes == 2700
    assert found.choice.bincount().tolist() == [0, 300, 700]


def test_any_view_is_an_action() -> None:
    """Copies in small formats compete with sketches by their own bytes and scores."""
    actions = [*rank_actions(128, 64, 16), Action("fp8", 0, 128 * 64 + 256)]
    actions += [Action("nvfp4", 0, 128 * 64 * 9 // 16)]
    easy = torch.tensor([0.5**a.rank if a.view == "sketch" else 0.4 for a in actions])
    hard = torch.tensor([9.0 if a.view == "sketch" else 0.01 for a in actions])
    hard[-3] = 0
    scores, costs = torch.stack([easy, hard]), torch.tensor([a.bytes for a in actions])
    found = solve(scores, costs, budget_of(actions, 1, 16) + actions[-1].bytes)
    assert [actions[i].view for i in found.choice.tolist()] == ["sketch", "nvfp4"]


def test_own_layout_has_more_ranks() -> None:
    """Actions in this package's bytes: rank 1 to what a copy costs, then the copy."""
    actions = rank_actions(128, 64)
    assert [a.rank for a in actions] == [*range(1, 112), 0]
    assert all(a.bytes <= actions[-1].bytes for a in actions)
    assert [a.view for a in rank_actions(128, 64, 5, copies=False)] == ["sketch"] * 5
    assert len(paper_actions(MAMBA)) == MAMBA.largest_rank + 1


def test_budgets_between_ranks() -> None:
    """A mean rank that is not whole takes its share of the next rank."""
    actions = paper_actions(MAMBA)
    assert budget_of(actions, 10, 2.5) == 25 * MAMBA.rank
    assert budget_of(actions, 10, 42) == 420 * MAMBA.rank
    for wrong in (0.5, 43):
        with pytest.raises(ValueError, match="mean rank must be 1 to 42"):
            budget_of(actions, 10, wrong)


def test_uniform_spends_what_is_left_on_the_first() -> None:
    """All heads get the dearest action that fits all, and the first ones the next."""
    actions = paper_actions(MAMBA)
    choice = uniform(actions, 10, budget_of(actions, 10, 4.3))
    assert [actions[i].rank for i in choice.tolist()] == [5] * 3 + [4] * 7
    everything = uniform(actions, 3, 10**9)
    assert [actions[i].view for i in everything.tolist()] == ["bf16"] * 3
    with pytest.raises(ValueError, match="budget must be at least 3,840"):
        uniform(actions, 10, 3839)


def test_criteria() -> None:
    """Error looks at errors only, gradient tells heads apart by slopes only, a copy loses none."""
    actions = paper_actions(MAMBA, largest=2)
    missed = torch.tensor([[8.0, 4, 2], [4, 2, 1]])
    paired, slopes = missed.flip(0) * 3, torch.tensor([1.0, 10])
    given = {"paired": paired, "missed": missed, "slopes": slopes}
    assert head_scores(actions, "paired", **given).tolist() == [[6, 3, 0], [12, 6, 0]]
    assert head_scores(actions, "error", **given).tolist() == [[4, 2, 0], [2, 1, 0]]
    assert head_scores(actions, "gradient", **given).tolist() == [[3, 1.5, 0], [30, 15, 0]]
    with pytest.raises(ValueError, match="criterion must be one of"):
        head_scores(actions, "best", **given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="ranks up to 2 were scored"):
        head_scores(paper_actions(MAMBA, largest=3), "error", **given)


@pytest.mark.parametrize(
    ("scores", "budget", "reason"),
    [
        ([[1.0, -1.0]], 9, "scores must be 0 or more"),
        ([[1.0, float("nan")]], 9, "scores must be 0 or more"),
        ([[float("inf"), float("inf")]], 9, "finite for one action"),
        ([[1.0, 0.0]], 2, "budget must be at least 3"),
        ([[float("inf"), 0.0]], 4, "budget must be at least 5"),
    ],
)
def test_solve_says_what_is_wrong(scores: list, budget: int, reason: str) -> None:
    """Scores that mean nothing and budgets that nothing fits are refused."""
    with pytest.raises(ValueError, match=reason):
        solve(torch.tensor(scores), torch.tensor([3, 5]), budget)
