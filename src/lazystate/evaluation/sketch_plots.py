"""Plots of a calibration: what ranks retain, and where the ranks go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lazystate.sketch.calibration_file import Calibration, Ranks


def draw(found: Calibration, ranks: Ranks, path: Path) -> None:
    """Curves of SketchSSM's Figure 2 and maps of its Figure 8 in one image.

    Left: the retained share of the state's output (1 minus the missed energy over the whole)
    against the rank, the mean over heads and the middle half of them. Right, by layer and head: the
    loss's
    sensitivity, the output error at the allocated rank, and that rank.

    Args:
        path: of the image; its ending says the format.

    Raises:
        ImportError: without matplotlib. ValueError: for a file without errors and sensitivities,
            as public ones are.
    """
    from matplotlib.figure import Figure

    if found.missed is None or found.slopes is None:
        raise ValueError("--plot needs a file with errors and sensitivities, got scores alone")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    curves, *maps = figure.subplots(1, 4, width_ratios=(3, 2, 2, 2))
    _curves(curves, found.missed)
    error = found.missed.gather(2, ranks.ranks.unsqueeze(2)).squeeze(2)
    error = (error / found.missed[..., 0].clamp_min(1e-30)).where(ranks.ranks > 0, 0)
    shown = {
        "sensitivity (log10)": found.slopes.clamp_min(1e-30).log10(),
        "missed share": error,
        "rank (0: dense)": ranks.ranks,
    }
    for axes, (title, values) in zip(maps, shown.items(), strict=True):
        _map(figure, axes, title, values, found.origin.layers)
    figure.savefig(path, dpi=120)


def retained(missed: Tensor) -> Tensor:
    """Retained share [..., G + 1] of outputs at ranks 0 to G from what each misses."""
    return 1 - missed / missed[..., :1].clamp_min(1e-30)


def _curves(axes: Any, missed: Tensor) -> None:
    heads = retained(missed).flatten(0, 1)
    low, high = heads.quantile(torch.tensor([0.25, 0.75]), 0)
    axes.fill_between(range(heads.shape[1]), low.numpy(), high.numpy(), color="#7fb3d5", alpha=0.5)
    axes.plot(heads.mean(0).numpy(), color="#1f618d", label="mean; middle half of heads")
    axes.set_xlabel("rank")
    axes.set_ylabel("retained share of output energy")
    axes.set_ylim(0, 1.01)
    axes.legend(frameon=False)


def _map(figure: Any, axes: Any, title: str, values: Tensor, layers: tuple[int, ...]) -> None:
    image = axes.imshow(torch.as_tensor(values).float().numpy(), aspect="auto", origin="lower")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("head")
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes)
