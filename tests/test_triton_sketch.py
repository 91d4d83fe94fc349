"""Sketches in the kernels: read, verified and built as the PyTorch backend does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lazystate import LayerSpec, StateCache
from lazystate.gates import Inputs
from lazystate.ops.torch.fold import fold as torch_fold
from lazystate.ops.triton.settle import settle
from lazystate.sketch.maps import RIDGE
from lazystate.sketch.view import SketchView
from samples import advance, draw, layer, slots
from test_sketch_cache import sketch_of
from tolerance import arithmetic, eps, error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DENSE = 0
KEY_DIM = 24
slow = pytest.mark.slow


def caches(kind: str, tokens: int, view: Any, **options: Any) -> list[StateCache]:
    """The same cache by both backends."""
    spec = layer(kind, torch.float32, key_dim=KEY_DIM, value_dim=20)
    return [
        StateCache(spec, 3, max_tokens=tokens, device=DEVICE, backend=name, view=view, **options)
        for name in ("triton", "torch")
    ]


def view_of(kind: str, ranks: list[int], **options: Any) -> Any:
    """A sketch for `caches`, with a metric where the map needs one."""
    spec = layer(kind, torch.float32, key_dim=KEY_DIM, value_dim=20)
    if options.get("map") == "offline":
        root = torch.randn(1, 4, KEY_DIM, KEY_DIM, dtype=torch.float64)
        options["metric"] = root @ root.mT
    return sketch_of([spec], ranks, **options)


def compare(both: list[StateCache], tokens: int, steps: int, held: int = 0) -> None:
    """Ragged drafts, padding and a reset by both; the second then goes on from the first's bytes.

    held: tokens in the rings to begin with, so that folds come within a few steps.
    """
    spec, used = both[0].specs[0], slots(2, 0).to(DEVICE)
    rows = slots(2, -1, 0).to(DEVICE)
    state = torch.randn(1, *spec.state_shape)
    for each in both:
        each.load(slots(2).to(DEVICE), [state])
    for start in range(0, held, tokens):
        advance(both[1], used, moved(spec, 2, min(tokens, held - start)))
    both[0].import_(used, both[1].export(used))
    folded = False
    for number in range(steps):
        inputs = moved(spec, 3, tokens)
        if number == 2:
            inputs.log_decay[0, 0] = -float("inf")
        last = tokens - number % tokens
        terms = product_error(both[0], inputs, rows.clamp_min(0))
        outputs, exported = [], []
        for each in both:
            ticket = each.begin(rows, tokens, slots(tokens, tokens, last).to(DEVICE))
            outputs.append(each.step(ticket, 0, *inputs))
            each.commit(ticket, slots(1, 0, last).to(DEVICE))
            exported.append(each.export(used))
        explained = terms / max(1.0, float(outputs[1].abs().max()))
        assert error(*outputs) <= explained + 2 * arithmetic(spec, both[0].window)
        live = ~exported[0]["cursors.empty"].cpu()
        folded |= bool(live.all())
        for name, part in exported[1].items():
            if name.startswith(("0.view.", "0.checkpoint")) and part.is_floating_point():
                near(name, exported[0][name].cpu()[live], part.cpu()[live])
        both[1].import_(used, exported[0])
    assert folded


def moved(spec: LayerSpec, batch: int, tokens: int) -> Inputs:
    """Random inputs of a step on the device."""
    return Inputs(*(x if x is None else x.to(DEVICE) for x in draw(spec, batch, tokens)))


def product_error(cache: StateCache, inputs: Inputs, rows: Tensor) -> float:
    """By how much two FP32 products with a sketch differ: sums over channels, columns and pivots.

    Their terms may be larger than the product, so they are added without signs.
    """
    view = cast(SketchView, cache._pools[0].view)
    stored = {name: part.float().abs() for name, part in view.stored.items()}
    unsigned = replace(view, fixed=view.fixed.float().abs(), stored=stored)
    x = torch.cat([inputs.q, inputs.k] if cache.specs[0].erase else [inputs.q], 1)
    terms = unsigned.read(rows, x.abs().transpose(1, 2).mT.float())
    count = KEY_DIM + view.omega.shape[2] + view.pivots
    return eps(torch.float32) * count * float(terms.max())


def near(name: str, got: Tensor, expected: Tensor) -> None:
    """Relative to a part's largest number: FP32's differences, and a spacing where they tip one.

    What is made from the map's system, whose condition is at most 1 + K / ridge, has more of them.
    """
    plain = name.endswith(("sketch", "copy")) or "checkpoint" in name
    bound = KEY_DIM * eps(torch.float32) / 2 * (1 if plain else 1 + KEY_DIM / RIDGE)
    if got.dtype.itemsize == 2:
        bound += eps(got.dtype)
    scale = expected.double().abs().max().clamp_min(1)
    assert bool((got.double() - expected.double()).abs().max() <= bound * scale), name


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda", pytest.param("gla", marks=slow)])
def test_backends_agree_with_sketches_in_fp32(kind: str, tokens: int) -> None:
    """Nothing is rounded: ranks below the pivots, of more than a block, and dense heads."""
    view = view_of(kind, [2, 18, DENSE, 7], dtype=torch.float32)
    compare(caches(kind, tokens, view, window=4), tokens, 6)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("gdn", 1),
        ("mamba2", 3),
        pytest.param("kda", 3, marks=slow),
        pytest.param("gla", 1, marks=slow),
    ],
)
def test_backends_agree_with_exact_maps(kind: str, tokens: int) -> None:
    """Heads of every size that a system is solved in, and a dense one."""
    view = view_of(kind, [2, 18, DENSE, 16], map="exact", dtype=torch.float32)
    compare(caches(kind, tokens, view, window=4), tokens, 6)


@pytest.mark.parametrize(
    ("kind", "tokens", "ranks", "options", "storage"),
    [
        ("gdn", 1, [4, 1, 3, 2], {"dtype": torch.bfloat16}, {"window": 5}),
        ("mamba2", 3, [5, 5, DENSE, DENSE], {"dtype": torch.float16}, {"checkpoint": "fp16"}),
        ("gdn", 1, [3, 17, 4, DENSE], {"map": "offline", "dtype": torch.float16}, {"window": 4}),
        ("mamba2", 1, [3, 17, 4, 1], {"map": "exact"}, {"window": 4}),
        pytest.param("mamba2", 1, [DENSE] * 4, {}, {"window": 4}, marks=slow),
        pytest.param("kda", 1, [6, 2, 9, 1], {}, {"checkpoint": "nvfp4"}, marks=slow),
        pytest.param("kda", 4, [6, 2, DENSE, 1], {}, {"checkpoint": "fp8"}, marks=slow),
    ],
)
def test_backends_agree_with_narrow_sketches(
    kind: str, tokens: int, ranks: list[int], options: Any, storage: dict[str, Any]
) -> None:
    """Sketches in 16 bits: a tipped rounding differs by one spacing."""
    compare(
        caches(kind, tokens, view_of(kind, ranks, **options), **{"window": 4} | storage), tokens, 6
    )


@pytest.mark.parametrize(
    ("window", "kind", "tokens", "dtype", "checkpoint"),
    [
        (16, "gdn", 4, torch.bfloat16, "fp16"),
        (32, "mamba2", 1, torch.bfloat16, "fp16"),
        (64, "mamba2", 4, torch.float16, "fp32"),
        pytest.param(16, "kda", 4, torch.float16, "fp32", marks=slow),
        pytest.param(32, "gdn", 4, torch.float16, "fp16", marks=slow),
        pytest.param(32, "kda", 1, torch.bfloat16, "fp16", marks=slow),
        pytest.param(32, "kda", 4, torch.bfloat16, "fp16", marks=slow),
        pytest.param(64, "gdn", 1, torch.bfloat16, "fp16", marks=slow),
        pytest.param(64, "kda", 4, torch.bfloat16, "fp32", marks=slow),
    ],
)
def test_backends_agree_at_the_windows_that_are_served(
    window: int, kind: str, tokens: int, dtype: torch.dtype, checkpoint: str
) -> None:
    """Full rings, ragged drafts, folds of all their blocks, rounded by the same random bits."""
    view = view_of(kind, [2, 18, DENSE, 7], dtype=dtype)
    both = caches(kind, tokens, view, window=window, checkpoint=checkpoint)
    compare(both, tokens, 4, held=window - 1)


def test_settling_builds_sketches() -> None:
    """A fold without a step builds what the PyTorch backend's does."""
    both = caches("gdn", 1, view_of("gdn", [2, 18, DENSE, 7], dtype=torch.float32), window=4)
    spec, rows = both[0].specs[0], slots(1).to(DEVICE)
    state = torch.randn(1, *spec.state_shape, device=DEVICE)
    inputs: list[list[Any]] = [
        [None if x is None else x.to(DEVICE) for x in draw(spec, 1, 1)[:5]] for _ in range(4)
    ]
    for each, fold in zip(both, (settle, torch_fold), strict=True):
        each.load(rows, [state])
        for x in inputs:
            ticket = each.begin(rows, 1)
            each.step(ticket, 0, *x)
            each.commit(ticket)
        fold(each._pools[0], each.begin(rows, 1)._rows)
    one, other = (each._pools[0].view.tensors() for each in both)
    for name, part in other.items():
        near(name, one[name][1].cpu(), part[1].cpu())


def test_exact_maps_of_large_ranks_are_refused() -> None:
    """Their systems are too large for a program, and the refusal says what is not."""
    spec = layer("gdn", torch.float32, key_dim=72, value_dim=20)
    view = sketch_of([spec], [2, 65, 2, 2], map="exact")
    with pytest.raises(ValueError, match="at most 64 for the backend triton, got 65: take map"):
        StateCache(spec, 1, backend="triton", view=view, device=DEVICE)
