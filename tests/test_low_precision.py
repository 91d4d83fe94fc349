"""Checkpoints and views in small formats: who reads which, what is random, what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import samples
from lazystate import StateCache, count_traffic
from lazystate.formats import CHECKPOINTS, FORMATS, VIEWS

WINDOW = 4
EVERYONE = torch.arange(2)
NARROW = [name for name in CHECKPOINTS if FORMATS[name].narrow]


def started(kind: str, **options: Any) -> StateCache:
    """Two loaded requests of one layer, FP32 activations, K no multiple of any group."""
    spec = samples.layer(kind, torch.float32, key_dim=40)
    cache = StateCache(spec, 2, **{"window": WINDOW} | options)
    cache.load(EVERYONE, [torch.randn(2, *spec.state_shape, generator=seeded(1))])
    return cache


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def decode(cache: StateCache, steps: int, tokens: int = 1, first: int = 0) -> Tensor:
    """Outputs [2, steps * tokens, HV, V] of steps whose inputs are those of their numbers."""
    spec = cache.specs[0]
    outs = []
    for step in range(first, first + steps):
        inputs = samples.draw(spec, 2, tokens, generator=seeded(100 + step))
        outs.append(samples.advance(cache, EVERYONE, inputs))
    return torch.cat(outs, 1)


def spoil(cache: StateCache, part: str) -> None:
    """NaN in every request's checkpoint or view."""
    exported = cache.export(EVERYONE)
    for name, tensor in exported.items():
        if name.startswith(f"0.{part}"):
            tensor.copy_(torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else torch.nan))
    cache.import_(EVERYONE, exported)


def parts(cache: StateCache, part: str) -> dict[str, Tensor]:
    """Bytes of all checkpoints or views."""
    named = cache.export(EVERYONE).items()
    return {name: x.view(torch.uint8) for name, x in named if name.startswith(f"0.{part}")}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise equality."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", samples.KINDS)
def test_a_step_reads_the_view_and_a_folding_step_the_checkpoint(kind: str, view: str) -> None:
    """With NaN in the checkpoint a step is finite, and with NaN in the view a folding step is."""
    for part, held in (("checkpoint", WINDOW - 1), ("view", WINDOW)):
        cache, clean = (started(kind, checkpoint="fp32", view=view) for _ in range(2))
        for each in (cache, clean):
            decode(each, held)
        spoil(cache, part)
        out = decode(cache, 1, first=held)
        assert torch.equal(out, decode(clean, 1, first=held))
        assert out.isfinite().all()


@pytest.mark.parametrize("kind", samples.KINDS)
def test_nothing_of_the_view_enters_the_checkpoint(kind: str) -> None:
    """Whatever the view's format, and with NaN in it, checkpoints and states are the same bits."""
    caches = [started(kind, checkpoint="fp16", view=view) for view in (None, "int2", "fp8", "fp8")]
    spoil(caches[-1], "view")
    for cache in caches:
        decode(cache, 3 * WINDOW + 2)
    plain, *others = caches
    for cache in others:
        assert same(parts(cache, "checkpoint"), parts(plain, "checkpoint"))
        assert torch.equal(cache.materialize(EVERYONE)[0], plain.materialize(EVERYONE)[0])


@pytest.mark.parametrize("view", VIEWS)
def test_view_and_checkpoint_come_from_one_value(view: str) -> None:
    """The view is the exact state rounded to nearest, not a cast of the rounded checkpoint."""
    (state,) = started("mamba2").materialize(EVERYONE)
    stored = started("mamba2", checkpoint="nvfp4", view=view).export(EVERYONE)
    for part, expected in FORMATS[view].encode(state).items():
        assert torch.equal(stored["0.view" + ("" if part == "elements" else f".{part}")], expected)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", samples.KINDS)
def test_a_view_costs_its_rounding_and_no_more(kind: str, view: str) -> None:
    """Outputs stay within the view's own rounding of the exact ones, however long one decodes."""
    exact, cache = started(kind), started(kind, view=view)
    state = exact.materialize(EVERYONE)[0]
    form = FORMATS[view]
    back = form.decode(form.encode(state), 40)
    rounding = float((back - state).abs().max() / state.abs().max())
    error = (decode(cache, 40) - decode(exact, 40)).abs()
    # Of K products each is off by at most the rounding; with erase so are the window's corrections.
    assert float(error.max()) <= rounding * float(state.abs().max()) * 40**0.5 * 8 + 1e-4
    assert float(error[:, 20:].max()) <= 3 * float(error[:, :20].max()) + 1e-4


