"""Which view each head gets under a budget of bytes (docs/maths.md, Eq. 26)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lazystate.sketch.traffic import PaperBytes, largest_rank, view_bytes

Criterion = Literal["paired", "error", "gradient"]
CRITERIA = ("paired", "error", "gradient")

_HALVINGS = 100  # of the price: more than FP64 can tell apart


@dataclass(frozen=True)
class Action:
    """A view that a head may get.

    Attributes:
        view: "sketch", or the format of a copy ("bf16", "fp8", ...). rank: G of a sketch, 0 of a
            copy. bytes: what a step that does not fold reads.
    """

    view: str
    rank: int
    bytes: int


@dataclass(frozen=True)
class Allocation:
    """A choice for every head, and how good it is at most.

    Attributes:
        choice: int64 [N], index of each head's action. bytes: what they read, at most `budget`.
        objective: sum of their scores. bound: no choice within the budget has a smaller sum.
        price: score for a byte at which the bound was found.
    """

    choice: Tensor
    bytes: int
    budget: int
    objective: float
    bound: float
    price: float

    @property
    def gap(self) -> float:
        """(objective - bound) / objective: the certified distance from the optimum, 0 at it."""
        if self.objective <= 0:
            return 0.0
        return max(self.objective - self.bound, 0.0) / self.objective


def rank_actions(
    key_dim: int, value_dim: int, largest: int | None = None, *, copies: bool = True
) -> list[Action]:
    """Sketches of rank 1 to G* in this package's layout, and the BF16 copy.

    Args:
        key_dim: K. value_dim: V. largest: of the calibrated ranks, None for all that read no more
            than the copy. copies: whether a head may have the copy.
    """
    dense = 2 * key_dim * value_dim
    most = largest_rank(key_dim, value_dim, dense)
    most = most if largest is None else min(most, largest)
    sketches = [
        Action("sketch", rank, view_bytes(key_dim, value_dim, rank)) for rank in range(1, most + 1)
    ]
    return [*sketches, Action("bf16", 0, dense)] if copies else sketches


def paper_actions(head: PaperBytes, largest: int | None = None) -> list[Action]:
    """SketchSSM's actions: rank 1 to G* at its bytes, and the dense fallback."""
    most = head.largest_rank if largest is None else min(head.largest_rank, largest)
    sketches = [Action("sketch", rank, rank * head.rank) for rank in range(1, most + 1)]
    return [*sketches, Action("bf16", 0, head.dense)]


def budget_of(actions: Sequence[Action], heads: int, mean_rank: float) -> int:
    """Bytes for `heads` heads at a mean sketch rank, between whole ranks in proportion.

    Raises:
        ValueError: for a mean rank below the smallest or above the largest rank.
    """
    cost = {action.rank: action.bytes for action in actions if action.view == "sketch"}
    low, high = min(cost, default=0), max(cost, default=0)
    if not low <= mean_rank <= high or not cost:
        raise ValueError(f"mean rank must be {low} to {high}, got {mean_rank}")
    below = int(mean_rank)
    above = min(below + 1, high)
    return int(heads * (cost[below] + (mean_rank - below) * (cost[above] - cost[below])))


def head_scores(
    actions: Sequence[Action],
    criterion: Criterion,
    *,
    paired: Tensor,
    missed: Tensor,
    slopes: Tensor,
) -> Tensor:
    """Scores of sketches and of a lossless copy, for `solve`.

    Args:
        actions: sketches, and copies that count as lossless.
        criterion: "paired" (SketchSSM's J); "error" ignores the loss; "gradient" tells heads apart
            by the loss's slope only, each with the mean error curve (the paper does not say how its
            ablation depends on the rank).
        paired, missed: [N, G + 1], means over tokens for rank 0 to G. slopes: [N].

    Returns:
        FP64 [N, actions].

    Raises:
        ValueError: for an unknown criterion, or a rank that was not scored.
    """
    curves = {
        "paired": paired.double(),
        "error": missed.double(),
        "gradient": slopes.double().unsqueeze(1) * missed.double().mean(0),
    }
    if criterion not in curves:
        raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
    largest = max((action.rank for action in actions), default=0)
    if largest >= missed.shape[1]:
        raise ValueError(f"ranks up to {missed.shape[1] - 1} were scored, got rank {largest}")
    chosen = curves[criterion][:, [action.rank for action in actions]].clone()
    chosen[:, [action.view != "sketch" for action in actions]] = 0
    return chosen


