"""What is stored: per layer checkpoint, ring of records and view; per slot the cursors.

The state of a request is `Replay(checkpoint, committed records)` (Eq. 8) and is not stored as such
between folds. Records live token-major, so that a step's inputs are appended as they come. Cursors
belong to the request and are shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class FullView:
    """The checkpoint itself: nothing of its own to store."""

    checkpoint: Tensor
    compute: torch.dtype

    def read(self, slots: Tensor | None, vectors: Tensor) -> Tensor:
        """See `View.read`."""
        state = self.checkpoint if slots is None else self.checkpoint.index_select(0, slots)
        state = state.to(self.compute)
        keys, (heads, value_dim, key_dim) = vectors.shape[1], state.shape[1:]
        return state.view(-1, keys, heads * value_dim // keys, key_dim) @ vectors

    def store(self, slots: Tensor, state: Tensor) -> None:
        """Nothing to do: the fold has stored the checkpoint."""

    def bytes_read(self) -> int:
        """Bytes of one slot's checkpoint."""
        return self.checkpoint[0].numel() * self.checkpoint.element_size()


@dataclass
class Ring:
    """The records of one layer: [slots, R, ...], R = window + max_tokens, one record a position.

    `v` is absent where a fold uses cached corrections, `u` where the layer does not erase, `beta`
    where the layer has none.
    """

    k: Tensor
    log_decay: Tensor
    v: Tensor | None
    u: Tensor | None
    beta: Tensor | None

    @cached_property
    def flat(self) -> dict[str, Tensor]:
        """The tensors that exist, by name, as [slots * R, ...]."""
        return {name: tensor.flatten(0, 1) for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass
class Pool:
    """One layer's storage for all slots."""

    spec: LayerSpec
    window: int
    fold: Fold
    checkpoint: Tensor
    ring: Ring
    view: View
    conv: Tensor | None

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
        named = {"checkpoint": self.checkpoint, **self.ring.tensors()}
        return named if self.conv is None else {**named, "conv": self.conv}


def allocate(
    spec: LayerSpec,
    slots: int,
    *,
    window: int,
    max_tokens: int,
    checkpoint: torch.dtype,
    fold: Fold,
    device: torch.device,
) -> Pool:
    """One layer's pool; nothing in it is initialised, and nothing invalid is ever read."""
    records = window + max_tokens

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(slots, *shape, dtype=dtype, device=device)

    keeps_values = not spec.erase or fold == "raw"
    ring = Ring(
        k=empty(spec.activation, records, spec.key_heads, spec.key_dim),
        log_decay=empty(spec.compute, records, *spec.decay_shape),
        v=empty(spec.activation, records, spec.heads, spec.value_dim) if keeps_values else None,
        u=empty(spec.correction, records, spec.heads, spec.value_dim) if spec.erase else None,
        beta=empty(spec.compute, records, spec.heads) if spec.beta and keeps_values else None,
    )
    state = empty(checkpoint, *spec.state_shape)
    conv_inputs = spec.conv_width - 1 + max_tokens
    conv = empty(spec.activation, conv_inputs, spec.conv_channels) if spec.conv_channels else None
    return Pool(spec, window, fold, state, ring, FullView(state, spec.compute), conv)


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
    """

    origin: Tensor
    filled: Tensor
    limit: Tensor
    empty: Tensor

    @classmethod
    def allocate(cls, slots: int, window: int, device: torch.device) -> Cursors:
        """Cursors of fresh slots."""

        def zeros() -> Tensor:
            return torch.zeros(slots, dtype=torch.int64, device=device)

        full = torch.full((slots,), window, dtype=torch.int64, device=device)
        return cls(zeros(), zeros(), full, torch.ones(slots, dtype=torch.bool, device=device))

    def tensors(self) -> dict[str, Tensor]:
        """The four cursors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
