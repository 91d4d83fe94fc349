"""Calibration of small random models through the transformers engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lazystate.engines.transformers.calibrating import Options, calibrate, score
from lazystate.engines.transformers.observing import (
    fingerprint,
    layer_spec,
    observed,
    recurrent_modules,
)
from lazystate.engines.transformers.patching import patched
from lazystate.reference.recurrence import recur
from lazystate.sketch.calibration_file import load
from lazystate.sketch.scores import Scores, prefix_products
from lazystate.sketch.windows import Run, run
from samples import KINDS, draw, layer
from tiny_models import CONFIGS, FAMILIES, FP32, VOCABULARY, copied, stock
from tolerance import EXACT, error

WINDOW = 4


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 5, 8])
def test_windows_are_the_recurrence(kind: str, first: int) -> None:
    """Outputs, states at borders and what effective queries read are those of the recurrence."""
    spec, count = layer(kind), 15
    inputs = draw(spec, 2, count)
    found = run(spec, inputs, WINDOW, first=first)
    assert [part.start for part in found.windows] == list(range(first, count - WINDOW + 1, WINDOW))
    for b in range(2):
        row = [None if x is None else x[b] for x in inputs[:5]]
        zero = torch.zeros(spec.state_shape, dtype=torch.float64)
        expected, states = recur(zero, *row, erase=spec.erase)  # pyright: ignore
        assert error(found.out[b], expected) < EXACT
        for part in found.windows:
            before = states[part.start - 1] if part.start else zero
            assert error(part.state[b], before) < EXACT
            empty = [None if x is None else x[part.start : part.stop] for x in row]
            empty[2] = torch.zeros_like(empty[2])  # without values the state is all that is read
            read, _ = recur(before, *empty, erase=spec.erase)  # pyright: ignore
            got = torch.einsum("hvk,thk->thv", part.state[b], part.queries[b])
            assert error(got, read) < EXACT


@pytest.mark.parametrize("mixer", CONFIGS)
def test_an_observed_model_says_what_it_says(mixer: str) -> None:
    """Reading in windows changes no logit beyond rounding, and leaves the model as it was."""
    model, text = copied(mixer), tokens(2, 23)
    seen = set()
    with torch.no_grad(), observed(model, lambda i, _: seen.add(i), window=WINDOW, first=6):
        got = model(input_ids=text, use_cache=False).logits
    with torch.no_grad():
        expected = stock(mixer)(input_ids=text, use_cache=False).logits
        assert torch.equal(model(input_ids=text, use_cache=False).logits, expected)
    assert seen == set(range(len(recurrent_modules(model))))
    assert float((got - expected).abs().max() / expected.abs().max()) < FP32


@pytest.mark.parametrize("mixer", FAMILIES)
def test_scores_are_what_the_loss_feels(mixer: str) -> None:
    """J of one token is the squared change of the loss as its missed part is taken away."""
    model, text = copied(mixer).double(), tokens(1, 13)
    spec, warmup = layer_spec(model, torch.float64), 8
    heads, layers = spec.heads, len(recurrent_modules(model))
    omega = torch.linalg.qr(torch.randn(layers, heads, spec.key_dim, 3).double()).Q
    scores = [Scores.empty(heads, 3) for _ in range(layers)]
    score(model, text, omega, scores, window=WINDOW, warmup=warmup)
    assert all(int(found.tokens) == WINDOW for found in scores)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    at, head, rank = 1, 1, 2
    expected = torch.zeros((), dtype=torch.float64)
    for token in range(WINDOW):

        def loss(scale: float, token: int = token) -> Tensor:
            def change(index: int, found: Run) -> Tensor | None:
                if index != at:
                    return None
                part = found.windows[0]
                own = omega[at, head, :, :rank]
                state, query = part.state[0, head], part.queries[0, token, head]
                whole, u = state @ query, state @ own
                delta = whole - u @ torch.linalg.pinv(u) @ whole
                out = found.out.clone()
                out[0, part.start + token, head] += scale * delta
                return out

            with torch.no_grad(), observed(model, change, window=WINDOW, first=warmup):
                logits = model(input_ids=text, use_cache=False).logits[0, :-1]
            return F.cross_entropy(logits, text[0, 1:])

        step = 1e-3
        expected += ((loss(step) - loss(-step)) / (2 * step)) ** 2
    got = scores[at].paired[head, rank]
    # Some modules compute norms and gates in FP32 whatever the weights are.
    assert float(got) == pytest.approx(float(expected), rel=2e-2)


@pytest.mark.parametrize("mixer", FAMILIES)
def test_calibration_of_a_model(mixer: str, tmp_path: Path) -> None:
    """A whole calibration is finite, falls with the rank, fits its model, and can be saved."""
    model = copied(mixer)
    told: list[tuple[str, int, int]] = []
    found = calibrate(
        model,
        tokens(3, 6),
        tokens(3, 20),
        Options(window=WINDOW, new_tokens=16, warmup=8, batch=2),
        name=mixer,
        progress=lambda *args: told.append(args),
    )
    spec = layer_spec(model)
    found.check([m.layer_idx for m in recurrent_modules(model)], spec, fingerprint(model))
    assert told == [("bases", 1, 2), ("bases", 2, 2), ("scores", 1, 2), ("scores", 2, 2)]
    assert found.origin.notes["states"] == 3 * 3 and found.origin.notes["scored tokens"] == 3 * 12
    assert found.missed is not None
    assert bool((found.missed.diff(dim=-1) <= 0).all())
    assert bool((found.missed[..., -1] < 0.5 * found.missed[..., 0]).all())
    found.save(tmp_path / "c.safetensors")
    assert torch.equal(load(tmp_path / "c.safetensors").omega, found.omega)
    ranks = found.allocate(4)
    assert ranks.allocation.bytes <= ranks.allocation.budget


def test_a_basis_beats_a_random_one() -> None:
    """On other texts the calibrated basis misses less than a random one of its rank."""
    model = copied("Qwen3_5GatedDeltaNet")
    found = calibrate(
        model,
        tokens(8, 6),
        tokens(1, 20),
        Options(window=WINDOW, new_tokens=24, warmup=8, rank=4),
        name="m",
    )
    spec, text = layer_spec(model), tokens(4, 40)
    missed = torch.zeros(2)

    def look(index: int, run: Run) -> None:
        random = torch.linalg.qr(torch.randn(spec.heads, spec.key_dim, 4)).Q
        for part in run.windows:
            for i, omega in enumerate((found.basis(index), random)):
                left, _ = prefix_products(part.state, omega, part.queries)
                missed[i] += (left[..., 4] / left[..., 0]).mean()

    with torch.no_grad(), observed(model, look, window=WINDOW, first=8):
        model(input_ids=text, use_cache=False)
    assert missed[0] < missed[1]


def test_what_cannot_be_calibrated() -> None:
    """A patched model and texts without a whole window are refused with the reason."""
    model = copied(FAMILIES[0])
    options = Options(window=WINDOW, new_tokens=16, warmup=8)
    with pytest.raises(ValueError, match="texts 12 tokens long"):
        calibrate(model, tokens(1, 6), tokens(1, 11), options, name="m")
    with patched(model), pytest.raises(ValueError, match="must not be patched"):
        calibrate(model, tokens(1, 6), tokens(1, 20), options, name="m")
    with pytest.raises(ValueError, match="supported recurrent layer"):
        recurrent_modules(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("mixer", FAMILIES)
@pytest.mark.parametrize("wrong", ["padding", "cache"])
def test_observed_models_read_whole_texts(mixer: str, wrong: str) -> None:
    """Padding and a cache are refused, and the model is itself again afterwards."""
    model, text = copied(mixer), tokens(1, 9)
    mask = torch.ones_like(text)
    mask[0, 0] = wrong != "padding"
    reason = "without padding" if wrong == "padding" else "use_cache=False"
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=reason),
        observed(model, lambda *_: None, window=WINDOW),
    ):
        model(input_ids=text, attention_mask=mask, use_cache=wrong == "cache")
    assert len(recurrent_modules(model)) == len(recurrent_modules(stock(mixer)))


class Interrupted(RuntimeError):
    """What stops a calibration in these tests."""


@pytest.mark.parametrize("last", [("bases", 1), ("bases", 2), ("scores", 1)])
def test_an_interrupted_calibration_goes_on(last: tuple[str, int], tmp_path: Path) -> None:
    """Its result is, bit for bit, that of a run in one go; nothing is done twice."""
    model, prompts, texts = copied(FAMILIES[0]), tokens(5, 6), tokens(3, 20)
    options, keep = Options(window=WINDOW, new_tokens=16, warmup=8, batch=2), tmp_path / "sums"
    whole = calibrate(model, prompts, texts, options, name="m")

    def stop(part: str, done: int, of: int) -> None:
        if (part, done) == last:
            raise Interrupted

    with pytest.raises(Interrupted):
        calibrate(
            model, prompts, texts, options, name="m", keep=keep, save_seconds=0, progress=stop
        )
    with pytest.raises(ValueError, match="remove it to start anew"):
        calibrate(model, prompts, texts, replace(options, warmup=4), name="m", keep=keep)
    seen: list[tuple[str, int]] = []

    def note(part: str, done: int, of: int) -> None:
        seen.append((part, done))

    found = calibrate(model, prompts, texts, options, name="m", keep=keep, progress=note)
    assert seen == [each for each in ALL if each > last]
    assert not keep.exists()
    for name, tensor in whole.tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name


ALL = [("bases", 1), ("bases", 2), ("bases", 3), ("scores", 1), ("scores", 2)]
