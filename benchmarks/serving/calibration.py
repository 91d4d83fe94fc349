"""A calibration that nobody has made, for timing sketches of models that are not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lazystate.presets import shape_from_config
from lazystate.sketch.calibration_file import Calibration, Origin

LARGEST = 32  # rank


def recurrent_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of a text model's recurrent layers."""
    kinds = config.get("layer_types") or config["hybrid_override_pattern"]
    return tuple(at for at, kind in enumerate(kinds) if kind in ("linear_attention", "M"))


def synthetic(name: str, config: Mapping[str, Any], path: Path) -> Path:
    """Write a calibration of random bases and scores.

    Its outputs are worthless; a step takes as long as with a real one whose ranks are spread alike.
    Scores fall geometrically with the rank, from a level and at a rate of each head's own.
    """
    layer, layers = shape_from_config(config).layer, recurrent_layers(config)
    generator = torch.Generator().manual_seed(0)
    shape = (len(layers), layer.key_heads, layer.key_dim, LARGEST)
    omega, _ = torch.linalg.qr(torch.randn(shape, generator=generator))
    heads = (len(layers), layer.heads, 1)
    level = torch.randn(heads, generator=generator).exp()
    rate = 0.5 + 0.4 * torch.rand(heads, generator=generator)
    origin = Origin(
        f"{name}, synthetic", layers, layer.value_dim, 16, layer.erase, notes={"synthetic": True}
    )
    Calibration(origin, omega, level * rate ** torch.arange(LARGEST + 1)).save(path)
    return path
