"""Copying a passage of the context freely, until the model stops.

A context of book text holds a passage that ends in an empty line; behind it come more text and the
passage's first tokens. The model continues greedily until it writes an empty line: it sees its own
tokens, so that errors add up, and one that loses its way does not stop where it should.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lazystate import shipped
from lazystate.evaluation.kl import Config, cache_argument

LENGTH = 64  # tokens of a passage
BEGUN = 8  # tokens of the second copy that are given
PATIENCE = 2  # a model that has not stopped after so many passages is stopped


@dataclass(frozen=True)
class Passages:
    """Contexts that end where a copy has begun.

    Attributes:
        given: int64 [N, C]. rest: int64 [N, n], what the copy goes on with, the empty line last.
        stop: its token.
    """

    given: Tensor
    rest: Tensor
    stop: int


def passages(
    tokenizer: PreTrainedTokenizerBase, count: int, length: int = LENGTH, gap: int = 128
) -> Passages:
    """Cut passages of `length` tokens and text of `gap` tokens, evenly spread over a book.

    Raises:
        ValueError: if an empty line is not one token, or the book is too short.
    """
    blank = _ids(tokenizer, "\n\n")
    if len(blank) != 1:
        raise ValueError(f"tokenizer must have a token for an empty line, got {len(blank)}")
    (stop,) = blank
    text = torch.tensor([t for t in _ids(tokenizer, shipped.book(shipped.books()[0])) if t != stop])
    stride = len(text) // count
    if length <= BEGUN or stride < length + gap:
        raise ValueError(
            f"length must be more than {BEGUN} and fit {count} times with its gap into a book of "
            f"{len(text):,} tokens, got {length} and {gap}"
        )
    rows = text[: count * stride].view(count, stride)
    passage, between = rows[:, :length], rows[:, length : length + gap]
    empty = torch.full((count, 1), stop)
    given = torch.cat([passage, empty, between, empty, passage[:, :BEGUN]], 1)
    return Passages(given, torch.cat([passage[:, BEGUN:], empty], 1), stop)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text).input_ids)


@dataclass(frozen=True)
class Copies:
    """What came of them.

    Attributes:
        tokens: int64 [N], until the empty line, or the most there were. right: bool [N], whether
            every token was that of the passage.
    """

    tokens: Tensor
    right: Tensor


@torch.inference_mode()
def copy(model: nn.Module, drawn: Passages, config: Config) -> Copies:
    """Continue all contexts greedily, one token a step."""
    forward: Any = model
    name = cache_argument(model)
    device = next(model.parameters()).device
    length = drawn.rest.shape[1]
    written = []
    with config.engine(model):
        out = forward(drawn.given.to(device), use_cache=True)
        for _ in range(PATIENCE * length):
            token = out.logits[:, -1:].argmax(-1)
            written.append(token)
            out = forward(token, **{name: out[name]}, use_cache=True)
    found = torch.cat(written, 1).cpu()
    stopped = (found == drawn.stop).int()
    stopped[:, -1] = 1
    return Copies(stopped.argmax(1) + 1, (found[:, :length] == drawn.rest).all(1))
