"""States of all slots in one format: what a checkpoint is kept in, and a cast view."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazystate.formats import Format
from lazystate.philox import state_bits


@dataclass(frozen=True)
class States:
    """One state [HV, V, K] a slot.

    Attributes:
        form: how they are stored. shape: (HV, V, K).
        parts: what the format stores, by its names, each [slots, HV, ...].
        key: (seed, layer) of stochastic rounding; None rounds to nearest.
    """

    form: Format
    shape: tuple[int, int, int]
    parts: dict[str, Tensor]
    key: tuple[int, int] | None = None

    @classmethod
    def allocate(
        cls,
        form: Format,
        slots: int,
        shape: tuple[int, int, int],
        device: torch.device,
        key: tuple[int, int] | None = None,
    ) -> States:
        """Nothing is initialised."""
        parts = {
            name: torch.empty(slots, shape[0], *part, dtype=dtype, device=device)
            for name, (part, dtype) in form.shapes(*shape[1:]).items()
        }
        return cls(form, shape, parts, key if form.narrow else None)

    def read(self, slots: Tensor | None) -> Tensor:
        """The states of slots int64 [n] (None: of all, in order) as numbers.

        Returns:
            [n, HV, V, K], FP32 or FP64; not a copy where nothing has to be computed.
        """
        parts = self.parts
        if slots is not None:
            parts = {name: part.index_select(0, slots) for name, part in parts.items()}
        return self.form.decode(parts, self.shape[2])

    def write(self, slots: Tensor, state: Tensor, counts: Tensor | None = None) -> None:
        """Round and store states.

        Args:
            slots: int64 [n]. state: [n, HV, V, K], compute dtype.
            counts: int64 [n], what was written to each slot before: the number of its draw. Needed
                where there is a key.
        """
        bits = None
        if self.key is not None:
            assert counts is not None
            bits = state_bits(self.key, slots, counts, self.shape)
        for name, part in self.form.encode(state, bits).items():
            self.parts[name].index_copy_(0, slots, part)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot's state."""
        return self.shape[0] * self.form.nbytes(*self.shape[1:])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The parts by name, the elements under `name` itself."""
        return {
            name if part == "elements" else f"{name}.{part}": tensor
            for part, tensor in self.parts.items()
        }
