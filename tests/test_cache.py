"""StateCache as an object: what it holds, what it hands over, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import samples
import tolerance
from lazystate import LayerSpec, StateCache
from lazystate.cache import StepError
from lazystate.sketch.view import Sketch

SPEC = samples.layer("gdn", torch.float32, conv_channels=6, conv_width=4)


def mid_window(specs: list[LayerSpec], slots: int = 3, **options: Any) -> StateCache:
    """A cache in use: some windows folded, some records held, rings wrapped."""
    cache = StateCache(specs, slots, **{"window": 5, "max_tokens": 2} | options)
    for step in range(9):
        advance(cache, torch.arange(slots), seed=step)
    return cache


def advance(cache: StateCache, rows: Tensor, seed: int, tokens: int = 2) -> list[Tensor]:
    """One model step over all layers with inputs of a seed: the layers' outputs."""
    generator = torch.Generator().manual_seed(seed)
    ticket = cache.begin(rows, tokens)
    outs = []
    for index, spec in enumerate(cache.specs):
        if spec.conv_channels:
            shape = (len(rows), tokens, spec.conv_channels)
            x = torch.randn(shape, generator=generator).to(spec.activation)
            outs.append(cache.convolve(ticket, index, x, torch.ones(6, spec.conv_width)))
        inputs = samples.draw(spec, len(rows), tokens, generator=generator)
        outs.append(cache.step(ticket, index, *inputs))
    cache.commit(ticket)
    return outs


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bitwise equality of two lists."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


HYBRID = [SPEC, samples.layer("mamba2", torch.bfloat16), samples.layer("kda", torch.float16)]


def test_layers_of_different_kinds_share_a_cache() -> None:
    """A hybrid's layers differ in kind, dtype and convolution; each gives what it gives alone."""
    together = mid_window(HYBRID)
    for index, spec in enumerate(HYBRID):
        alone = StateCache(spec, 3, window=5, max_tokens=2)
        for step in range(9):
            generator = torch.Generator().manual_seed(step)
            ticket = alone.begin(torch.arange(3), 2)
            for earlier in HYBRID[: index + 1]:
                if earlier.conv_channels:
                    x = torch.randn(3, 2, 6, generator=generator)
                    if earlier is spec:
                        alone.convolve(ticket, 0, x, torch.ones(6, 4))
                inputs = samples.draw(earlier, 3, 2, generator=generator)
            alone.step(ticket, 0, *inputs)
            alone.commit(ticket)
        expected = together.materialize(torch.arange(3))[index]
        assert torch.equal(alone.materialize(torch.arange(3))[0], expected)


def test_bytes_are_those_allocated() -> None:
    """nbytes is the sum by hand of what the specs ask for."""
    window, most, slots = 5, 2, 3
    ring = window + most
    gdn, mamba2, kda = HYBRID
    heads, state = 4, 4 * 5 * 8
    expected = slots * (4 * 8 + 1)  # origin, filled, limit, writes and empty
    expected += slots * (state * 4 + ring * 4 * (2 * 8 + heads + 2 * heads * 5 + heads))
    expected += slots * gdn.conv_channels * (gdn.conv_width - 1 + most) * 4
    expected += slots * (state * 4 + ring * (2 * 8 * 2 + heads * 4 + heads * 5 * 2 + heads * 4))
    expected += slots * (state * 4 + ring * (4 * 8 * 2 + 4 * 8 * 4 + 2 * heads * 5 * 2 + heads * 4))
    cache = StateCache([gdn, mamba2, kda], slots, window=window, max_tokens=most)
    assert cache.nbytes == expected
    assert cache.nbytes_per_slot == expected // slots
    exported = cache.export(torch.arange(slots))
    assert sum(x.nbytes for name, x in exported.items() if name != "layout") == expected


