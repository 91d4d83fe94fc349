"""Prefill of vLLM's beside checkpoints in a format that it does not take: from wide copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lazystate.ops.states import States
from lazystate.ops.triton.cursors import Rows


@contextmanager
def widened(
    conv: Tensor, states: States, rows: Rows, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Copies numbered from 1 on, as `numbered` numbers the rows; afterwards the pages have them.

    Args:
        conv: [blocks, width - 1, C], last inputs of the convolution. states: the checkpoints.
        rows: of a prefill. dtype: of the state that vLLM writes, which is rounded once.

    Yields:
        [1 + B, width - 1, C] and [1 + B, HV, V, K].
    """
    blocks = rows.meta[:, 0].clamp(min=0)
    inputs, exact = conv[blocks], states.read(blocks)
    inputs, wide = (torch.cat([x[:1], x]) for x in (inputs, exact.to(dtype)))
    yield inputs, wide
    ends = rows.meta[:, 7] + rows.meta[:, 3]  # a rounding is numbered by its position
    conv[blocks] = inputs[1:]
    states.write(blocks, wide[1:].float(), ends)


def numbered(common: Any) -> Any:
    """vLLM's metadata of a batch whose rows' pages are 1, 2, 3 ... wherever their tokens are."""
    table = common.block_table_tensor
    pages = torch.arange(1, table.shape[0] + 1, dtype=table.dtype, device=table.device)
    return replace(common, block_table_tensor=pages.unsqueeze(1).expand_as(table).contiguous())
