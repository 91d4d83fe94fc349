"""What is measured: layers, cases, and the least time that a case's state traffic takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lazystate import LayerSpec
from lazystate.formats import FORMATS
from lazystate.gates import Kind
from lazystate.planner import step_us
from lazystate.presets import preset
from lazystate.sketch.traffic import Map
from lazystate.sketch.view import Sketch

WINDOW = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WINDOWS = (4, 8, 16, 32, 64)
VERIFY = (1, 2, 3, 4, 5, 6, 7, 8, 16)
COLD_BYTES = 400e6  # of distinct state, so that no replay finds any of it in L2 (60 MB on an H200)
LAYERS = {
    name: replace(preset(model).layer, conv_channels=0, conv_width=0)
    for name, model in {
        "M1": "Nemotron-3-Nano-4B",
        "M2": "Nemotron-3-Super-120B",
        "G1": "Qwen3.5-4B",
        "G2": "Qwen3.5-122B-A10B",
        # Prepared, one KDA row stands for both gates: steps take log-decays, whatever made them.
        "K1": "GLM-5.3-Flash",
    }.items()
}

PROLOGUES: dict[str, tuple[Kind, ...]] = {
    "M1": ("mamba2",),
    "M2": ("mamba2",),
    "G1": ("gdn",),
    "G2": ("gdn",),
    "K1": ("kda_bounded", "kda_softplus"),
}


class Ceilings(NamedTuple):
    """GB/s of a plain read, and of a copy counting bytes read and written."""

    read: float
    copy: float


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        layer: its name. spec: its shape, without a convolution. batch: B.
        tokens: T of a step. kept: tokens of a step that are committed, 1 to T.
        window: L of replay. checkpoint, view: formats of the state and of what steps read of it;
            without a view that is the checkpoint; "sketch" for sketches of a mean `rank`, whose
            coefficients come from `map`.
        prologue: what raw inputs are taken with, gates fused; None for prepared inputs.
    """

    layer: str
    spec: LayerSpec
    batch: int
    tokens: int = 1
    kept: int = 1
    window: int = WINDOW
    checkpoint: str = "fp32"
    view: str | None = None
    rank: int = 0
    map: Map = "pivot"
    prologue: Kind | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the batch's checkpoints in one layer."""
        return self._bytes(self.checkpoint)

    @property
    def view_bytes(self) -> int:
        """Bytes of the batch's states in one layer that a step without folds reads."""
        if self.view == "sketch":
            return self.batch * sketch(self, 1).planned(0, self.spec).read
        return self._bytes(self.view or self.checkpoint)

    def _bytes(self, form: str) -> int:
        spec = self.spec
        return self.batch * spec.heads * FORMATS[form].nbytes(spec.value_dim, spec.key_dim)

    @property
    def period(self) -> int:
        """Steps from one fold of a row to its next: it folds where held + T > L."""
        return (self.window - self.tokens) // self.kept + 1

    def copies(self, largest: int = 64) -> int:
        """Layers that a graph goes through: enough for a cold L2, and to share the cursors."""
        return min(max(4, int(COLD_BYTES / self.view_bytes) + 1), largest)

    def moved(self, method: str) -> tuple[float, float]:
        """Bytes of state that one step of the batch (read, writes), records not counted.

        Args:
            method: plain, snapshot, replay (over a whole cycle), fold or read (one step of rows
                that all fold, or that do not).
        """
        folds = {"replay": 1 / self.period, "fold": 1.0, "read": 0.0}
        if method not in folds:
            return self.state_bytes, self.state_bytes * (1 if method == "plain" else self.tokens)
        share = folds[method]
        kept = self.state_bytes + (self.view_bytes if self.view else 0)
        return self.view_bytes * (1 - share) + self.state_bytes * share, kept * share

    def floor_us(self, method: str, ceilings: Ceilings) -> float:
        """Microseconds that these bytes take: read at read, read and written at copy bandwidth."""
        return step_us(*self.moved(method), ceilings.read, ceilings.copy)


@lru_cache(maxsize=8)
def sketch(case: Case, layers: int) -> Sketch:
    """Sketches on random bases, with ranks from one to several times the mean, as allocated ones.

    Ranks lie on a geometric scale, head after head in no order, and are moved to the mean exactly.
    """
    spec, draw = case.spec, torch.Generator().manual_seed(0)
    ranks = torch.logspace(-3, 2, spec.heads, base=2.0).mul(case.rank).round().clamp(min=1).long()
    order = torch.randperm(spec.heads, generator=draw)
    ranks = ranks.clamp(max=spec.key_dim)[order]
    missing = case.rank * spec.heads - int(ranks.sum())
    while missing:  # a round of one each, where it keeps a rank of 1 or more
        some = (ranks + (1 if missing > 0 else -1) >= 1).nonzero().flatten()[: abs(missing)]
        ranks[some] += 1 if missing > 0 else -1
        missing = case.rank * spec.heads - int(ranks.sum())
    shape = spec.heads, spec.key_dim, int(ranks.max())
    omega = torch.linalg.qr(torch.randn(shape, generator=draw)).Q
    metric = torch.eye(spec.key_dim).expand(layers, spec.heads, -1, -1)
    return Sketch(
        omega.expand(layers, -1, -1, -1),
        ranks.expand(layers, -1),
        case.map,
        metric if case.map == "offline" else None,
    )


def row(
    case: Case,
    bench: str,
    method: str,
    us: float | None,
    *,
    floor_us: float | None,
    error: float,
    conventional_us: float | None = None,
    impl: str = "lazystate",
    phases: str = "mixed",
    **more: Any,
) -> dict[str, Any]:
    """A row of the results; us is microseconds of one step of one layer, None if it was wrong."""
    return {
        "bench": bench,
        "layer": case.layer,
        "batch": case.batch,
        "tokens": case.tokens,
        "kept": case.kept,
        "impl": impl,
        "method": method,
        "view": case.view or "full",
        "checkpoint": case.checkpoint,
        "gates": case.prologue or "prepared",
        "window": case.window if method == "replay" else None,
        "phases": phases,
        "us": us,
        "floor_us": floor_us,
        "ratio": us / floor_us if us and floor_us else None,
        "conventional_us": conventional_us,
        "error": error,
        **more,
    }
