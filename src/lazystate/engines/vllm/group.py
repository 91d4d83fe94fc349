"""What a model step does with the pages of one group of layers, decided once for all of them.

Layers whose states share a block table share cursors: those in the first one's pages. The layers
read what was decided, at fixed addresses.

Where steps read a view, the checkpoint that a prefill has written has none yet. The first step
after it therefore folds, an empty ring: it reads the checkpoint and stores the view, inside of
whatever graph it is in, and as any fold does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lazystate.engines.vllm.paged import Paged
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.positions import Spans, place, room


class Group:
    """Decides the steps of layers with one block table.

    Args:
        layers: their pages' first is the one whose cursors count.
        rows: most rows of a step.
    """

    def __init__(self, layers: Sequence[Paged], rows: int, device: torch.device) -> None:
        page = layers[0].page
        assert page is not None
        self._layers, self._page = layers, page
        self._viewed = page.storage.view is not None
        self._room, self._prefill_room = room(rows, device), room(rows, device)
        self._known = 0  # address of the pages that views have been made of

    def cursors(self) -> Tensor:
        """Int32 [pages, CURSOR], see `place_kernel`."""
        cursors = self._layers[0].parts()["cursor"]
        if self._viewed and self._known != cursors.data_ptr():
            self._known = cursors.data_ptr()
            for layer in self._layers:  # what views bring to the device no graph can bring
                layer.pool()
        return cursors

    def decode(self, spans: Spans, tokens: int) -> Rows:
        """A step of at most `tokens` tokens a row."""
        page = self._page
        return place(
            self.cursors(),
            spans,
            tokens,
            page.window,
            page.records,
            self._room,
            viewed=self._viewed,
        )

    def prefill(self, spans: Spans) -> Rows:
        """Rows whose rings, if they hold records, must be settled before prefill; they are empty
        from now on.
        """
        window, records = self._page.window, self._page.records
        return place(self.cursors(), spans, 1, window, records, self._prefill_room, prefill=True)
