"""Random programs with low-precision states: the bytes are those of a list of tokens, rounded.

The programs of `test_property`, with NaN in all invalid memory. The model is
`rounded.RoundedCache`, which rounds the state of its list when a row folds, with the random bits of
the same seed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import samples
from lazystate import LayerSpec, StateCache
from lazystate.formats import FORMATS
from rounded import RoundedCache
from test_property import SLOTS, Programs, run

SEED = 11
# (layers, checkpoint, view, rounding)
STORAGE = [
    ("mamba2", "fp16", "nvfp4", "stochastic"),
    ("gdn", "fp8", "fp8", "stochastic"),
    ("gdn", "fp32", "int2", "stochastic"),
    ("kda", "nvfp4", None, "stochastic"),
    ("kda", "fp16", "int4", "nearest"),
    ("gla", "bf16", "int8", "stochastic"),
    ("hybrid", "fp16", "nvfp4", "stochastic"),
    ("hybrid", "nvfp4", "bf16", "nearest"),
]


class LowPrecisionPrograms(Programs):
    """Programs on caches of given formats."""

    def __init__(self, specs: list[LayerSpec], salt: int, storage: dict[str, Any]) -> None:
        super().__init__(specs, "raw", salt)
        self.storage = storage

    def pair(self, options: dict[str, Any]) -> tuple[StateCache, RoundedCache]:
        """A cache of the given sizes, and its model."""
        view, rounding = self.storage["view"], self.storage["rounding"]
        model = RoundedCache(
            self.specs,
            SLOTS,
            options["window"],
            FORMATS[self.storage["checkpoint"]],
            None if view is None else FORMATS[view],
            SEED if rounding == "stochastic" else None,
        )
        return StateCache(self.specs, SLOTS, **options, **self.storage, seed=SEED), model

    def advance(self, which, numbers, tokens, lengths, kept) -> None:
        """A model step; what it stored is compared byte by byte."""
        super().advance(which, numbers, tokens, lengths, kept)
        self.same_bytes(which, [n for n in numbers if n >= 0])

    def teardown(self) -> None:
        """At the end every slot of both caches holds the bytes that it should."""
        super().teardown()
        if hasattr(self, "pairs"):
            for which in range(2):
                if self.pairs[which][0]._open is None:
                    self.same_bytes(which, list(range(SLOTS)))

    def same_bytes(self, which: int, numbers: list[int]) -> None:
        """Checkpoints and views of slots equal the model's, bit for bit."""
        cache, model = self.pairs[which]
        if not numbers:
            return
        exported = cache.export(samples.slots(*numbers))
        for i, number in enumerate(numbers):
            request = model.requests[number]
            assert int(exported["cursors.writes"][i]) == request.writes
            for layer, stored in enumerate(request.stored):
                for copy, parts in ({} if stored is None else stored).items():
                    for part, expected in parts.items():
                        name = f"{layer}.{copy}" + ("" if part == "elements" else f".{part}")
                        assert torch.equal(exported[name][i], expected), name
                        self.count("compared")


@pytest.mark.parametrize(
    ("kind", "checkpoint", "view", "rounding"),
    STORAGE,
    ids=["-".join(map(str, s)) for s in STORAGE],
)
def test_any_program_stores_the_bytes_of_a_rounded_list_of_tokens(
    kind: str, checkpoint: str, view: str | None, rounding: str
) -> None:
    """Checkpoint and view bytes are equal, outputs and states agree to 1e-9, whatever was done."""
    kinds = ("mamba2", "gdn", "kda") if kind == "hybrid" else (kind,)
    sizes = {"heads": 2, "key_dim": 20, "value_dim": 3, "conv_channels": 3, "conv_width": 4}
    specs = [samples.layer(name, **sizes, key_heads=2 if name == "kda" else 1) for name in kinds]
    storage = {"checkpoint": checkpoint, "view": view, "rounding": rounding}
    LowPrecisionPrograms.counts = Counter()
    salt = STORAGE.index((kind, checkpoint, view, rounding))
    run(lambda: LowPrecisionPrograms(specs, salt, storage), examples=12)
    counts = LowPrecisionPrograms.counts
    assert counts["fold"] >= 300 and counts["compared"] >= 3_000, counts
