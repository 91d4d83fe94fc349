"""What is stored: per layer checkpoint, ring of records and view; per slot the cursors.

The state of a request is `Replay(checkpoint, committed records)` (Eq. 8) and is not stored as such
between folds. Records live token-major, so that a step's inputs are appended as they come. Cursors
belong to the request and are shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from lazystate.formats import Format, Rounding
from lazystate.ops.states import States
from lazystate.spec import LayerSpec

Fold = Literal["raw", "cached"]


class View(Protocol):
    """Something that stands in for the checkpoint on the steps that do not fold."""

    def read(self, slots: Tensor | None, vectors: Tensor) -> Tensor:
        """The product S x: slots [B], vectors [B, X, K, n] -> [B, X, rows, n], X dividing HV.

        slots None: every slot of the pool, in order.
        """
        ...

    def store(self, slots: Tensor, state: Tensor) -> None:
        """Rebuild the view of `slots` [B] from the folded state [B, HV, V, K], compute dtype."""
        ...

    def bytes_read(self) -> int:
        """Bytes that one row's read moves."""
        ...

    def bytes_stored(self) -> int:
        """Bytes that one row's fold writes for the view, besides the checkpoint."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What the view keeps of its own, by name, slot first."""
        ...


@runtime_checkable
class LowRank(View, Protocol):
    """A view U C, a rank for each head, as kernels read and write it: see `sketch.SketchView`."""

    omega: Tensor
    ranks: Tensor
    fixed: Tensor
    map: str
    pivots: int
    ridge: float
    stored: dict[str, Tensor]
    places: Tensor


@dataclass(frozen=True)
class FullView:
    """The checkpoint itself: nothing of its own to store."""

    states: States
    compute: torch.dtype

    def read(self, slots: Tensor | None, vectors: Tensor) -> Tensor:
        """See `View.read`."""
        return _product(self.states.read(slots).to(self.compute), vectors)

    def store(self, slots: Tensor, state: Tensor) -> None:
        """Nothing to do: the fold has stored the checkpoint."""

    def bytes_read(self) -> int:
        """Bytes of one slot's states."""
        return self.states.nbytes

    def bytes_stored(self) -> int:
        """Nothing of its own."""
        return 0

    def tensors(self) -> dict[str, Tensor]:
        """Nothing of its own."""
        return {}


@dataclass(frozen=True)
class CastView:
    """A copy of the folded state in a smaller format, rounded to nearest.

    It is made from the value that the checkpoint is made from, never from the checkpoint, and
    nothing of it enters a later fold: its rounding does not accumulate.
    """

    states: States
    compute: torch.dtype

    def read(self, slots: Tensor | None, vectors: Tensor) -> Tensor:
        """See `View.read`."""
        return _product(self.states.read(slots).to(self.compute), vectors)

    def store(self, slots: Tensor, state: Tensor) -> None:
        """See `View.store`."""
        self.states.write(slots, state)

    def bytes_read(self) -> int:
        """Bytes of one slot's copy."""
        return self.states.nbytes

    def bytes_stored(self) -> int:
        """Bytes of one slot's copy."""
        return self.states.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """The copies of all slots."""
        return self.states.tensors("view")


def _product(state: Tensor, vectors: Tensor) -> Tensor:
    """[B, HV, V, K] times [B, X, K, n] -> [B, X, HV V / X, n].

    Always as rows of contiguous vectors by rows of a contiguous state: BLAS is fastest so, and adds
    in the same order for a row whatever the batch.
    """
    batch, keys, key_dim, wanted = vectors.shape
    rows = state.shape[1] * state.shape[2] // keys  # of the heads that share a key head
    shared = state.view(batch * keys, rows, key_dim)
    out = torch.bmm(vectors.mT.contiguous().view(-1, wanted, key_dim), shared.mT)
    return out.view(batch, keys, wanted, rows).mT


@runtime_checkable
class Views(Protocol):
    """What the views of all layers of a model are made by, where they are no format."""

    def check(self, specs: Sequence[LayerSpec]) -> None:
        """Whether it is of layers like these; raises ValueError naming what differs."""
        ...

    def allocate(self, layer: int, spec: LayerSpec, slots: int, device: torch.device) -> View:
        """Room for one layer's views; nothing is initialised."""
        ...


@dataclass(frozen=True)
class Storage:
    """How the states of all layers are stored.

    Attributes:
        checkpoint: format of the checkpoint. view: of the copy that steps read, or what makes
            another view; None for none.
        fold: what a fold derives corrections from. rounding: into the checkpoint. seed: of it.
    """

    checkpoint: Format
    view: Format | Views | None
    fold: Fold
    rounding: Rounding
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `StateCache` that ask for it."""
        return {
            "checkpoint": self.checkpoint.name,
            "view": self.view.name if isinstance(self.view, Format) else self.view,
            "fold": self.fold,
            "rounding": self.rounding,
            "seed": self.seed,
        }


def record_parts(spec: LayerSpec, raw: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every part of one record, by name; raw: with what folds derive u from."""
    parts = {
        "k": (spec.activation, (spec.key_heads, spec.key_dim)),
        "log_decay": (spec.compute, spec.decay_shape),
        "v": (spec.activation, (spec.heads, spec.value_dim)) if raw else None,
        "u": (spec.correction, (spec.heads, spec.value_dim)) if spec.erase else None,
        "beta": (spec.compute, (spec.heads,)) if spec.beta and raw else None,
    }
    return {name: part for name, part in parts.items() if part is not None}


