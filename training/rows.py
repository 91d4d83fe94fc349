"""Batches of rows: windows of the text, and synthetic rows, with a tag for every token."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import presets
from synthetic import TEXT, Synthetic, piecewise

TAG = 16  # bits of a token below its tag
TOGETHER = 8  # batches that a worker hands over at once
SEED = 1000  # seeds below belong to the tests


def read_tokens(data: Path) -> np.ndarray:
    """The training tokens, from `train.bin` or `train.bin.xz`."""
    plain = data / "train.bin"
    if plain.exists():
        return np.fromfile(plain, dtype=np.uint16)
    return np.frombuffer(lzma.decompress((data / "train.bin.xz").read_bytes()), dtype=np.uint16)


class Rows(IterableDataset):
    """Endless groups of batches [TOGETHER, batch, length + 1]; a value is `token | tag << 16`.

    `shares` are the shares of noise, repeat and recall; the rest of the rows is text.
    """

    def __init__(
        self, data: Path, batch: int, length: int, shares: tuple[float, ...], seed: int
    ) -> None:
        self.text, self.shares, self.seed = read_tokens(data), shares, seed
        self.shape = (TOGETHER, batch, length + 1)
        self.tokenizer = data / "tokenizer.json"

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield groups; every worker has its own random stream."""
        worker = get_worker_info()
        seed = (self.seed + 1) * SEED + (worker.id if worker else 0)
        rng = np.random.default_rng(seed)
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        encode = piecewise(lambda text: tokenizer.encode(text).ids)
        source = Synthetic(self.text, encode, presets.END_TOKEN, seed)
        size, total = self.shape[-1], sum(self.shares)
        inner = tuple(share / total for share in self.shares) if total else ()
        while True:
            rows = np.empty(self.shape, dtype=np.int32)
            for row in rows.reshape(-1, size):
                if rng.random() < total:
                    tokens, tags = source.row(size, inner)
                    row[:] = tokens | tags << TAG
                else:
                    start = rng.integers(len(self.text) - size)
                    row[:] = self.text[start : start + size].astype(np.int32) | TEXT << TAG
            yield torch.from_numpy(rows)


def batches(rows: Rows, workers: int, device: str) -> Iterator[torch.Tensor]:
    """Batches on the device, made by worker processes."""
    pin = device == "cuda"
    loader = DataLoader(rows, batch_size=None, num_workers=workers, pin_memory=pin)
    for group in loader:
        yield from group.to(device, non_blocking=True)
