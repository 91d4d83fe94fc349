"""Sketches in pages: one calibration for all layers, cut to a device's heads, all of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from lazystate.sketch.calibration_file import Calibration, gates_fingerprint
from lazystate.sketch.files import open_calibration
from lazystate.sketch.view import DENSE, Sketch, SketchView
from lazystate.spec import LayerSpec


@dataclass(frozen=True)
class Sketches:
    """The views of a model's recurrent layers, where the heads are divided over devices.

    Attributes:
        calibration: of the model. sketch: of all its layers and heads.
        devices: that share a layer's heads, each a run of them.
    """

    calibration: Calibration
    sketch: Sketch
    devices: int

    def check(self, specs: Sequence[LayerSpec]) -> None:
        """Whether they are of layers like these, each a device's part of one.

        Raises:
            ValueError: naming what differs.
        """
        for spec in specs:
            whole = replace(spec, heads=spec.heads * self.devices)
            self.calibration.check(self.calibration.origin.layers, whole)

    def allocate(self, layer: int, spec: LayerSpec, slots: int, device: torch.device) -> SketchView:
        """Room for the views of the first device's heads, see `Views`."""
        return self._room(self.row(layer), 0, spec, slots, device)

    def parts(self, spec: LayerSpec) -> dict[str, tuple[torch.dtype, int]]:
        """Dtype and count of what a page keeps, by name: the most of any layer and device."""
        dense = (self.sketch.ranks == DENSE).unflatten(1, (self.devices, spec.heads)).sum(-1)
        row, device = divmod(int(dense.argmax()), self.devices)  # all else is alike
        most = self._room(row, device, spec, 1, torch.device("cpu"))
        return {name: (tensor.dtype, tensor.numel()) for name, tensor in most.stored.items()}

    def view(
        self, layer: int, device: int, spec: LayerSpec, parts: dict[str, Tensor]
    ) -> SketchView:
        """One layer's views in pages.

        Args:
            layer: its number in the model. device: which of `devices`.
            parts: of `parts`, each [blocks, count] and dense behind the block.

        Raises:
            ValueError: for a layer that was not calibrated.
        """
        at = next(iter(parts.values())).device
        room = self._room(self.row(layer), device, spec, 1, at)
        stored = {
            name: parts[name][:, : own.numel()].unflatten(1, own.shape[1:])
            for name, own in room.stored.items()
        }
        return replace(room, stored=stored)

    def check_weights(self, gates: Mapping[int, Tensor]) -> None:
        """Whether they are of these weights; nothing is said of a part of layers or heads.

        Args:
            gates: A_log of the model's recurrent layers, by number.

        Raises:
            ValueError: if the calibration says that it is of others.
        """
        origin = self.calibration.origin
        if self.devices > 1 or not origin.weights or set(gates) != set(origin.layers):
            return
        found = gates_fingerprint(gates[layer] for layer in origin.layers)
        if found != origin.weights:
            raise ValueError(
                f"calibration must be of this model's weights ({found[:12]}), got one of "
                f"{origin.model}'s ({origin.weights[:12]}): calibrate the model that is served"
            )

    def row(self, layer: int) -> int:
        """Where the layer of that number in the model is in the calibration.

        Raises:
            ValueError: if it is not.
        """
        origin = self.calibration.origin
        if layer not in origin.layers:
            raise ValueError(
                f"calibration must be of this model, got one of another ({origin.model}): "
                f"recurrent layer {layer} is none of its layers "
                f"{', '.join(map(str, origin.layers))}"
            )
        return origin.layers.index(layer)

    def _room(
        self, row: int, device: int, spec: LayerSpec, slots: int, at: torch.device
    ) -> SketchView:
        own = self.sketch.slice_heads(device * spec.heads, (device + 1) * spec.heads)
        return SketchView.allocate(
            own.omega[row].to(at, spec.compute),
            own.ranks[row],
            slots,
            spec.value_dim,
            map=own.map,
            dtype=own.dtype,
            columns=max(int(self.sketch.ranks.max()), 1),  # so that layers share kernels
        )


@cache
def sketches_of(path: str, mean_rank: float, devices: int) -> Sketches:
    """The views of a calibration file, or of a shipped model's name.

    Raises:
        ValueError: if it is no calibration, or has no ranks of that mean.
        FileNotFoundError: if it is not there.
    """
    calibration = open_calibration(path)
    return Sketches(calibration, calibration.sketch(mean_rank), devices)
