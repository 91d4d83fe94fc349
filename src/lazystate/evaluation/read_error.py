"""Does the error seen at folds predict that of the outputs between them?

A folding step reads the checkpoint. Were it to read the view as well, it would know the view's
error for its own token, once a window and nearly for free. This measures that signal, the error
of the tokens until the next fold, and the KL divergence of the model's outputs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lazystate.evaluation.kl import Config, Reference, divergence, logits
from lazystate.ops.pool import Pool
from lazystate.ops.torch.rows import Rows


@dataclass
class Watch:
    """What a decoding run has shown: squared output errors, layer by layer within a step.

    Attributes:
        folds: of each folding step, [layers, B, HV], at its token, were it to read the view.
        between: of the step behind it, the same, the mean over its tokens.
    """

    folds: list[list[Tensor]] = field(default_factory=list)
    between: list[list[Tensor]] = field(default_factory=list)


@contextmanager
def watching(layers: int) -> Iterator[Watch]:
    """A `with` block in which decoding by the PyTorch backend is watched.

    Rows must fold together and steps be those of `Config.steps` for a window of up to 17 tokens.
    """
    module = import_module("lazystate.ops.torch.step")
    plain, seen = module.step, Watch()

    def step(pool: Pool, rows: Rows, *inputs: Any) -> Tensor:
        """The outputs as they are, after those of the other read; the last writes the ring."""
        if not rows.folding.numel() and rows.tokens == 1:
            return plain(pool, rows, *inputs)
        if rows.folding.numel():
            other = plain(pool, replace(rows, folding=rows.folding[:0]), *inputs)
            steps = seen.folds
        else:
            other = plain(replace(pool, view=pool.exact), rows, *inputs)
            steps = seen.between
        out = plain(pool, rows, *inputs)
        if not steps or len(steps[-1]) == layers:
            steps.append([])
        steps[-1].append((out - other).square().sum(3).mean(1))
        return out

    with patch.object(module, "step", step):
        yield seen


@dataclass(frozen=True)
class Prediction:
    """Rank correlations between what folds show and what follows, of all windows and streams.

    Attributes:
        heads: of errors, between heads, each its mean. windows: of errors, within a head, the
            median head. outputs: of the loss-weighted error at a fold with the mean KL of the
            tokens until the next. recent: the same for the mean of the last four folds.
    """

    heads: float
    windows: float
    outputs: float
    recent: float


@torch.no_grad()
def predict(
    model: nn.Module, reference: Reference, config: Config, weights: Tensor, layers: int
) -> Prediction:
    """Decode the reference's text with a view and correlate.

    Args:
        config: with a view, an FP32 checkpoint, the PyTorch backend, and a window of 3 to 17.
        weights: [layers, HV], mean square gradients of the loss by a head's output.
    """
    assert config.window is not None and 3 <= config.window <= 17
    found: dict[int, Tensor] = {}
    with watching(layers) as seen:
        decoded = logits(model, reference.given, reference.prompt, config)
        for i, row in enumerate(decoded, 1):
            if i in reference.kept:
                found[i] = divergence(reference.kept[i], row)
    signal, error = (
        torch.stack([torch.stack(each) for each in steps]).double()
        for steps in (seen.folds, seen.between[1:])  # the first window began without a fold
    )
    count = min(len(signal), len(error))  # [folds, layers, B, HV]
    signal, error = signal[:count], error[:count]
    weighted = (signal * weights.to(signal).unsqueeze(1)).sum((1, 3))  # [folds, B]
    recent = torch.stack([weighted[max(i - 3, 0) : i + 1].mean(0) for i in range(count)])
    window = config.window
    whole, follows = [], []
    for i in range(count):  # fold i comes with token (i + 1) L + 1
        tokens = range((i + 1) * window + 2, (i + 2) * window + 1)
        if all(t in found for t in tokens):
            whole.append(i)
            follows.append(torch.stack([found[t] for t in tokens]).mean(0))
    outputs = torch.stack(follows).flatten()
    by_head = signal.transpose(1, 2).flatten(0, 1).flatten(1), error.transpose(1, 2).flatten(0, 1)
    pairs = zip(by_head[0].T, by_head[1].flatten(1).T, strict=True)
    return Prediction(
        heads=rank_correlation(signal.mean((0, 2)).flatten(), error.mean((0, 2)).flatten()),
        windows=float(torch.tensor([rank_correlation(a, b) for a, b in pairs]).nanmedian()),
        outputs=rank_correlation(weighted[whole].flatten(), outputs),
        recent=rank_correlation(recent[whole].flatten(), outputs),
    )


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: that of the ranks of [n] and [n]; NaN where one does not vary."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    if bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return float("nan")
    return float(torch.corrcoef(ranks)[0, 1])
