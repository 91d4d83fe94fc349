"""Sketches as the views of a cache: programs, formats, slices by heads, the engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import samples
from lazystate import LayerSpec, StateCache, count_traffic, patched, planner
from lazystate.formats import FORMATS
from lazystate.sketch.traffic import sketched, view_bytes
from lazystate.sketch.view import DENSE, Sketch
from rounded import RoundedCache
from samples import draw, layer, slots
from test_property import SLOTS, Programs, run
from tiny_models import FAMILIES, copied, prompt
from tolerance import error

DOUBLE = torch.float64


def sketch_of(specs: list[LayerSpec], ranks: list[int], **options: Any) -> Sketch:
    """Sketches of random bases, the same ranks in every layer."""
    shape = len(specs), specs[0].heads, specs[0].key_dim, max(*ranks, 1)
    generator = torch.Generator().manual_seed(5)
    omega = torch.linalg.qr(torch.randn(shape, dtype=DOUBLE, generator=generator)).Q
    return Sketch(omega, torch.tensor([ranks] * len(specs)), **options)


class SketchedPrograms(Programs):
    """The programs of `test_property` on caches with sketches."""

    def __init__(self, specs: list[LayerSpec], salt: int, sketch: Sketch) -> None:
        super().__init__(specs, "raw", salt)
        self.sketch = sketch

    def pair(self, options: dict[str, Any]) -> tuple[StateCache, RoundedCache]:
        """A cache of the given sizes, and its model."""
        form, window = FORMATS["fp32"], options["window"]
        model = RoundedCache(self.specs, SLOTS, window, form, self.sketch, None)
        return StateCache(self.specs, SLOTS, **options, view=self.sketch), model

    def same(self, actual: Tensor, expected: Tensor) -> None:
        """Equal to FP32 checkpoints: a last bit of one may round otherwise in cache and model."""
        assert actual.shape == expected.shape
        assert error(actual, expected) <= 64 * FP32_ULP


FP32_ULP = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("kind", "map"), [("mamba2", "pivot"), ("gdn", "pivot"), ("kda", "exact"), ("hybrid", "pivot")]
)
def test_any_program_reads_the_sketch_of_the_last_fold(kind: str, map: Any) -> None:
    """Ragged drafts, folds, copies, moves: outputs from the low-rank product, exact states."""
    kinds = ("mamba2", "gdn", "kda") if kind == "hybrid" else (kind,)
    sizes = {"heads": 2, "key_dim": 6, "value_dim": 3, "conv_channels": 3, "conv_width": 4}
    specs = [samples.layer(name, **sizes, key_heads=2 if name == "kda" else 1) for name in kinds]
    sketch = sketch_of(specs, [2, DENSE], map=map, dtype=DOUBLE)
    SketchedPrograms.counts = Counter()
    run(lambda: SketchedPrograms(specs, 31, sketch), examples=8)
    assert SketchedPrograms.counts["fold"] >= 200, SketchedPrograms.counts


@pytest.mark.parametrize("checkpoint", ["fp32", "fp16", "fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_rank_reads_the_state_to_its_dtype(checkpoint: str, dtype: torch.dtype) -> None:
    """At full rank only the rounding of the sketch is left, whatever the checkpoint is kept in."""
    spec = layer("gdn", torch.float32, key_dim=16, value_dim=24)
    sketch = sketch_of([spec], [16, 16, DENSE, 16], map="exact", dtype=dtype)
    exact = StateCache(spec, 1, window=32)
    cache = StateCache(spec, 1, window=32, view=sketch, checkpoint=checkpoint)
    state = torch.randn(1, *spec.state_shape)
    for each in (exact, cache):
        each.load(slots(0), [state])
    inputs = draw(spec, 1, 1)
    got, expected = (samples.advance(each, slots(0), inputs) for each in (cache, exact))
    # U, C and the dense copy are rounded once each, relative to their own largest entries
    assert 0 < error(got, expected) < 8 * torch.finfo(dtype).eps


def test_slices_by_heads_are_parts_of_the_whole() -> None:
    """Two halves of the heads, each with its slice, give the whole's outputs bit for bit."""
    spec = layer("kda", torch.float32, key_dim=16, value_dim=8)
    half = layer("kda", torch.float32, key_dim=16, value_dim=8, heads=2, key_heads=2)
    sketch = sketch_of([spec], [3, 5, DENSE, 1])
    state, inputs = torch.randn(1, *spec.state_shape), draw(spec, 1, 3)

    def decode(spec: LayerSpec, view: Sketch, heads: slice) -> Tensor:
        cache = StateCache(spec, 1, max_tokens=3, view=view)
        cache.load(slots(0), [state[:, heads]])
        part = (x if x is None else x[:, :, heads] for x in inputs[:5])
        ticket = cache.begin(slots(0), 3)
        return cache.step(ticket, 0, *part)

    whole = decode(spec, sketch, slice(0, 4))
    parts = [decode(half, sketch.slice_heads(i, i + 2), slice(i, i + 2)) for i in (0, 2)]
    assert torch.allclose(torch.cat(parts, 2), whole, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"heads must lie in 0\.\.4, got 2\.\.5"):
        sketch.slice_heads(2, 5)