@pytest.mark.parametrize("checkpoint", NARROW)
def test_rounding_is_a_function_of_seed_and_slot(checkpoint: str) -> None:
    """The same program gives the same bits, another seed or slot others, nearest is its own."""
    one, two = (started("gdn", checkpoint=checkpoint, seed=5) for _ in range(2))
    assert torch.equal(decode(one, 30), decode(two, 30))
    assert same(parts(one, "checkpoint"), parts(two, "checkpoint"))
    other = started("gdn", checkpoint=checkpoint, seed=6)
    nearest = started("gdn", checkpoint=checkpoint, rounding="nearest")
    for cache in (other, nearest):
        decode(cache, 30)
        assert not same(parts(cache, "checkpoint"), parts(one, "checkpoint"))
    state = torch.randn(1, *one.specs[0].state_shape).expand(2, -1, -1, -1)
    one.load(EVERYONE, [state])
    elements = one.export(EVERYONE)["0.checkpoint"]
    assert not torch.equal(elements[0], elements[1])


def test_every_write_draws_anew() -> None:
    """A state loaded twice is rounded otherwise the second time, and as at first after a reset."""
    cache = started("gdn", checkpoint="fp8")
    state = [torch.randn(2, *cache.specs[0].state_shape)]
    seen = []
    for reset in (True, False, True):
        if reset:
            cache.reset(EVERYONE)
        cache.load(EVERYONE, state)
        seen.append(parts(cache, "checkpoint"))
    assert not same(seen[0], seen[1])
    assert same(seen[0], seen[2])


def test_layers_draw_their_own_bits() -> None:
    """Two layers round the same state differently."""
    spec = samples.layer("mamba2", torch.float32)
    cache = StateCache([spec, spec], 1, checkpoint="fp16")
    state = torch.randn(1, *spec.state_shape)
    cache.load(samples.slots(0), [state, state])
    exported = cache.export(samples.slots(0))
    assert not torch.equal(exported["0.checkpoint"], exported["1.checkpoint"])


def test_a_stochastic_checkpoint_does_not_drift() -> None:
    """Over many seeds the mean state is the exact one; rounded to nearest it is not.

    A weak constant drive on a slowly decaying state: each window adds less than half a spacing.
    """
    spec = samples.layer("lightning", torch.float32, heads=1, key_heads=1, key_dim=8, value_dim=8)
    states, slots = {}, 256
    for storage in ("fp32", "nearest", "stochastic"):
        options = {} if storage == "fp32" else {"checkpoint": "bf16", "rounding": storage}
        cache = StateCache(spec, slots, window=1, **options)
        rows = torch.arange(slots)
        cache.load(rows, [torch.ones(slots, *spec.state_shape)])
        small = torch.full((slots, 1, 1, 8), 0.03)
        decay = torch.zeros(slots, 1, 1)
        for _ in range(100):
            ticket = cache.begin(rows)
            cache.step(ticket, 0, small, small, small, decay)
            cache.commit(ticket)
        states[storage] = cache.materialize(rows)[0]
    moved = float((states["fp32"] - 1).mean())
    assert moved > 0.08
    assert float((states["nearest"] - 1).abs().max()) < 0.1 * moved
    error = (states["stochastic"] - states["fp32"]).mean(0)
    spread = states["stochastic"].std(0) / slots**0.5
    assert float((error / spread).abs().max()) < 4.5


