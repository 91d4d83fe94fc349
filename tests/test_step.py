"""What a step promises: outputs of the recurrence, row by row, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import samples
import tolerance
from lazystate import LayerSpec, StateCache
from lazystate.gates import Inputs
from lazystate.reference import recurrence

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STEPS, WINDOW = 30, 6


def reference(spec: LayerSpec, state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HV, V] and last states [B, HV, V, K] of all rows, token by token."""
    rows = []
    for row in range(inputs.q.shape[0]):
        own = samples.rows_of(inputs, samples.slots(row))
        parts = [None if x is None else x[0] for x in own[:5]]
        rows.append(recurrence.recur(state[row], *parts, erase=spec.erase))
    return torch.stack([out for out, _ in rows]), torch.stack([states[-1] for _, states in rows])


def joined(steps: list[Inputs]) -> Inputs:
    """Steps of the same rows, one after the other."""
    columns = zip(*[step[:5] for step in steps], strict=True)
    return Inputs(*[None if c[0] is None else torch.cat(c, 1) for c in columns])


def started(spec: LayerSpec, rows: int, **options) -> tuple[StateCache, Tensor]:
    """A cache whose slots hold a random state, and that state."""
    cache = StateCache(spec, rows, **options)
    state = torch.randn(rows, *spec.state_shape).to(options.get("checkpoint", torch.float32))
    cache.load(torch.arange(rows), [state])
    return cache, state


