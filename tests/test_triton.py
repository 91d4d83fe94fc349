"""The Triton backend against the PyTorch one: in Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lazystate import LayerSpec, StateCache
from lazystate.ops.triton import launch
from lazystate.ops.triton.plain import plain_step
from samples import KINDS, draw, layer, slots
from tolerance import error
from tolerance import outputs as output_bound
from tolerance import state as state_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
WINDOW, MAX_TOKENS, SLOTS = 4, 3, 4
ROWS = slots(2, -1, 0)
LENGTHS = ([1, 1, 1], [3, 2, 1], [2, 3, 0], [1, 3, 3], [3, 3, 2])
KEPT = ([1, 1, 1], [2, 1, 1], [2, 1, 0], [1, 2, 3], [1, 1, 2])


def spec_of(kind: str, activation: torch.dtype = torch.float32) -> LayerSpec:
    """A layer whose V fills two tiles, the second in part."""
    return layer(kind, activation, key_dim=32, value_dim=20)


def both(
    spec: LayerSpec, fold: str, window: int = WINDOW, max_tokens: int = MAX_TOKENS
) -> tuple[StateCache, StateCache]:
    """Caches of the two backends with the same loaded states."""
    caches = tuple(
        StateCache(
            spec,
            SLOTS,
            window=window,
            max_tokens=max_tokens,
            fold=fold,
            device=DEVICE,
            backend=name,
        )
        for name in ("triton", "torch")
    )
    state = torch.randn(1, *spec.state_shape)
    for cache in caches:
        cache.load(slots(2), [state.to(DEVICE)])
    return caches


def program(cache: StateCache, steps: list) -> list[torch.Tensor]:
    """The outputs of a program of ragged steps with drafts, on both backends the same."""
    out = []
    for inputs, lengths, kept in steps:
        ticket = cache.begin(ROWS.to(DEVICE), inputs.q.shape[1], slots(*lengths).to(DEVICE))
        moved = (None if x is None else x.to(DEVICE) for x in inputs)
        out.append(cache.step(ticket, 0, *moved))
        cache.commit(ticket, slots(*kept).to(DEVICE))
    return out


def steps_of(spec: LayerSpec) -> list:
    """Random inputs, with a reset on the way."""
    steps = []
    for number, (lengths, kept) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        inputs = draw(spec, len(lengths), max(lengths))
        if number == 1:
            inputs.log_decay[0, 0] = -float("inf")
        steps.append((inputs, lengths, kept))
    return steps


def single_steps(spec: LayerSpec, count: int) -> list:
    """Random inputs of steps of one token, with a reset on the way."""
    steps = [(draw(spec, 3, 1), [1, 1, 1], [1, 1, 1]) for _ in range(count)]
    steps[1][0].log_decay[0, 0] = -float("inf")
    return steps


def agree(spec: LayerSpec, fold: str, steps: list, window: int = WINDOW) -> None:
    """Outputs and states of both backends, within what FP32 rounding explains."""
    tokens = max(inputs.q.shape[1] for inputs, *_ in steps)
    ours, theirs = both(spec, fold, window=window, max_tokens=tokens)
    bound = 2 * output_bound(spec, window, torch.float32, len(steps))
    for out, expected in zip(program(ours, steps), program(theirs, steps), strict=True):
        assert error(out, expected) <= bound
        assert not out[1].any(), "a padded row is zero"
    used = slots(0, 2)
    states = zip(ours.materialize(used), theirs.materialize(used), strict=True)
    for state, expected in states:
        assert error(state, expected) <= 2 * state_bound(spec, window, torch.float32, len(steps))


def launched(monkeypatch, spec: LayerSpec, split: bool, all_tiles: bool) -> None:
    """Use small tiles, one or all of a key head's in a program, in one launch or in two."""
    tiles = -(-spec.value_dim // 16) * (spec.group if spec.decay == "scalar" else 1)
    setting = launch.Launch(
        16, tiles if all_tiles else 1, 2 if all_tiles else 1, 1, 16 if split else 0
    )
    monkeypatch.setattr(launch, "launch_of", lambda *_: setting)


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fold", ["raw", "cached"])
@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree(kind, fold, split, monkeypatch):
    """Ragged and padded rows, folds, a reset, a fresh and a loaded slot: one result for both."""
    spec = spec_of(kind)
    launched(monkeypatch, spec, split, all_tiles=split)
    agree(spec, fold, steps_of(spec))


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree_on_standard_decoding(kind, split, monkeypatch):
    """One token a step over three windows, a padded row and a reset: one result for both."""
    spec = spec_of(kind)
    launched(monkeypatch, spec, split, all_tiles=split)
    agree(spec, "raw", single_steps(spec, 3 * WINDOW + 1))


@pytest.mark.slow
@pytest.mark.parametrize("fold", ["raw", "cached"])
@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree_on_several_blocks_of_records(kind, fold, monkeypatch):
    """A window of 40 is three blocks of records; steps of 16 and of 12 tokens fold it twice."""
    spec = layer(kind, torch.float32, key_dim=24, value_dim=20)
    launched(monkeypatch, spec, True, all_tiles=False)
    lengths = ([16, 1, 12], [16, 9, 16], [16, 16, 3], [12, 1, 16], [16, 1, 16])
    steps = [(draw(spec, 3, 16), each, each) for each in lengths]
    agree(spec, fold, steps + single_steps(spec, 2), window=40)


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_settings_of_large_batches_agree(kind, batch, monkeypatch):
    """The launch settings that large batches get by default give PyTorch's results, too."""
    spec = layer(kind, torch.float32, heads=4, key_heads=2, key_dim=32, value_dim=40)
    setting = launch.default_launch(spec, batch, 1)
    monkeypatch.setattr(launch, "launch_of", lambda *_: setting)
    agree(spec, "raw", single_steps(spec, WINDOW + 2) + steps_of(spec)[:2])


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_a_row_does_not_depend_on_its_batch(kind):
    """One row alone gives the bits that it gives among others."""
    spec = spec_of(kind)
    inputs = draw(spec, 3, 2)
    results = []
    for rows in (slots(2, 1, 0), slots(0)):
        cache = both(spec, "raw")[0]
        ticket = cache.begin(rows.to(DEVICE), 2)
        taken = (None if x is None else x[-len(rows) :].to(DEVICE) for x in inputs)
        results.append(cache.step(ticket, 0, *taken)[-1])
    assert torch.equal(results[0], results[1])


def test_convolution_agrees():
    """The convolution's ring, rollback included: one result, two backends."""
    spec = replace(spec_of("mamba2"), conv_channels=24, conv_width=4)
    weight, bias = torch.randn(24, 4).to(DEVICE), torch.randn(24).to(DEVICE)
    steps = steps_of(spec)
    mixed = [torch.randn(3, inputs.q.shape[1], 24).to(DEVICE) for inputs, *_ in steps]
    results = []
    for cache in both(spec, "raw"):
        out = []
        for x, (inputs, lengths, kept) in zip(mixed, steps, strict=True):
            ticket = cache.begin(ROWS.to(DEVICE), x.shape[1], slots(*lengths).to(DEVICE))
            out.append(cache.convolve(ticket, 0, x, weight, bias))
            cache.step(ticket, 0, *(None if y is None else y.to(DEVICE) for y in inputs))
            cache.commit(ticket, slots(*kept).to(DEVICE))
        results.append(out)
    for one, other in zip(*results, strict=True):
        assert error(one, other) <= 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", KINDS)
def test_plain_step_is_the_recurrence(kind):
    """The conventional kernel: the same outputs as replay, and a snapshot after every token."""
    spec = spec_of(kind)
    inputs = draw(spec, 2, 3)
    cache = both(spec, "raw")[1]
    ticket = cache.begin(slots(2, 0).to(DEVICE), 3)
    expected = cache.step(ticket, 0, *(None if x is None else x.to(DEVICE) for x in inputs))
    states = torch.full((8, *spec.state_shape), float("nan"), device=DEVICE)
    states[0] = cache._pools[0].checkpoint[2]  # loaded, and not folded into by so few tokens
    states[1] = 0
    cache.commit(ticket)
    target = torch.tensor([[2, 3, 4], [5, 6, 7]], device=DEVICE)
    moved = [None if x is None else x.to(DEVICE) for x in inputs[:5]]
    out = plain_step(spec, states, slots(0, 1).to(DEVICE), target, *moved, block_v=16)
    bound = 2 * output_bound(spec, WINDOW, torch.float32, 1)
    assert error(out, expected) <= bound
    final = cache.materialize(slots(2, 0))[0]
    assert error(states[[4, 7]], final) <= bound


@pytest.mark.parametrize("limits", [{"window": 65}, {"window": 20, "max_tokens": 17}])
def test_longer_windows_and_steps_are_refused(limits):
    """What the kernels are not made for is refused by name, with the limit."""
    with pytest.raises(ValueError, match=r"(window|max_tokens) must be at most (64|16)"):
        StateCache(spec_of("gdn"), 1, **limits, device=DEVICE, backend="triton")