def test_a_sketch_of_other_layers_is_refused() -> None:
    """Another number of layers, heads or channels, each by name."""
    spec = layer("gdn", torch.float32, key_dim=16)
    sketch = sketch_of([spec], [2, 2, 2, 2])
    with pytest.raises(ValueError, match="view must sketch 2 layers, got a sketch of 1"):
        StateCache([spec, spec], 1, view=sketch)
    with pytest.raises(ValueError, match="4 heads of key_dim 32 in layer 0, got a sketch of 4"):
        StateCache(layer("gdn", torch.float32, key_dim=32), 1, view=sketch)
    with pytest.raises(ValueError, match="fold must be 'raw' with a view"):
        StateCache(spec, 1, view=sketch, fold="cached")


def test_bytes_are_counted_planned_and_kept() -> None:
    """Over whole windows the counted traffic is the planner's; memory is what it says."""
    spec = layer("gdn", torch.float32, key_dim=16, value_dim=8)
    sketch = sketch_of([spec], [1, 4, DENSE, 2])
    cache = StateCache(spec, 2, window=8, view=sketch)
    viewed = sketch.planned(0, spec)
    ranks = sum(view_bytes(16, 8, rank) for rank in (1, 4, 2))
    assert viewed.read == ranks + 2 * 16 * 8
    cursors = 4 * 8 + 1
    slot = planner.slot_bytes(spec, "replay", window=8, view=viewed)
    assert cache.nbytes_per_slot == slot + cursors
    state = torch.randn(2, *spec.state_shape)
    cache.load(slots(0, 1), [state])
    for _ in range(8):
        samples.advance(cache, slots(0, 1), draw(spec, 2, 1))
    with count_traffic() as moved:
        for _ in range(16):
            samples.advance(cache, slots(0, 1), draw(spec, 2, 1))
    planned = planner.traffic(spec, "replay", window=8, view=viewed)
    assert moved.read == 32 * planned.read and moved.written == 32 * planned.written


def test_planned_bytes_of_a_mean_rank() -> None:
    """Whole ranks as stored, and in proportion between them."""
    spec = layer("gdn", torch.float32, key_dim=128, value_dim=64)
    assert sketched(spec, 8).read == 4 * view_bytes(128, 64, 8)
    low, middle, high = (sketched(spec, rank).read for rank in (8, 8.5, 9))
    assert middle == (low + high) // 2
    with pytest.raises(ValueError, match=r"mean_rank must be 1 to 128, got 0\.5"):
        sketched(spec, 0.5)


@pytest.mark.parametrize("mixer", FAMILIES)
def test_a_model_decodes_with_sketches(mixer: str) -> None:
    """At full rank in FP32 a patched model writes what the stock model writes."""
    from lazystate.engines.transformers.observing import layer_spec, recurrent_modules

    model, text = copied(mixer), prompt(9)
    spec, layers = layer_spec(model), len(recurrent_modules(model))
    sketch = sketch_of([spec] * layers, [DENSE] * spec.heads, dtype=torch.float32)
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(text, **options)
    with patched(model, view=sketch, window=8):
        got = model.generate(text, **options)
        drafted = model.generate(text, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(got, expected) and torch.equal(drafted, expected)
