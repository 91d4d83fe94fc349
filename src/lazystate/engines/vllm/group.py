"""Cursors of one group of layers, keyed by block, and what a model step does with them.

Layers whose states share a block table share cursors. A step of one token keeps it, so cursors are
advanced as soon as the step is decided; the layers read what was decided, at fixed addresses.

Where steps read a view, the checkpoint that a prefill has written has none yet. The first step
after it therefore folds, an empty ring: it reads the checkpoint and stores the view, inside of
whatever graph it is in, and as any fold does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lazystate.engines.vllm.paged import Paged
from lazystate.ops.pool import Cursors
from lazystate.ops.triton.cursors import Rows, begin, commit, room

NULL_BLOCK = 0  # vLLM's: what padded rows have


class Group:
    """Cursors of all blocks, and room for the rows of a step.

    Args:
        window: L. rows: most rows of a step. viewed: whether layers keep views.
        layers: whose views, where there are any, are made along with the cursors: what they bring
            to the device cannot be brought in a graph.
    """

    def __init__(
        self,
        window: int,
        rows: int,
        device: torch.device,
        *,
        viewed: bool = False,
        layers: Sequence[Paged] = (),
    ) -> None:
        self.window, self.device, self.viewed, self._layers = window, device, viewed, layers
        self._room = room(rows, device)
        self._cursors: Cursors | None = None

    @classmethod
    def of(cls, layers: Sequence[Paged], rows: int, device: torch.device) -> Group:
        """The group of layers with one block table."""
        page = layers[0].page
        assert page is not None
        viewed = page.storage.view is not None
        return cls(page.window, rows, device, viewed=viewed, layers=layers)

    def cursors(self, blocks: int) -> Cursors:
        """Of so many blocks: made anew where the cache was, with no record in any ring."""
        if self._cursors is None or self._cursors.filled.numel() != blocks:
            self._cursors = Cursors.allocate(blocks, self.window, self.device)
            self._cursors.empty.fill_(False)  # prefill writes a state before anything reads it
            if self.viewed:
                self._cursors.limit.fill_(0)
                for layer in self._layers:
                    layer.pool()
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
        if self.viewed:
            cursors.limit[indices.long()] = 0  # padded rows: the null block's, which nothing reads
        return rows


def _slots(indices: Tensor) -> Tensor:
    slots = indices.to(torch.int64)
    return torch.where(slots == NULL_BLOCK, -1, slots)
