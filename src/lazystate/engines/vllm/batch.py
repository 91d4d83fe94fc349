"""How a batch of vLLM's is divided: rows that go through checkpoint and ring, and prefill.

Short rows are those of at most T tokens, whatever they are: drafts to be verified, the last tokens
of a prompt, all of a short one. What of them is kept, the next step's sequence says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lazystate.ops.triton.positions import Spans

Index = slice | Tensor


@dataclass(frozen=True)
class Part:
    """Some rows of a batch.

    Attributes:
        rows: which, a slice or int64 on the host. tokens: theirs in the step's inputs, a slice or
            int64 on the device; of short rows perhaps others among them.
        lengths: int32 on the host, tokens of each row.
    """

    rows: Index
    tokens: Index
    lengths: Tensor


def divide(starts: Tensor, most: int, device: torch.device) -> tuple[Part | None, Part | None]:
    """Short rows and prefill, None for none.

    Args:
        starts: int32 [B + 1] on the host, first token of each row and the end of the last.
        most: T, tokens of a row that is no prefill.
        device: of the step's inputs.
    """
    lengths = starts.diff()
    short = lengths <= most
    if bool(short.all()):
        return Part(slice(None), slice(None), lengths), None
    if not bool(short.any()):
        return None, Part(slice(None), slice(None), lengths)
    rows = int(short.sum())
    if bool(short[:rows].all()):  # vLLM mostly puts them first
        tokens = int(starts[rows])
        ahead = Part(slice(0, rows), slice(0, tokens), lengths[:rows])
        return ahead, Part(slice(rows, None), slice(tokens, None), lengths[rows:])
    tokens = torch.repeat_interleave(~short, lengths.long()).nonzero().flatten().to(device)
    ahead = Part(short.nonzero().flatten(), slice(None), lengths[short])
    return ahead, Part((~short).nonzero().flatten(), tokens, lengths[~short])


def spans_of(part: Part, common: Any, blocks: Tensor) -> Spans:
    """Where the sequences of a part's rows are.

    Args:
        common: vLLM's metadata of the batch. blocks: int32 [B], of all rows.
    """
    starts, stops = common.query_start_loc[:-1], common.query_start_loc[1:]
    at = _on(part.rows, blocks.device)
    return Spans(blocks[at], starts[at], stops[at], common.seq_lens[at])


# What vLLM's metadata says of each row; 0.26 keeps copies on the host as well.
PER_ROW = ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound")
COPIES = ("_seq_lens_cpu", "_num_computed_tokens_cpu")


def only(part: Part, common: Any) -> Any:
    """vLLM's metadata of a batch of no other rows."""
    if part.rows == slice(None):
        return common
    named = {name: getattr(common, name) for name in PER_ROW}
    named |= {name: getattr(common, name) for name in COPIES if hasattr(common, name)}
    starts = torch.zeros(part.lengths.numel() + 1, dtype=torch.int32)
    torch.cumsum(part.lengths, 0, out=starts[1:])
    return common.replace(
        **{name: None if x is None else x[_on(part.rows, x.device)] for name, x in named.items()},
        query_start_loc=starts.to(common.query_start_loc.device, non_blocking=True),
        query_start_loc_cpu=starts,
        num_reqs=part.lengths.numel(),
        num_actual_tokens=int(starts[-1]),
        slot_mapping=common.slot_mapping[part.tokens],
        _num_computed_tokens_cache=None,
    )


def _on(index: Index, device: torch.device) -> Index:
    return index if isinstance(index, slice) else index.to(device)


def taken(x: Tensor, part: Part, dim: int = 0) -> Tensor:
    """What a step's tensor has of a part's tokens, which are its axis `dim`."""
    tokens = part.tokens
    if isinstance(tokens, Tensor):
        return x.index_select(dim, tokens)
    return x[(slice(None),) * dim + (tokens,)]


@contextmanager
def placed(out: Tensor, part: Part, dim: int = 0) -> Iterator[Tensor]:
    """Room for outputs of a part's tokens, which go to where they belong in `out`."""
    written = taken(out, part, dim)
    yield written
    if isinstance(part.tokens, Tensor):
        out.index_copy_(dim, part.tokens, written)
