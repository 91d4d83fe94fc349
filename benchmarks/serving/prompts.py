"""Prompts in tokens of a shipped model, from the held-out books; the same in every process."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from lazystate.shipped import book, model_folder
from serving.cases import LONGEST, PROMPTS, TOKENS


def encoded(model: str) -> list[int]:
    """Pride and Prejudice in tokens."""
    path: Path = model_folder(model) / "tokenizer.json"
    return Tokenizer.from_file(str(path)).encode(book("pride-and-prejudice")).ids


def various(text: list[int], count: int = PROMPTS) -> list[list[int]]:
    """Passages of 24 to 640 tokens from all over a text."""
    pick = random.Random(0)
    sizes = [pick.randint(24, min(640, LONGEST - TOKENS)) for _ in range(count)]
    starts = [pick.randrange(len(text) - size) for size in sizes]
    return [text[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def related(text: list[int], families: int = 8, count: int = PROMPTS) -> list[list[int]]:
    """Passages that share their first 600 tokens by families, and then differ."""
    pick = random.Random(1)
    heads = [
        text[at : at + 600] for at in (pick.randrange(len(text) - 700) for _ in range(families))
    ]
    tails = [pick.randrange(len(text) - 100) for _ in range(count)]
    return [
        heads[row % families] + text[at : at + pick.randint(8, 100)] for row, at in enumerate(tails)
    ]


def short(text: list[int], count: int = 10_000) -> list[tuple[list[int], int]]:
    """Passages of 1 to 24 tokens, each with how many tokens to continue it by."""
    pick = random.Random(2)
    starts = [pick.randrange(len(text) - 24) for _ in range(count)]
    return [(text[at : at + pick.randint(1, 24)], pick.randint(1, 8)) for at in starts]
