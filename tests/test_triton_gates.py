"""Gates fused into the kernels: raw inputs give what PyTorch's prologue and step give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lazystate import LayerSpec, StateCache
from lazystate.gates import KINDS, Raw
from lazystate.ops.triton.plain import plain_step
from samples import draw_raw, layer, slots
from tolerance import eps, error
from tolerance import outputs as output_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
WINDOW, STEPS = 4, 6
ROWS, LENGTHS = slots(2, -1, 0), slots(3, 2, 1)
ACTIVATIONS = [torch.float32, torch.float16, torch.bfloat16]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {"dt_limit": (0.01, 1.5)}),
    "mamba2, no bias": ("mamba2", {"dt_bias": None}),
    "gdn": ("gdn", {"beta_scale": 2.0, "scale": 0.5}),
    "kda_softplus": ("kda_softplus", {"eps": 1e-5}),
    "kda_softplus, no bias": ("kda_softplus", {"dt_bias": None}),
    "kda_bounded": ("kda_bounded", {"lower_bound": -5.0}),
}
assert {kind for kind, _ in WAYS.values()} == set(KINDS)


def spec_of(kind: str, activation: torch.dtype) -> LayerSpec:
    """A layer of a prologue's kind whose V fills two tiles, the second in part."""
    return layer(kind.split("_")[0], activation, key_dim=24, value_dim=20)


def there(raw: Raw) -> Raw:
    """The same on the device that kernels run on."""
    tensors = (x if x is None else x.to(DEVICE) for x in raw[:-1])
    weights = {
        name: None if x is None else x.to(DEVICE)
        for name, x in (("A_log", raw.prologue.A_log), ("dt_bias", raw.prologue.dt_bias))
    }
    return Raw(*tensors, replace(raw.prologue, **weights))


def cache_of(spec: LayerSpec, backend: str, fold: str = "raw") -> StateCache:
    """A cache with nothing loaded."""
    return StateCache(
        spec, 4, window=WINDOW, max_tokens=3, fold=fold, device=DEVICE, backend=backend
    )


def run(cache: StateCache, steps: list[Raw], *, prepared: bool = False) -> list[torch.Tensor]:
    """Outputs of ragged steps, from raw inputs or from those that PyTorch prepares."""
    outs = []
    for raw in steps:
        tokens = raw.q.shape[1]
        ticket = cache.begin(ROWS.to(DEVICE), tokens, LENGTHS.clamp(max=tokens).to(DEVICE))
        outs.append(cache.step(ticket, 0, *(raw.prepared() if prepared else raw)))
        cache.commit(ticket)
    return outs


def records(cache: StateCache) -> dict[str, torch.Tensor]:
    """Ring positions that the slot without rejected drafts has written, by name."""
    return {name: x[2, :2] for name, x in cache._pools[0].ring.tensors().items()}


def bound(spec: LayerSpec) -> float:
    """Two backends' outputs: arithmetic, and gates of a few FP32 roundings each on every token.

    Norms whose last FP32 bit differs can round q and k to neighbours in a narrow activation.
    """
    gates = 16 * eps(torch.float32) * STEPS * 3
    keys = 2 * eps(spec.activation) if spec.erase and spec.activation.itemsize < 4 else 0.0
    return 2 * output_bound(spec, WINDOW, torch.float32, STEPS) + gates + keys * WINDOW


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_raw_inputs_give_the_prepared_result(way: str, tokens: int) -> None:
    """FP32, packed q, k and v, over folds: Triton from raw inputs against PyTorch prepared."""
    kind, options = WAYS[way]
    spec = spec_of(kind, torch.float32)
    steps = [there(draw_raw(kind, spec, 3, tokens, packed=True, **options)) for _ in range(STEPS)]
    skip = torch.randn(spec.heads, device=DEVICE)
    steps = [raw._replace(skip=skip) for raw in steps]
    ours, theirs = cache_of(spec, "triton"), cache_of(spec, "torch")
    for out, expected in zip(run(ours, steps), run(theirs, steps, prepared=True), strict=True):
        assert error(out, expected) <= bound(spec)
        assert not out[1].any(), "a padded row is zero"
    other = records(theirs)
    for name, x in records(ours).items():
        assert error(x, other[name]) <= bound(spec), name


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_activations(kind: str, activation: torch.dtype) -> None:
    """Gates stay FP32 and keys are rounded once, whatever the activations are."""
    options = {"lower_bound": -5.0} if kind == "kda_bounded" else {}
    spec = spec_of(kind, activation)
    steps = [there(draw_raw(kind, spec, 3, 1, **options)) for _ in range(STEPS)]
    ours, theirs = cache_of(spec, "triton"), cache_of(spec, "torch")
    for out, expected in zip(run(ours, steps), run(theirs, steps, prepared=True), strict=True):
        assert error(out, expected) <= bound(spec)
    gates = 16 * eps(torch.float32)
    allowed = {"k": eps(activation), "v": 0.0, "log_decay": 8 * gates, "beta": gates}
    other = records(theirs)
    for name, x in records(ours).items():
        assert error(x, other[name]) <= allowed.get(name, bound(spec)), name


@pytest.mark.parametrize("way", WAYS)
def test_the_conventional_step_takes_raw_inputs(way: str) -> None:
    """Its outputs and states are those of prepared inputs."""
    kind, options = WAYS[way]
    spec = spec_of(kind, torch.float32)
    raw = there(draw_raw(kind, spec, 2, 1, packed=True, **options))
    rows = slots(1, 0).to(DEVICE)
    made = raw.prepared()
    states = torch.randn(2, *spec.state_shape, device=DEVICE)
    pools = states.clone(), states.clone()
    tile = {"block_v": 16, "warps": 1}
    skip = torch.randn(spec.heads, device=DEVICE)
    fused = plain_step(spec, pools[0], rows, rows, *raw[:5], skip, raw.prologue, **tile)
    apart = plain_step(spec, pools[1], rows, rows, *made[:5], skip, **tile)
    assert error(fused, apart) <= bound(spec)
    assert error(pools[0], pools[1]) <= bound(spec)
    assert not torch.equal(pools[0], states)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_raw_inputs(kind: str) -> None:
    """Raw gates of +-1000 and zero keys give finite results, the same as PyTorch's."""
    options = {"lower_bound": -5.0} if kind == "kda_bounded" else {}
    spec = spec_of(kind, torch.float32)
    steps = []
    for value in (-1000.0, 1000.0, 0.0):
        raw = draw_raw(kind, spec, 3, 1, **options)
        b = None if raw.b is None else torch.full_like(raw.b, value)
        gate = torch.full_like(raw.gate, value if kind != "mamba2" else min(value, 10.0))
        k = torch.zeros_like(raw.k) if value == 0 else raw.k
        steps.append(there(raw._replace(gate=gate, b=b, k=k)))
    ours, theirs = cache_of(spec, "triton"), cache_of(spec, "torch")
    for out, expected in zip(run(ours, steps), run(theirs, steps, prepared=True), strict=True):
        assert error(out, expected) <= bound(spec)
