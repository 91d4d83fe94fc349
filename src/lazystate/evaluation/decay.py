"""Error of a rounded state without a model: a recurrence of constant decay (ReplaySSM App. C.6).

A state decays by alpha a token and is written with Gaussian noise, which keeps its elements at
variance 1. Once in a window of L tokens it is rounded, so that its deviation D from the exact state
follows D <- gamma D + e, with gamma = alpha^L and the error e of one rounding. If the errors of
different folds were independent, with mean b and variance s^2, then after n folds

    mean D = b (1 - gamma^n) / (1 - gamma)        variance D = s^2 (1 - gamma^2n) / (1 - gamma^2)

which tend to b / (1 - gamma) and s^2 / (1 - gamma^2). `run` measures b, s and D and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lazystate.evaluation.kl import divergence
from lazystate.formats import FORMATS, Rounding
from lazystate.philox import state_bits

ALPHAS = (0.9, 0.99, 0.999, 0.9999)
SHAPE = (16, 32, 64)  # independent states of V x K elements
MOST_FOLDS = 2048


def settled(alpha: float, window: int) -> int:
    """Folds after which a deviation is within 2% of its limit, 64 to MOST_FOLDS of them."""
    return min(max(math.ceil(4 / (1 - alpha**window)), 64), MOST_FOLDS)


@dataclass(frozen=True)
class Deviation:
    """What rounding did to the recurrence, at the end of a run.

    Attributes:
        alpha, window, state, rounding: of the run; state: a format. folds: n.
        spread: s, root mean square of one rounding error.
        bias: b, root mean square over elements of their mean error; what chance alone gives for
            that number of folds is taken off.
        rms: root mean square of D over all elements. standard_error: of it, over the 16 states.
        law: what the two formulas predict for it, with this b and s.
        once: root mean square error of rounding the exact state once, to nearest: what a read view
            of the same format adds to an exact recurrence, whatever the decay.
        kl: mean divergence of softmax(S q) by the deviation, q Gaussian, logits of variance 1.
    """

    alpha: float
    window: int
    state: str
    rounding: Rounding
    folds: int
    spread: float
    bias: float
    rms: float
    standard_error: float
    law: float
    once: float
    kl: float


def run(
    state: str, rounding: Rounding, alpha: float, window: int, folds: int, seed: int = 0
) -> Deviation:
    """Decay, write and round for a number of windows. state: name of a format."""
    form, generator = FORMATS[state], torch.Generator().manual_seed(seed)
    gamma = alpha**window
    noise = math.sqrt(1 - gamma**2)
    exact = torch.randn(1, *SHAPE, generator=generator, dtype=torch.float64)
    slot, key_dim = torch.tensor([0]), SHAPE[-1]
    kept, error_sum, square_sum = exact.clone(), torch.zeros_like(exact), 0.0
    for fold in range(folds):
        written = noise * torch.randn(1, *SHAPE, generator=generator)
        exact = gamma * exact + written
        before = gamma * kept + written
        bits = None
        if rounding == "stochastic":
            bits = state_bits((seed, 0), slot, torch.tensor([fold]), SHAPE)
        kept = form.decode(form.encode(before, bits), key_dim).double()
        error_sum += kept - before
        square_sum += float((kept - before).square().mean())
    spread = math.sqrt(square_sum / folds)
    chance = spread**2 / folds
    mean_square = max(float((error_sum / folds).square().mean()) - chance, 0.0)
    if mean_square < 3 * chance * math.sqrt(2 / exact.numel()):  # no more than chance
        mean_square = 0.0
    deviation = kept - exact
    by_state = deviation.square().mean((0, 2, 3)).sqrt()
    query = torch.randn(16, key_dim, generator=generator, dtype=torch.float64) / math.sqrt(key_dim)
    once = form.decode(form.encode(exact), key_dim).double() - exact
    return Deviation(
        alpha,
        window,
        state,
        rounding,
        folds,
        spread,
        math.sqrt(mean_square),
        float(deviation.square().mean().sqrt()),
        float(by_state.std() / len(by_state) ** 0.5),
        law(math.sqrt(mean_square), spread, gamma, folds),
        float(once.square().mean().sqrt()),
        float(divergence((exact @ query.T).mT, (kept @ query.T).mT).mean()),
    )


def law(bias: float, spread: float, gamma: float, folds: int) -> float:
    """Root mean square deviation after a number of folds, by the formulas above."""
    mean = bias * (1 - gamma**folds) / (1 - gamma)
    variance = max(spread**2 - bias**2, 0.0) * (1 - gamma ** (2 * folds)) / (1 - gamma**2)
    return math.sqrt(mean**2 + variance)