@pytest.mark.parametrize("view", [None, "nvfp4"])
@pytest.mark.parametrize("checkpoint", ["fp16", "fp8", "nvfp4"])
def test_a_row_does_not_depend_on_its_batch(checkpoint: str, view: str | None) -> None:
    """Alone or beside a row that folds at another time, a row gives the same bits."""
    for kind in ("mamba2", "gdn", "kda"):
        spec = samples.layer(kind, torch.float32, key_dim=40)
        outs = []
        for rows in (samples.slots(1), samples.slots(0, 1)):
            cache = StateCache(spec, 2, window=WINDOW, checkpoint=checkpoint, view=view)
            state = torch.randn(2, *spec.state_shape, generator=seeded(2))
            cache.load(EVERYONE, [state], phase=torch.tensor([2, 0]))
            out = []
            for step in range(11):
                inputs = samples.draw(spec, 2, 1, generator=seeded(step))
                own = samples.rows_of(inputs, rows)
                out.append(samples.advance(cache, rows, own)[-1])
            outs.append(torch.stack(out))
        assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("kind", samples.KINDS)
def test_a_fresh_slot_reads_neither(kind: str) -> None:
    """Until the first fold checkpoint and view hold whatever was there, which decodes to NaN."""
    spec = samples.layer(kind, torch.float32)
    cache = StateCache(spec, 1, window=3, checkpoint="nvfp4", view="fp8")
    for _ in range(5):
        out = samples.advance(cache, samples.slots(0), samples.draw(spec, 1, 1))
        assert out.isfinite().all()
        assert cache.materialize(samples.slots(0))[0].isfinite().all()


def test_requests_move_with_all_they_hold(tmp_path: Path) -> None:
    """copy, and export through a file to another cache, carry every part: both go on alike."""
    cache = started("kda", checkpoint="nvfp4", view="int4")
    decode(cache, 6)
    save_file(cache.export(EVERYONE), tmp_path / "requests.safetensors")
    other = StateCache(cache.specs, 2, window=WINDOW, checkpoint="nvfp4", view="int4")
    other.import_(EVERYONE, load_file(tmp_path / "requests.safetensors"))
    assert torch.equal(decode(other, 9, first=6), decode(cache, 9, first=6))
    cache.copy(samples.slots(0), samples.slots(1))
    exported = cache.export(EVERYONE)
    assert all(torch.equal(x[0], x[1]) for x in exported.values() if not x.is_floating_point())
    fewer = StateCache(cache.specs, 2, window=WINDOW, checkpoint="nvfp4")
    with pytest.raises(ValueError, match="formats"):
        fewer.import_(EVERYONE, exported)


@pytest.mark.parametrize("view", [None, *VIEWS])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS[1:])
def test_bytes_counted_are_bytes_stored(checkpoint: str, view: str | None) -> None:
    """A window reads the view and once the checkpoint, and writes both once; memory has both."""
    options = {"checkpoint": checkpoint, "view": view}
    cache, smallest = started("mamba2", **options), started("mamba2", checkpoint="fp32")
    heads, value_dim, key_dim = cache.specs[0].state_shape
    stored = heads * FORMATS[checkpoint].nbytes(value_dim, key_dim)
    copy = stored if view is None else heads * FORMATS[view].nbytes(value_dim, key_dim)
    base = heads * value_dim * key_dim * 4
    more = 0 if view is None else copy
    assert cache.nbytes_per_slot - smallest.nbytes_per_slot == stored + more - base
    for each in (cache, smallest):
        decode(each, WINDOW)
    with count_traffic() as moved:
        decode(cache, WINDOW, first=WINDOW)
    with count_traffic() as full:
        decode(smallest, WINDOW, first=WINDOW)
    assert moved.read - full.read == 2 * ((WINDOW - 1) * copy + stored - WINDOW * base)
    assert moved.written - full.written == 2 * (stored + more - base)


REFUSED = {
    "checkpoint must be one of": {"checkpoint": "int8"},
    "view must be one of": {"view": "fp6"},
    "rounding must be": {"rounding": "up"},
    "seed must be 0 to": {"seed": -1},
    "seed must be an int": {"seed": 1.5},
    "fold must be 'raw' with a view": {"view": "fp8", "fold": "cached"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_arguments_are_named(message: str) -> None:
    """One error, which says what would work."""
    with pytest.raises(ValueError, match=message):
        StateCache(samples.layer("gdn"), 1, **REFUSED[message])


def test_triton_refuses_what_it_has_no_kernels_for() -> None:
    """One error, instead of something else than was asked for."""
    spec = samples.layer("mamba2", torch.float32)
    with pytest.raises(ValueError, match="checkpoint fp64 needs backend='torch'"):
        StateCache(spec, 1, backend="triton", checkpoint="fp64")
