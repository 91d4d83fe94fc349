"""Cursors of one group of layers, keyed by block, and what a model step does with them.

Layers whose states share a block table share cursors. A step of one token keeps it, so cursors are
advanced as soon as the step is decided; the layers read what was decided, at fixed addresses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lazystate.ops.pool import Cursors
from lazystate.ops.triton.cursors import Rows, begin, commit, room

NULL_BLOCK = 0  # vLLM's: what padded rows have


class Group:
    """Cursors of all blocks, and room for the rows of a step.

    Args:
        window: L. rows: most rows of a step.
    """

    def __init__(self, window: int, rows: int, device: torch.device) -> None:
        self.window, self.device = window, device
        self._room = room(rows, device)
        self._cursors: Cursors | None = None

    def cursors(self, blocks: int) -> Cursors:
        """Of so many blocks: made anew where the cache was, with no record in any ring."""
        if self._cursors is None or self._cursors.filled.numel() != blocks:
            self._cursors = Cursors.allocate(blocks, self.window, self.device)
            self._cursors.empty.fill_(False)  # prefill writes a state before anything reads it
        return self._cursors

    def decode(self, blocks: int, indices: Tensor) -> Rows:
        """Decide and commit a step of one token. indices: integer [B], blocks of the rows."""
        cursors = self.cursors(blocks)
        rows = begin(cursors, _slots(indices), None, 1, self.window, self.window + 1, self._room)
        commit(cursors, rows, None, self.window)
        return rows

    def prefill(self, blocks: int, indices: Tensor) -> Rows:
        """Rows whose rings, if they hold records, must be settled before prefill; they are empty
        from now on. indices: integer [B].
        """
        cursors = self.cursors(blocks)
        slots = _slots(indices)
        # no record fits beside a whole window: whatever is held is due
        rows = begin(cursors, slots, None, self.window, self.window, self.window + 1)
        commit(cursors, rows, torch.zeros_like(slots), self.window)
        return rows


def _slots(indices: Tensor) -> Tensor:
    slots = indices.to(torch.int64)
    return torch.where(slots == NULL_BLOCK, -1, slots)