def test_materialize_changes_nothing() -> None:
    """Reading states, twice and for repeated slots, leaves the next step's bits alone."""
    read, unread = mid_window(HYBRID), mid_window(HYBRID)
    first = read.materialize(samples.slots(2, 0, 2))
    assert same(first, read.materialize(samples.slots(2, 0, 2)))
    assert all(torch.equal(x[0], x[2]) for x in first)
    read.conv_history(samples.slots(1, 1))
    assert same(advance(read, torch.arange(3), 50), advance(unread, torch.arange(3), 50))


def test_a_loaded_state_comes_back() -> None:
    """load then materialize is the cast to the checkpoint's dtype, rounded to nearest."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cache = StateCache(HYBRID[1:], 3, checkpoint=dtype, rounding="nearest")
        states = [torch.randn(2, *spec.state_shape) for spec in cache.specs]
        cache.load(samples.slots(2, 0), states)
        back = cache.materialize(samples.slots(2, 0))
        assert same(back, [x.to(dtype).float() for x in states])


def test_a_materialized_state_continues_elsewhere() -> None:
    """materialize and conv_history, loaded into another layout, continue the same stream."""
    specs = [samples.layer("gdn", conv_channels=6, conv_width=4), samples.layer("kda")]
    here = mid_window(specs, checkpoint=torch.float64)
    there = StateCache(specs, 7, window=3, max_tokens=3, checkpoint=torch.float64)
    everyone = torch.arange(3)
    there.load(everyone + 4, here.materialize(everyone), here.conv_history(everyone))
    for seed in range(20, 30):
        outs = advance(here, everyone, seed), advance(there, everyone + 4, seed)
        for a, b in zip(*outs, strict=True):
            assert tolerance.error(a, b) <= tolerance.EXACT


@pytest.mark.parametrize("fold", ["raw", "cached"])
def test_an_export_continues_in_another_slot_and_cache(fold: str) -> None:
    """Mid-window, into other slots of another cache: every later bit is the same."""
    here = mid_window(HYBRID, fold=fold)
    there = mid_window(HYBRID, slots=5, fold=fold)
    there.import_(samples.slots(4, 1, 0), here.export(torch.arange(3)))
    for seed in range(20, 28):
        order = samples.slots(4, 1, 0)
        assert same(advance(here, torch.arange(3), seed), advance(there, order, seed))


def test_a_copy_is_independent() -> None:
    """A copy gives the original's bits, then goes its own way."""
    cache = mid_window(HYBRID)
    cache.copy(samples.slots(0, 0), samples.slots(1, 2))
    outs = advance(cache, torch.arange(3), 60)
    states = cache.materialize(torch.arange(3))
    assert not any(torch.equal(x[0], x[1]) for x in states)
    cache.copy(samples.slots(0), samples.slots(1))
    for a in cache.materialize(samples.slots(0, 1)):
        assert torch.equal(a[0], a[1])
    assert all(out.isfinite().all() for out in outs)


