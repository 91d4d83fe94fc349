"""The calibration of one model: bases and scores of all recurrent layers, in one safetensors file.

Opening a file runs nothing. Ranks are not in it: `Calibration.allocate` finds them for any budget.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lazystate.sketch.allocation import (
    Action,
    Allocation,
    Criterion,
    budget_of,
    head_scores,
    rank_actions,
    solve,
)
from lazystate.sketch.traffic import Map
from lazystate.sketch.view import DENSE, Sketch
from lazystate.spec import LayerSpec

FORMAT = "lazystate-calibration"
VERSION = 1

_TENSORS = {"omega", "paired", "missed", "slopes", "metric"}
_REQUIRED = {"omega", "paired"}


@dataclass(frozen=True)
class Origin:
    """Where a calibration comes from.

    Attributes:
        model: name of the model. layers: indices of its recurrent layers, ascending.
        value_dim: V. window: of the effective queries. erase: of the layers.
        text: fingerprint of what was read (`text_fingerprint`), "" if not known.
        weights: fingerprint of the model's gates, "" if not known.
        versions: of the packages that made it. notes: anything else, by name.
    """

    model: str
    layers: tuple[int, ...]
    value_dim: int
    window: int
    erase: bool
    text: str = ""
    weights: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranks:
    """A view for every head of every layer, from one allocation.

    Attributes:
        ranks: int64 [layers, HV], `DENSE` for a head that reads a copy.
        actions: what heads could choose from. allocation: the choice and its certificate.
    """

    ranks: Tensor
    actions: list[Action]
    allocation: Allocation


@dataclass(frozen=True)
class Calibration:
    """Bases, and what each rank costs each head.

    Attributes:
        origin: of what, and from what.
        omega: FP32 [layers, groups, K, G], orthonormal columns, leading first; groups divides HV,
            and a group's value heads share its basis.
        paired: FP32 [layers, HV, G + 1], J of Eq. 25 for rank 0 to G.
        missed, slopes: FP32 [layers, HV, G + 1] and [layers, HV], means of |delta|^2 and |g|^2, or
            None where a file has none. metric: E0 [layers, groups, K, K] for the offline map, or
            None.

    Raises:
        ValueError: for shapes that do not fit together, numbers that are not finite, negative
            scores, or a basis that is not orthonormal.
    """

    origin: Origin
    omega: Tensor
    paired: Tensor
    missed: Tensor | None = None
    slopes: Tensor | None = None
    metric: Tensor | None = None

    def __post_init__(self) -> None:
        layers = len(self.origin.layers)
        if self.omega.dim() != 4 or self.paired.dim() != 3 or self.omega.shape[0] != layers:
            raise ValueError(
                f"omega must be [{layers}, groups, K, G] and paired [{layers}, HV, G + 1], "
                f"got {list(self.omega.shape)} and {list(self.paired.shape)}"
            )
        _, groups, key_dim, rank = self.omega.shape
        shapes = {
            "paired": (layers, self.heads, rank + 1),
            "missed": (layers, self.heads, rank + 1),
            "slopes": (layers, self.heads),
            "metric": (layers, groups, key_dim, key_dim),
        }
        for name, tensor in self.tensors().items():
            if name != "omega" and tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} must be {list(shapes[name])}, got {list(tensor.shape)}")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} must be finite")
            if name in ("paired", "missed", "slopes") and bool((tensor < 0).any()):
                raise ValueError(f"{name} must not be negative")
        if self.heads % groups:
            raise ValueError(f"groups ({groups}) must divide the heads ({self.heads})")
        if list(self.origin.layers) != sorted(set(self.origin.layers)):
            raise ValueError(f"layers must ascend, got {self.origin.layers}")
        gram = self.omega.double().mT @ self.omega.double()
        if float((gram - torch.eye(rank, dtype=gram.dtype)).abs().max()) > 1e-5:
            raise ValueError("omega must have orthonormal columns")

    @property
    def heads(self) -> int:
        """HV: value heads of a layer."""
        return self.paired.shape[1]

    @property
    def key_dim(self) -> int:
        """K."""
        return self.omega.shape[2]

    @property
    def largest_rank(self) -> int:
        """G: columns of the bases."""
        return self.omega.shape[3]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        named = {name: getattr(self, name) for name in sorted(_TENSORS)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def basis(self, row: int) -> Tensor:
        """Omega of a layer's value heads, [HV, K, G]; row counts recurrent layers only."""
        return self.omega[row].repeat_interleave(self.heads // self.omega.shape[1], 0)

    def allocate(
        self,
        mean_rank: float,
        *,
        criterion: Criterion = "paired",
        actions: Sequence[Action] | None = None,
    ) -> Ranks:
        """The ranks of all heads whose reads cost what `mean_rank` for every head would.

        Args:
            criterion: of `head_scores`; all but "paired" need missed and slopes.
            actions: sketches, and a lossless copy; None for `rank_actions`.

        Raises:
            ValueError: for a mean rank outside the actions, or scores that the file lacks.
        """
        if criterion != "paired" and (self.missed is None or self.slopes is None):
            raise ValueError(f"criterion {criterion!r} needs missed and slopes: the file has none")
        if actions is None:
            actions = rank_actions(self.key_dim, self.origin.value_dim, self.largest_rank)
        paired = self.paired.flatten(0, 1)
        missed = paired if self.missed is None else self.missed.flatten(0, 1)
        slopes = paired[:, 0] if self.slopes is None else self.slopes.flatten()
        scores = head_scores(actions, criterion, paired=paired, missed=missed, slopes=slopes)
        costs = torch.tensor([action.bytes for action in actions])
        found = solve(scores, costs, budget_of(actions, len(paired), mean_rank))
        of = torch.tensor([a.rank if a.view == "sketch" else DENSE for a in actions])
        return Ranks(of[found.choice].view(-1, self.heads), list(actions), found)

    def sketch(
        self,
        mean_rank: float = 8,
        *,
        criterion: Criterion = "paired",
        map: Map = "pivot",
        dtype: torch.dtype = torch.bfloat16,
    ) -> Sketch:
        """The view of all layers whose reads cost what `mean_rank` for every head would.

        Args:
            criterion: of `allocate`. map, dtype: see `Sketch`.

        Raises:
            ValueError: as `allocate`; for the offline map without a metric.
        """
        if map == "offline" and self.metric is None:
            raise ValueError("map 'offline' needs metric: the file has none")
        ranks = self.allocate(mean_rank, criterion=criterion).ranks
        share = self.heads // self.omega.shape[1]
        omega, metric = (
            None if x is None else x.repeat_interleave(share, 1) for x in (self.omega, self.metric)
        )
        assert omega is not None
        return Sketch(omega, ranks, map, metric if map == "offline" else None, dtype)

    def slice_heads(self, start: int, stop: int) -> Calibration:
        """The part of value heads start to stop - 1, as a tensor-parallel rank holds them.

        Allocate first and slice the ranks alike: a budget is one of all heads.

        Raises:
            ValueError: for heads outside the model, or a cut through a group that leaves more.
        """
        if not 0 <= start < stop <= self.heads:
            raise ValueError(f"heads must lie in 0..{self.heads}, got {start}..{stop}")
        per_group = self.heads // self.omega.shape[1]
        first, last = start // per_group, (stop - 1) // per_group
        if first != last and (start % per_group or stop % per_group):
            raise ValueError(
                f"heads {start}..{stop} cut through a group of {per_group} that shares a basis"
            )
        cut = {
            name: tensor[:, first : last + 1]
            if name in ("omega", "metric")
            else tensor[:, start:stop]
            for name, tensor in self.tensors().items()
        }
        return replace(self, **cut)

    def check(self, layers: Sequence[int], spec: LayerSpec, weights: str = "") -> None:
        """Whether this is the calibration of a model.

        Args:
            layers: indices of its recurrent layers. spec: of one of them.
            weights: its fingerprint; "" if not known, as in public files.

        Raises:
            ValueError: naming everything that differs.
        """
        pairs = {
            "recurrent layers": (list(self.origin.layers), list(layers)),
            "heads": (self.heads, spec.heads),
            "key_dim": (self.key_dim, spec.key_dim),
            "value_dim": (self.origin.value_dim, spec.value_dim),
            "erase": (self.origin.erase, spec.erase),
        }
        if weights and self.origin.weights:
            pairs["weights"] = (self.origin.weights[:12], weights[:12])
        wrong = [f"{name} {a} and not {b}" for name, (a, b) in pairs.items() if a != b]
        if wrong:
            raise ValueError(
                f"the calibration is of another model ({self.origin.model}): it has "
                f"{'; '.join(wrong)}"
            )

    def save(self, path: Path | str) -> None:
        """Write the file; one that is there is replaced only by a whole one."""
        path = Path(path)
        about = {"layers": list(self.origin.layers)}
        about |= {name: getattr(self.origin, name) for name in _ABOUT}
        header = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)}
        tensors = {n: t.float().cpu().contiguous() for n, t in self.tensors().items()}
        part = path.with_name(path.name + ".part")
        save_file(tensors, part, metadata=header)
        part.replace(path)