@dataclass
class Ring:
    """The records of one layer: [slots, R, ...], R = window + max_tokens, one record a position.

    `v` is absent where a fold uses cached corrections, `u` where the layer does not erase, `beta`
    where the layer has none.

    Attributes:
        flat: the tensors that exist, by name, as [slots * R + 1, ...], the last a record of
            nothing: zeros. Empty for a ring in somebody else's memory, which only Triton reads.
    """

    k: Tensor
    log_decay: Tensor
    v: Tensor | None = None
    u: Tensor | None = None
    beta: Tensor | None = None
    flat: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, spec: LayerSpec, slots: int, records: int, raw: bool, device: torch.device
    ) -> Ring:
        """Nothing but the record of nothing is initialised. raw: keep what folds derive u from."""
        flat = {}
        for name, (dtype, shape) in record_parts(spec, raw).items():
            flat[name] = torch.empty(slots * records + 1, *shape, dtype=dtype, device=device)
            flat[name][-1] = 0
        shaped = {name: x[:-1].unflatten(0, (slots, records)) for name, x in flat.items()}
        return cls(**shaped, flat=flat)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name."""
        named = {name: getattr(self, name) for name in ("k", "log_decay", "v", "u", "beta")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass
class Pool:
    """One layer's storage for all slots.

    Attributes:
        states: the checkpoints. exact: they as a view, which folding rows read. view: what other
            rows read; `exact` itself where nothing smaller is kept.
    """

    spec: LayerSpec
    window: int
    fold: Fold
    states: States
    ring: Ring
    exact: FullView
    view: View
    conv: Tensor | None

    @property
    def checkpoint(self) -> Tensor:
        """Elements of the checkpoints, [slots, HV, V, K] in a dense format."""
        return self.states.parts["elements"]

    def record_bytes(self, *names: str) -> int:
        """Bytes of one record's named parts, or of all of it."""
        tensors = self.ring.tensors()
        return sum(
            tensor[0, 0].numel() * tensor.element_size()
            for name, tensor in tensors.items()
            if not names or name in names
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the pool by name, slot first."""
        named = {
            **self.states.tensors("checkpoint"),
            **self.view.tensors(),
            **self.ring.tensors(),
        }
        return named if self.conv is None else {**named, "conv": self.conv}


def allocate(
    spec: LayerSpec,
    slots: int,
    *,
    layer: int,
    window: int,
    max_tokens: int,
    storage: Storage,
    device: torch.device,
) -> Pool:
    """One layer's pool; nothing in it is initialised, and nothing invalid is ever read.

    layer: its number, with which no two layers round by the same random bits.
    """
    records = window + max_tokens

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(slots, *shape, dtype=dtype, device=device)

    raw = not spec.erase or storage.fold == "raw"
    ring = Ring.allocate(spec, slots, records, raw, device)
    key = (storage.seed, layer) if storage.rounding == "stochastic" else None
    states = States.allocate(storage.checkpoint, slots, spec.state_shape, device, key)
    view = exact = FullView(states, spec.compute)
    if isinstance(storage.view, Format):
        copies = States.allocate(storage.view, slots, spec.state_shape, device)
        view = CastView(copies, spec.compute)
    elif storage.view is not None:
        view = storage.view.allocate(layer, spec, slots, device)
    conv_inputs = spec.conv_width - 1 + max_tokens
    conv = empty(spec.activation, conv_inputs, spec.conv_channels) if spec.conv_channels else None
    return Pool(spec, window, storage.fold, states, ring, exact, view, conv)


@dataclass
class Cursors:
    """Where each slot stands, on the device.

    Attributes:
        origin: int64 [slots], tokens folded so far: record j lies at (origin + j) mod R.
        filled: int64 [slots], committed records h.
        limit: int64 [slots], the window of the current cycle: below `window` only in a first cycle
            that was staggered at load.
        empty: bool [slots], True while nothing was ever folded into a fresh slot: its checkpoint is
            zero and is not read.
        writes: int64 [slots], checkpoints written since the slot was reset, by folds and loads: the
            number of the next stochastic rounding.
    """

    origin: Tensor
    filled: Tensor
    limit: Tensor
    empty: Tensor
    writes: Tensor

    @classmethod
    def allocate(cls, slots: int, window: int, device: torch.device) -> Cursors:
        """Cursors of fresh slots."""

        def zeros() -> Tensor:
            return torch.zeros(slots, dtype=torch.int64, device=device)

        full = torch.full((slots,), window, dtype=torch.int64, device=device)
        empty = torch.ones(slots, dtype=torch.bool, device=device)
        return cls(zeros(), zeros(), full, empty, zeros())

    def tensors(self) -> dict[str, Tensor]:
        """The cursors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