@pytest.mark.parametrize("options", [{}, {"checkpoint": "fp16", "view": "nvfp4", "seed": 3}])
@pytest.mark.parametrize("taken", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_cache_can_be_pickled_and_copied(taken: Callable[..., Any], options: dict) -> None:
    """What comes back gives the same bits, random ones of rounding included, and is another's."""
    cache, twin = mid_window(HYBRID, **options), mid_window(HYBRID, **options)
    back = taken(cache)
    back = pickle.loads(back) if isinstance(back, bytes) else back
    advance(cache, torch.arange(3), 40)
    for seed in range(50, 58):
        assert same(advance(back, torch.arange(3), seed), advance(twin, torch.arange(3), seed))


def test_a_sketched_cache_can_be_pickled() -> None:
    """Its sketch goes with it."""
    spec = samples.layer("gdn", torch.float32)
    omega = torch.linalg.qr(torch.randn(1, 4, 8, 3)).Q
    cache = StateCache(spec, 2, view=Sketch(omega, torch.tensor([[1, 2, 3, 0]])), window=4)
    for seed in range(6):
        advance(cache, torch.arange(2), seed, tokens=1)
    back = pickle.loads(pickle.dumps(cache))
    for seed in range(10, 16):
        outs = (advance(each, torch.arange(2), seed, tokens=1) for each in (cache, back))
        assert same(*outs)


def test_a_cache_with_an_open_step_is_not_pickled() -> None:
    """Half a step cannot be taken up elsewhere."""
    cache = mid_window(HYBRID)
    ticket = cache.begin(one(0))
    with pytest.raises(StepError, match="pickle while a step is open"):
        pickle.dumps(cache)
    cache.discard(ticket)
    assert pickle.loads(pickle.dumps(cache)).nbytes == cache.nbytes


def test_copy_can_permute() -> None:
    """Overlapping source and target: all slots are read before one is written."""
    cache = mid_window(HYBRID)
    before = cache.export(torch.arange(3))
    cache.copy(samples.slots(0, 1, 2), samples.slots(1, 2, 0))
    after = cache.export(samples.slots(1, 2, 0))
    for name, tensor in before.items():
        raw = tensor.contiguous().view(torch.uint8), after[name].contiguous().view(torch.uint8)
        assert torch.equal(*raw), name


def test_a_reset_slot_is_a_fresh_one() -> None:
    """After reset a used slot gives the bits of a slot never used."""
    used, fresh = mid_window(HYBRID), StateCache(HYBRID, 3, window=5, max_tokens=2)
    used.reset(torch.arange(3))
    for seed in range(6):
        assert same(advance(used, torch.arange(3), seed), advance(fresh, torch.arange(3), seed))


OTHERS: dict[str, dict[str, Any]] = {
    "window": {"window": 6},
    "max_tokens": {"max_tokens": 3},
    "same ring": {"window": 4, "max_tokens": 3},
    "checkpoint": {"checkpoint": torch.bfloat16},
    "fold": {"fold": "cached"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_export_of_another_layout_is_refused(other: str) -> None:
    """A cache built otherwise refuses, names what differs, and keeps its slots."""
    specs = [samples.layer("gdn", torch.float32)]
    exported = mid_window(specs, **OTHERS[other]).export(torch.arange(3))
    cache = mid_window(specs)
    before = cache.materialize(torch.arange(3))
    with pytest.raises(ValueError, match="exported"):
        cache.import_(torch.arange(3), exported)
    assert same(before, cache.materialize(torch.arange(3)))


def test_an_export_of_other_layers_is_refused() -> None:
    """So is an export of other specs, or of another number of slots."""
    cache = mid_window([samples.layer("gdn", torch.float32)])
    for kind in ("mamba2", "kda"):
        exported = mid_window([samples.layer(kind, torch.float32)]).export(torch.arange(3))
        with pytest.raises(ValueError, match="exported"):
            cache.import_(torch.arange(3), exported)
    with pytest.raises(ValueError, match="exported"):
        cache.import_(torch.arange(2), cache.export(torch.arange(3)))


DAMAGED: dict[str, tuple[str, Any]] = {
    "negative origin": ("origin", -1),
    "negative filled": ("filled", -1),
    "more records than the window": ("filled", 6),
    "limit below a step": ("limit", 1),
    "limit above the window": ("limit", 6),
    "negative writes": ("writes", -1),
    "folded and empty": ("empty", True),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_cursors_are_refused(damage: str) -> None:
    """Cursors that no cache leaves behind are named, and nothing is imported."""
    name, value = DAMAGED[damage]
    cache = mid_window(HYBRID)
    exported = cache.export(torch.arange(3))
    exported[f"cursors.{name}"][1] = value
    named = "origin" if name == "empty" else name
    with pytest.raises(ValueError, match=rf"^exported\['cursors.{named}'\] is damaged.*place 1"):
        cache.import_(torch.arange(3), exported)
    twin = mid_window(HYBRID)
    assert same(advance(cache, torch.arange(3), 70), advance(twin, torch.arange(3), 70))


@pytest.mark.parametrize("phase", [0, 3])
def test_all_honest_cursors_are_taken(phase: int) -> None:
    """At every moment of two windows, staggered or not, an export is taken again."""
    spec = samples.layer("gdn", torch.float32)
    cache = StateCache(spec, 2, window=5, max_tokens=2)
    there = StateCache(spec, 2, window=5, max_tokens=2)
    cache.load(one(1), [torch.ones(1, *spec.state_shape)], phase=torch.tensor([phase]))
    for seed in range(12):
        there.import_(one(1, 0), cache.export(one(0, 1)))
        advance(cache, torch.arange(2), seed, tokens=1 + seed % 2)


def one(*numbers: int) -> Tensor:
    """Short for slots."""
    return samples.slots(*numbers)


# What each mistake must say: the argument first, then what was given.
SIZES: dict[str, dict[str, Any]] = {
    "specs must hold at least one": {"specs": []},
    "slots must be at least 1, got 0": {"slots": 0},
    "window must be at least 1, got 0": {"window": 0},
    "max_tokens must be 1 to window (4), got 5": {"window": 4, "max_tokens": 5},
    "max_tokens must be 1 to window (4), got 0": {"window": 4, "max_tokens": 0},
    "checkpoint must be one of": {"checkpoint": torch.int8},
    "fold must be 'raw' or 'cached', got 'exact'": {"fold": "exact"},
    "backend must be 'auto', 'torch' or 'triton', got 'jax'": {"backend": "jax"},
}


@pytest.mark.parametrize("message", SIZES)
def test_wrong_sizes_are_named(message: str) -> None:
    """The constructor names the argument, what was given and what is accepted."""
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        StateCache(**{"specs": [SPEC], "slots": 2} | SIZES[message])


CALLS: dict[str, Callable[[StateCache], Any]] = {
    "slots must be below 3, got 3": lambda c: c.begin(one(0, 3)),
    "slots must be distinct": lambda c: c.begin(one(1, 1)),
    "slots must be a one-dimensional": lambda c: c.begin(torch.tensor(1)),
    "slots must be a one-dimensional int32": lambda c: c.begin(torch.tensor([1.0])),
    "tokens must be 1 to max_tokens (2), got 3": lambda c: c.begin(one(0), 3),
    "tokens must be 1 to max_tokens (2), got 0": lambda c: c.begin(one(0), 0),
    "lengths must be 0 to 2, got [3]": lambda c: c.begin(one(0), 2, torch.tensor([3])),
    "lengths must be an int32 or int64": lambda c: c.begin(one(0), 2, torch.tensor([1, 1])),
    "slots must be 0 to 2, got -1": lambda c: c.reset(one(-1)),
    "slots must be 0 to 2, got -2": lambda c: c.materialize(one(0, -2)),
    "target must have as many": lambda c: c.copy(one(0, 1), one(2)),
    "states must have one entry for each of 1 layers, got 0": lambda c: c.load(one(0), []),
    "states must have shape [1, 4, 5, 8], got [1, 4, 8, 5]": lambda c: c.load(
        one(0), [torch.zeros(1, 4, 8, 5)]
    ),
    "conv must have one entry": lambda c: c.load(one(0), [torch.zeros(1, 4, 5, 8)], []),
    "conv must have shape [1, 6, 3]": lambda c: c.load(
        one(0), [torch.zeros(1, 4, 5, 8)], [torch.zeros(1, 3, 6)]
    ),
    "conv must be torch.float32": lambda c: c.load(
        one(0), [torch.zeros(1, 4, 5, 8)], [torch.zeros(1, 6, 3).double()]
    ),
    "phase must be 0 to 3, got [4]": lambda c: c.load(
        one(0), [torch.zeros(1, 4, 5, 8)], phase=torch.tensor([4])
    ),
}


@pytest.mark.parametrize("message", CALLS)
def test_wrong_calls_are_named_and_change_nothing(message: str) -> None:
    """One error that begins with the argument; the cache is as before and can go on."""
    cache, twin = mid_window([SPEC]), mid_window([SPEC])
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        CALLS[message](cache)
    assert same(advance(cache, torch.arange(3), 70), advance(twin, torch.arange(3), 70))


WRONG_INPUTS: dict[str, dict[str, Any]] = {
    "q must have shape [2, 1, 2, 8], got [2, 1, 2, 9]": {"q": torch.zeros(2, 1, 2, 9)},
    "q must be torch.float32, got torch.float64": {"q": torch.zeros(2, 1, 2, 8).double()},
    "k must have shape": {"k": torch.zeros(2, 2, 2, 8)},
    "v must have shape [2, 1, 4, 5]": {"v": torch.zeros(2, 1, 2, 5)},
    "log_decay must have shape [2, 1, 4]": {"log_decay": torch.zeros(2, 1, 4, 8)},
    "log_decay must be torch.float32, got torch.bfloat16": {
        "log_decay": torch.zeros(2, 1, 4).bfloat16()
    },
    "beta must have shape [2, 1, 4]": {"beta": torch.zeros(2, 1, 2)},
    "beta must be torch.float32": {"beta": torch.zeros(2, 1, 4).half()},
    "beta: this layer's spec has a beta": {"beta": None},
    "skip must have shape [4] or [4, 5], got [5]": {"skip": torch.zeros(5)},
    "log_decay must be at most 0, got 0.5": {"log_decay": torch.full((2, 1, 4), 0.5)},
    "q must be on cpu, where the cache is, got meta": {"q": torch.zeros(2, 1, 2, 8, device="meta")},
    "beta must be on cpu": {"beta": torch.zeros(2, 1, 4, device="meta")},
    "log_decay must be on cpu": {"log_decay": torch.zeros(2, 1, 4, device="meta")},
    "skip must be on cpu": {"skip": torch.zeros(4, device="meta")},
}


@pytest.mark.parametrize("message", WRONG_INPUTS)
def test_wrong_inputs_are_named_and_the_step_can_be_repeated(message: str) -> None:
    """A refused step has changed nothing: the right inputs are taken by the same ticket."""
    spec = samples.layer("gdn", torch.float32)
    cache = StateCache(spec, 2)
    ticket = cache.begin(torch.arange(2))
    inputs = samples.draw(spec, 2, 1)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        cache.step(ticket, 0, **inputs._asdict() | WRONG_INPUTS[message])
    cache.step(ticket, 0, *inputs)
    cache.commit(ticket)


def test_growth_does_not_matter_where_nothing_is_decoded() -> None:
    """Padded rows and what is behind a row's length may hold any log_decay; other rows may not."""
    spec = samples.layer("kda", torch.float32)
    cache = StateCache(spec, 2, max_tokens=2)
    inputs = samples.draw(spec, 3, 2)
    inputs.log_decay[0] = 1.0
    inputs.log_decay[1, 1] = torch.nan
    inputs.log_decay[1, 1, 0, 0] = 1.0
    ticket = cache.begin(one(-1, 0, 1), 2, torch.tensor([2, 1, 2]))
    assert bool(cache.step(ticket, 0, *inputs).isfinite().all())
    cache.discard(ticket)
    ticket = cache.begin(one(-1, 0, 1), 2)
    with pytest.raises(ValueError, match=r"^log_decay must be at most 0, got 1:"):
        cache.step(ticket, 0, *inputs)


def test_convolution_inputs_on_another_device_are_named() -> None:
    """So are its weight and bias."""
    cache = StateCache(SPEC, 1)
    ticket = cache.begin(one(0))
    x, weight, bias = torch.zeros(1, 1, 6), torch.zeros(6, 4), torch.zeros(6)
    for index, name in enumerate(("x", "weight", "bias")):
        given = [x, weight, bias]
        given[index] = given[index].to("meta")
        with pytest.raises(
            ValueError, match=f"^{name} must be on cpu, where the cache is, got meta"
        ):
            cache.convolve(ticket, 0, *given)


def test_a_beta_nobody_takes_is_refused() -> None:
    """A layer without beta refuses one rather than ignore it."""
    spec = samples.layer("gla", torch.float32)
    cache = StateCache(spec, 1)
    ticket = cache.begin(one(0))
    with pytest.raises(ValueError, match=r"^beta: this layer's spec has no beta"):
        cache.step(ticket, 0, *samples.draw(spec, 1, 1)[:4], beta=torch.ones(1, 1, 4))


@pytest.mark.parametrize("layer", [-1, 1])
def test_a_layer_that_is_not_there_is_named(layer: int) -> None:
    """layer is an index into specs; negative ones are no shorthand."""
    spec = samples.layer("gla", torch.float32)
    cache = StateCache(spec, 1)
    ticket = cache.begin(one(0))
    with pytest.raises(ValueError, match=f"^layer must be 0 to 0, got {layer}"):
        cache.step(ticket, layer, *samples.draw(spec, 1, 1))


WRONG_SPECS: dict[str, dict[str, Any]] = {
    "heads must be at least 1, got 0": {"heads": 0},
    "heads must be a multiple of key_heads, got 4 and 3": {"key_heads": 3},
    "decay must be 'scalar' or 'channel', got 'vector'": {"decay": "vector"},
    "beta must be True for a layer with erase": {"beta": False},
    "activation must be one of": {"activation": torch.int32},
    "conv_channels and conv_width belong together": {"conv_channels": 8},
    "conv_channels and conv_width belong together: ": {"conv_channels": 8, "conv_width": 1},
}


@pytest.mark.parametrize("message", WRONG_SPECS)
def test_wrong_specs_are_named(message: str) -> None:
    """A LayerSpec that describes no layer says which field is wrong."""
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        replace(samples.SPECS["gdn"], **WRONG_SPECS[message])


def test_no_rows_is_no_step() -> None:
    """A step over no rows at all is possible and does nothing."""
    cache, twin = mid_window(HYBRID), mid_window(HYBRID)
    outs = advance(cache, torch.zeros(0, dtype=torch.int64), 5)
    assert all(out.shape[0] == 0 for out in outs)
    assert [x.shape[0] for x in cache.materialize(one())] == [0, 0, 0]
    assert same(advance(cache, torch.arange(3), 71), advance(twin, torch.arange(3), 71))


NO_TENSORS: dict[str, Callable[[], Any]] = {
    "slots must be a tensor, got list": lambda: StateCache(SPEC, 3).begin([0, 1]),  # pyright: ignore
    "lengths must be a tensor, got list": lambda: StateCache(SPEC, 3).begin(one(0), 1, [1]),  # pyright: ignore
    "tokens must be an int, got 1.0": lambda: StateCache(SPEC, 3).begin(one(0), 1.0),  # pyright: ignore
    "window must be an int, got '16'": lambda: StateCache(SPEC, 3, window="16"),  # pyright: ignore
    "slots must be an int, got 3.0": lambda: StateCache(SPEC, 3.0),  # pyright: ignore
    "specs must be LayerSpecs, got str": lambda: StateCache("x", 3),  # pyright: ignore
}


@pytest.mark.parametrize("message", NO_TENSORS)
def test_an_argument_of_another_type_is_named(message: str) -> None:
    """A list for a tensor, or a float for a size, is one error that says what is wanted."""
    with pytest.raises(ValueError, match=re.escape(message)):
        NO_TENSORS[message]()


def test_no_ticket_is_a_step_error() -> None:
    """None is not the open ticket, even while no step is open."""
    with pytest.raises(StepError, match="ticket"):
        StateCache(SPEC, 3).commit(None)  # pyright: ignore


def test_inputs_that_require_gradients_leave_none_behind() -> None:
    """The cache keeps no autograd graph, which would grow with every step."""
    spec = samples.layer("gdn", torch.float32)
    cache = StateCache(spec, 2, window=2)
    states = torch.zeros(2, *spec.state_shape, requires_grad=True)
    cache.load(one(0, 1), [states])
    for _ in range(4):
        inputs = [None if x is None else x.requires_grad_() for x in samples.draw(spec, 2, 1)]
        ticket = cache.begin(one(0, 1))
        assert not cache.step(ticket, 0, *inputs).requires_grad  # pyright: ignore
        cache.commit(ticket)
    assert not any(part.requires_grad for part in cache.export(one(0, 1)).values())
