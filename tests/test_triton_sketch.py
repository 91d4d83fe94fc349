"""Sketches in the kernels: read, verified and built as the PyTorch backend does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lazystate import StateCache
from lazystate.ops.torch.fold import fold as torch_fold
from lazystate.ops.triton.settle import settle
from samples import draw, layer, slots
from test_sketch_cache import sketch_of
from tolerance import eps, error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DENSE = 0
slow = pytest.mark.slow


def caches(kind: str, tokens: int, view: Any, **options: Any) -> list[StateCache]:
    """The same cache by both backends."""
    spec = layer(kind, torch.float32, key_dim=24, value_dim=20)
    return [
        StateCache(spec, 3, max_tokens=tokens, device=DEVICE, backend=name, view=view, **options)
        for name in ("triton", "torch")
    ]


def view_of(kind: str, ranks: list[int], **options: Any) -> Any:
    """A sketch for `caches`, with a metric where the map needs one."""
    spec = layer(kind, torch.float32, key_dim=24, value_dim=20)
    if options.get("map") == "offline":
        root = torch.randn(1, 4, 24, 24, dtype=torch.float64)
        options["metric"] = root @ root.mT
    return sketch_of([spec], ranks, **options)


def compare(both: list[StateCache], tokens: int, steps: int, bound: float, stored: float) -> None:
    """Ragged drafts, padding and a reset by both; the second then goes on from the first's bytes.

    bound: of outputs. stored: of what folds build, relative to the largest number of a part.
    """
    spec = both[0].specs[0]
    rows = slots(2, -1, 0).to(DEVICE)
    state = torch.randn(1, *spec.state_shape)
    for each in both:
        each.load(slots(2).to(DEVICE), [state])
    folded = False
    for number in range(steps):
        inputs: list[Any] = [None if x is None else x.to(DEVICE) for x in draw(spec, 3, tokens)[:5]]
        if number == 2:
            inputs[3][0, 0] = -float("inf")
        outputs, exported = [], []
        for each in both:
            ticket = each.begin(rows, tokens)
            outputs.append(each.step(ticket, 0, *inputs))
            each.commit(ticket, slots(1, 0, tokens).to(DEVICE))
            exported.append(each.export(slots(2, 0).to(DEVICE)))
        assert error(*outputs) <= bound
        live = ~exported[0]["cursors.empty"].cpu()
        folded |= bool(live.all())
        for name, part in exported[1].items():
            if name.startswith("0.view."):
                _near(name, exported[0][name].cpu()[live], part.cpu()[live], stored)
        both[1].import_(slots(2, 0).to(DEVICE), exported[0])
    assert folded


def _near(name: str, got: Tensor, expected: Tensor, bound: float) -> None:
    scale = expected.double().abs().max().clamp_min(1)
    assert bool((got.double() - expected.double()).abs().max() <= bound * scale), name


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda", pytest.param("gla", marks=slow)])
def test_backends_agree_with_sketches_in_fp32(kind: str, tokens: int) -> None:
    """Nothing is rounded: ranks below the pivots, of more than a block, and dense heads.

    A head's small factors solve a system whose condition is at most 1 + K / ridge.
    """
    view = view_of(kind, [2, 18, DENSE, 7], dtype=torch.float32)
    both = caches(kind, tokens, view, window=4)
    bound = 24 * 2.0**-24 * (1 + 24 / 0.003)
    compare(both, tokens, 6, 1e-2 * bound, bound)


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
    bound = 24 * 2.0**-24 * (1 + 24 / 0.003)
    compare(caches(kind, tokens, view, window=4), tokens, 6, 1e-2 * bound, bound)


@pytest.mark.parametrize(
    ("kind", "tokens", "ranks", "options", "storage"),
    [
        ("gdn", 1, [4, 1, 3, 2], {"dtype": torch.bfloat16}, {"window": 5}),
        ("mamba2", 3, [5, 5, DENSE, DENSE], {"dtype": torch.float16}, {"checkpoint": "fp16"}),
        ("gdn", 1, [3, 17, 4, DENSE], {"map": "offline", "dtype": torch.float16}, {"window": 4}),
        pytest.param("mamba2", 1, [DENSE] * 4, {}, {"window": 4}, marks=slow),
        pytest.param("kda", 1, [6, 2, 9, 1], {}, {"checkpoint": "nvfp4"}, marks=slow),
        pytest.param("kda", 4, [6, 2, DENSE, 1], {}, {"checkpoint": "fp8"}, marks=slow),
    ],
)
def test_backends_agree_with_narrow_sketches(
    kind: str, tokens: int, ranks: list[int], options: Any, storage: dict[str, Any]
) -> None:
    """Sketches in 16 bits: a tipped rounding differs by one spacing."""
    view = view_of(kind, ranks, **options)
    both = caches(kind, tokens, view, **{"window": 4} | storage)
    spacing = eps(view.dtype)
    compare(both, tokens, 6, 1e-5, spacing)


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
        _near(name, one[name][1].cpu(), part[1].cpu(), 24 * 2.0**-24 * (1 + 24 / 0.003))


def test_exact_maps_of_large_ranks_are_refused() -> None:
    """Their systems are too large for a program, and the refusal says what is not."""
    spec = layer("gdn", torch.float32, key_dim=72, value_dim=20)
    view = sketch_of([spec], [2, 65, 2, 2], map="exact")
    with pytest.raises(ValueError, match="at most 64 for the backend triton, got 65: take map"):
        StateCache(spec, 1, backend="triton", view=view, device=DEVICE)