def uniform(actions: Sequence[Action], heads: int, budget: int) -> Tensor:
    """The same action for all heads, the dearest that fits; then the next for the first of them.

    Returns:
        int64 [heads], indices of actions.

    Raises:
        ValueError: if the cheapest action for all is more than the budget.
    """
    order = sorted(range(len(actions)), key=lambda i: actions[i].bytes)
    fits = [i for i, j in enumerate(order) if heads * actions[j].bytes <= budget]
    if not fits:
        raise ValueError(_too_small(budget, heads * actions[order[0]].bytes))
    step = fits[-1]
    choice = torch.full((heads,), order[step], dtype=torch.int64)
    if step + 1 < len(order):
        more = actions[order[step + 1]].bytes - actions[order[step]].bytes
        choice[: (budget - heads * actions[order[step]].bytes) // more] = order[step + 1]
    return choice


def solve(scores: Tensor, costs: Tensor, budget: int) -> Allocation:
    """The choice of the smallest total score within a budget (SketchSSM Eq. 49-50).

    A multiple-choice knapsack. A price for a byte makes heads independent; bisection finds the
    price at which their choices just fit; what is left is spent on single heads.

    Args:
        scores: [N, A], not negative; inf forbids an action to a head.
        costs: int64 [A] or [N, A], bytes. budget: bytes in all.

    Raises:
        ValueError: for scores that are NaN or negative, a head without an action, or a budget below
            the cheapest choice.
    """
    scores = scores.double().cpu()
    costs = costs.cpu().to(torch.int64).expand(scores.shape)
    if bool((~(scores >= 0)).any()) or bool(scores.isinf().all(1).any()):
        raise ValueError("scores must be 0 or more, and finite for one action of every head")
    # Cheapest first: among equals, argmin takes the first.
    costs, order = costs.sort(dim=1, stable=True)
    scores = scores.gather(1, order)
    least = costs.where(scores.isfinite(), costs.amax()).min(1).values.sum()
    if int(least) > budget:
        raise ValueError(_too_small(budget, int(least)))
    choice, bound, price = _priced(scores, costs, budget)
    choice = _spend(choice, scores, costs, budget)
    picked = choice.unsqueeze(1)
    objective = float(scores.gather(1, picked).sum())
    return Allocation(
        choice=order.gather(1, picked).squeeze(1),
        bytes=int(costs.gather(1, picked).sum()),
        budget=budget,
        objective=objective,
        bound=min(bound, objective),
        price=price,
    )


def _priced(scores: Tensor, costs: Tensor, budget: int) -> tuple[Tensor, float, float]:
    """The best choice found that fits, and the best bound with its price."""
    wide = costs.double()  # a float times integers would be FP32

    def at(price: float) -> tuple[Tensor, int, float, float]:
        value, choice = (scores + price * wide).min(1)
        picked = choice.unsqueeze(1)
        return (
            choice,
            int(costs.gather(1, picked).sum()),
            float(scores.gather(1, picked).sum()),
            float(value.sum()) - price * budget,
        )

    fitting: list[tuple[float, Tensor]] = []
    bound, best_price = -float("inf"), 0.0

    def visit(price: float) -> bool:
        nonlocal bound, best_price
        choice, spent, objective, lower = at(price)
        if lower > bound:
            bound, best_price = lower, price
        if spent <= budget:
            fitting.append((objective, choice))
        return spent <= budget

    if not visit(0.0):
        finite = scores.where(scores.isfinite(), 0)
        # Above the largest score for a byte, a byte is worth more than any score.
        high = 2 * float(finite.max())
        while not visit(high):
            high *= 2
        low = 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if visit(middle):
                high = middle
            else:
                low = middle
    return min(fitting, key=lambda found: found[0])[1], bound, best_price


def _spend(choice: Tensor, scores: Tensor, costs: Tensor, budget: int) -> Tensor:
    """Change single heads while a change fits and helps, the most score for a byte first."""
    choice = choice.clone()
    while True:
        picked = choice.unsqueeze(1)
        now, spent = scores.gather(1, picked), costs.gather(1, picked)
        left = budget - int(spent.sum())
        gain, more = now - scores, costs - spent
        rate = gain / more.clamp_min(1)
        rate, action = rate.where((gain > 0) & (more <= left), 0).max(1)
        heads = rate.argsort(descending=True, stable=True)
        heads = heads[rate[heads] > 0]
        dearer = more[heads, action[heads]]
        heads = heads[dearer.clamp_min(0).cumsum(0) <= left]
        if not len(heads):
            return choice
        choice[heads] = action[heads]


def _too_small(budget: int, least: int) -> str:
    return f"budget must be at least {least:,} bytes, the cheapest choice, got {budget:,}"