_ABOUT = ("model", "value_dim", "window", "erase", "text", "weights", "versions", "notes")


def load(path: Path | str) -> Calibration:
    """Read a calibration file.

    Raises:
        ValueError: if it is no safetensors file, no calibration, of a later version, or damaged.
        FileNotFoundError: if it is not there.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no calibration file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(path, header, set(file.keys()))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path.name} is not a safetensors file: {error}") from error
    try:
        about = json.loads(header["about"])
        layers = tuple(int(layer) for layer in about["layers"])
        origin = Origin(layers=layers, **{name: about[name] for name in _ABOUT})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is damaged: its description lacks {error}") from error
    return Calibration(origin, **tensors)


def _check_header(path: Path, header: dict[str, str], names: set[str]) -> None:
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path.name} is not a calibration: its format is {header.get('format')!r}, "
            f"not {FORMAT!r}"
        )
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{path.name} has version {header.get('version')}, this package reads {VERSION}"
        )
    if not _REQUIRED <= names <= _TENSORS:
        raise ValueError(f"{path.name} is damaged: it holds {', '.join(sorted(names))}")


def text_fingerprint(texts: Iterable[str]) -> str:
    """SHA-256 of texts, in order and with their borders."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def gates_fingerprint(gates: Iterable[Tensor]) -> str:
    """SHA-256 of all recurrent layers' A_log in BF16, in their order: the same in every dtype."""
    digest = hashlib.sha256()
    for layer in gates:
        narrow = layer.detach().flatten().to("cpu", torch.bfloat16)
        digest.update(narrow.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
