"""Error bounds, derived from dtypes. Errors are relative to the largest entry of what is expected.

A sum of n products in a dtype of spacing eps is off by at most n eps / 2 of the sum of their
magnitudes (first order). Everything computed here is a chain of such sums, and each narrow storage
adds half a spacing for every time that it is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lazystate import LayerSpec

# Two FP64 computations of one result, in different order, over up to some thousand tokens.
EXACT = 1e-9


def eps(dtype: torch.dtype) -> float:
    """Spacing of a dtype at 1."""
    return torch.finfo(dtype).eps


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected entry (or to 1, where all are smaller).

    NaN or inf in `actual` gives NaN or inf, which no bound admits.
    """
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1))


def arithmetic(spec: LayerSpec, window: int) -> float:
    """Sums over K channels, a window of records and the tokens of a step, in compute dtype."""
    return eps(spec.compute) * (spec.key_dim + 2 * window)


def outputs(spec: LayerSpec, window: int, checkpoint: torch.dtype, folds: int) -> float:
    """Outputs: arithmetic, the final rounding, cached corrections and the rounded checkpoints."""
    correction = eps(spec.correction) / 2 * window if spec.erase else 0.0
    return state(spec, window, checkpoint, folds) + eps(spec.activation) / 2 + correction


def state(spec: LayerSpec, window: int, checkpoint: torch.dtype, folds: int) -> float:
    """The exact state: arithmetic, and one rounding of the checkpoint at each fold.

    Narrow checkpoints are rounded stochastically, by up to a spacing.
    """
    spacing = eps(checkpoint) * (1 if checkpoint.itemsize < 4 else 0.5)
    return arithmetic(spec, window) * (folds + 1) + spacing * folds