def snapshot(cache: StateCache, slots: Tensor) -> dict[str, Tensor]:
    """All bytes of slots, as integers: NaN compares equal to itself."""
    return {name: x.contiguous().view(torch.uint8) for name, x in cache.export(slots).items()}


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise equality of two snapshots."""
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("checkpoint", DTYPES)
@pytest.mark.parametrize("activation", DTYPES)
@pytest.mark.parametrize("kind", samples.KINDS)
def test_outputs_are_the_recurrence(
    kind: str, activation: torch.dtype, checkpoint: torch.dtype, tokens: int
) -> None:
    """Over many windows outputs and state stay within what the dtypes' rounding explains."""
    spec = samples.layer(kind, activation)
    cache, state = started(spec, 2, window=WINDOW, max_tokens=tokens, checkpoint=checkpoint)
    steps = [samples.draw(spec, 2, tokens) for _ in range(STEPS // tokens)]
    out = torch.cat([samples.advance(cache, torch.arange(2), x) for x in steps], 1)
    expected, last = reference(spec, state, joined(steps))
    folds = STEPS // WINDOW * (1 if tokens == 1 else 2)
    bound = tolerance.outputs(spec, WINDOW, checkpoint, folds)
    assert out.dtype == activation
    assert tolerance.error(out, expected) <= bound
    (exact,) = cache.materialize(torch.arange(2))
    assert tolerance.error(exact, last) <= tolerance.state(spec, WINDOW, checkpoint, folds)


@pytest.mark.parametrize("kind", samples.KINDS)
def test_window_of_one_is_the_plain_recurrence(kind: str) -> None:
    """With window 1 every step folds, and the checkpoint follows the plain recurrence."""
    spec = samples.layer(kind, torch.float32)
    cache, state = started(spec, 1, window=1)
    state = state.double()
    for _ in range(20):
        inputs = samples.draw(spec, 1, 1)
        out = samples.advance(cache, samples.slots(0), inputs)
        expected, state = reference(spec, state, inputs)
        assert tolerance.error(out, expected) <= 20 * tolerance.arithmetic(spec, 1)
        (exact,) = cache.materialize(samples.slots(0))
        assert tolerance.error(exact, state) <= 20 * tolerance.arithmetic(spec, 1)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("decays", [(g,) for g in samples.EXTREME] + [samples.EXTREME])
@pytest.mark.parametrize("kind", samples.KINDS)
def test_any_decay_is_exact(kind: str, decays: tuple[float, ...], tokens: int) -> None:
    """From "keep everything" to a reset, alone and mixed: finite, and equal to FP64."""
    spec = samples.layer(kind, torch.float32)
    cache, state = started(spec, 2, window=5, max_tokens=4)
    steps = [samples.draw(spec, 2, tokens, decays=decays) for _ in range(6)]
    out = torch.cat([samples.advance(cache, torch.arange(2), x) for x in steps], 1)
    expected, last = reference(spec, state, joined(steps))
    bound = 10 * tolerance.arithmetic(spec, 5)
    assert tolerance.error(out, expected) <= bound
    assert tolerance.error(cache.materialize(torch.arange(2))[0], last) <= bound


@pytest.mark.parametrize("kind", samples.KINDS)
def test_a_reset_forgets_exactly(kind: str) -> None:
    """After log-decay -inf the outputs are those of a fresh slot, whatever the state was."""
    spec = samples.layer(kind)
    loaded, _ = started(spec, 1, window=4, checkpoint=torch.float64)
    fresh = StateCache(spec, 1, window=4, checkpoint=torch.float64)
    samples.advance(loaded, samples.slots(0), samples.draw(spec, 1, 1))
    for step in range(6):
        inputs = samples.draw(spec, 1, 1, decays=(-float("inf"),) if step == 0 else None)
        out = [samples.advance(cache, samples.slots(0), inputs) for cache in (loaded, fresh)]
        assert tolerance.error(out[0], out[1]) <= tolerance.EXACT


@pytest.mark.parametrize("kind", samples.KINDS)
def test_padded_and_empty_rows_do_nothing(kind: str) -> None:
    """Rows of slot -1 or length 0 give exact zeros and leave every byte of every slot alone."""
    spec = samples.layer(kind, torch.bfloat16)
    cache, _ = started(spec, 4, window=2, max_tokens=2)
    for _ in range(3):
        samples.advance(cache, torch.arange(4), samples.draw(spec, 4, 2))
    before = snapshot(cache, torch.arange(4))
    inputs = samples.draw(spec, 4, 2)
    for x in inputs[:5]:
        if x is not None:
            x.fill_(float("nan"))
    ticket = cache.begin(samples.slots(-1, 2, -7, 0), 2, torch.tensor([2, 0, 0, 0]))
    out = cache.step(ticket, 0, *inputs)
    cache.commit(ticket, torch.tensor([2, 0, 1, 0]))
    assert torch.equal(out, torch.zeros_like(out))
    assert same_bytes(before, snapshot(cache, torch.arange(4)))


@pytest.mark.parametrize("kind", samples.KINDS)
def test_other_slots_keep_every_byte(kind: str) -> None:
    """A step writes to its own slots only, folding or not."""
    spec = samples.layer(kind, torch.bfloat16)
    cache, _ = started(spec, 5, window=2)
    others = samples.slots(0, 2, 4)
    before = snapshot(cache, others)
    for _ in range(7):
        samples.advance(cache, samples.slots(3, -1, 1), samples.draw(spec, 3, 1))
    assert same_bytes(before, snapshot(cache, others))


@pytest.mark.parametrize("kind", samples.KINDS)
def test_outputs_behind_a_length_are_zero(kind: str) -> None:
    """A short row gives its outputs, then zeros, though its inputs are NaN there."""
    spec = samples.layer(kind)
    cache, state = started(spec, 3, window=6, max_tokens=4, checkpoint=torch.float64)
    lengths = torch.tensor([4, 1, 3])
    inputs = samples.draw(spec, 3, 4)
    expected, _ = reference(spec, state, inputs)
    for row, length in enumerate(lengths.tolist()):
        for x in inputs[:5]:
            if x is not None:
                x[row, length:] = float("nan")
        expected[row, length:] = 0
    ticket = cache.begin(torch.arange(3), 4, lengths)
    out = cache.step(ticket, 0, *inputs)
    assert tolerance.error(out, expected) <= tolerance.EXACT
    assert not out[1, 1:].any() and not out[2, 3:].any()


@pytest.mark.parametrize("kind", samples.KINDS)
def test_repeated_runs_are_identical(kind: str) -> None:
    """The same program gives the same bits, each time."""
    spec = samples.layer(kind, torch.bfloat16)
    steps = [samples.draw(spec, 3, 2) for _ in range(8)]
    state = torch.randn(3, *spec.state_shape)
    runs = []
    for _ in range(3):
        cache = StateCache(spec, 3, window=5, max_tokens=2)
        cache.load(torch.arange(3), [state])
        runs.append(torch.stack([samples.advance(cache, torch.arange(3), x) for x in steps]))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


SHAPES = ((4, 4, 8, 5), (8, 4, 64, 64), (4, 1, 128, 64), (1, 1, 16, 16))


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", samples.KINDS)
def test_a_row_does_not_see_its_batch(
    kind: str, shape: tuple[int, int, int, int], tokens: int
) -> None:
    """A row's outputs and state are the same bits alone, in a batch, and in any slot and order."""
    heads, key_heads, key_dim, value_dim = shape
    sizes = {"key_heads": key_heads, "key_dim": key_dim, "value_dim": value_dim}
    spec = samples.layer(kind, torch.float32, heads=heads, **sizes)
    together, state = started(spec, 5, window=6, max_tokens=4)
    apart = StateCache(spec, 9, window=6, max_tokens=4)
    home = samples.slots(7, 0, 8, 3, 4)
    apart.load(home, [state])
    for step in range(9):
        inputs = samples.draw(spec, 5, tokens)
        out = samples.advance(together, torch.arange(5), inputs)
        order = torch.randperm(5)
        for rows in order.split(1 if step % 2 else 3):
            alone = samples.advance(apart, home[rows], samples.rows_of(inputs, rows))
            assert torch.equal(alone, out[rows])
    assert torch.equal(together.materialize(torch.arange(5))[0], apart.materialize(home)[0])


@pytest.mark.parametrize("kind", samples.KINDS)
def test_strided_inputs_are_read_as_they_lie(kind: str) -> None:
    """Inputs that are slices of something larger give the same bits as contiguous ones."""
    spec = samples.layer(kind, torch.bfloat16)
    plain, strided = StateCache(spec, 2, window=4), StateCache(spec, 2, window=4)
    for _ in range(6):
        inputs = samples.draw(spec, 2, 1)
        wide = [None if x is None else x.repeat_interleave(2, -1)[..., ::2] for x in inputs[:5]]
        out = samples.advance(plain, torch.arange(2), inputs)
        assert torch.equal(samples.advance(strided, torch.arange(2), Inputs(*wide)), out)


@pytest.mark.parametrize("per_value", [False, True])
def test_skip_adds_the_value(per_value: bool) -> None:
    """The skip weight, one a head or one a value channel, adds skip * v to each output."""
    spec = samples.layer("mamba2")
    skip = torch.randn(spec.heads, spec.value_dim, dtype=torch.float64)
    skip = skip if per_value else skip[:, 0]
    inputs = samples.draw(spec, 2, 3)
    with_skip, without = (StateCache(spec, 2, window=4, max_tokens=3) for _ in range(2))
    out = samples.advance(with_skip, torch.arange(2), inputs._replace(skip=skip))
    plain = samples.advance(without, torch.arange(2), inputs)
    wide = skip if per_value else skip[:, None]
    assert tolerance.error(out - plain, wide * inputs.v) <= tolerance.EXACT
