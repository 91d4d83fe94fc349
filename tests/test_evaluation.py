"""The evaluation: what it measures on cases whose answer is known, and its commands."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lazystate.cli import app
from lazystate.commands import decoding
from lazystate.evaluation import decay, kl
from lazystate.evaluation.kl import AGAIN, Config, Reference, States


@pytest.fixture(scope="module")
def loaded() -> decoding.Loaded:
    """One shipped model."""
    return decoding.load("gdn")


@pytest.fixture(scope="module")
def reference(loaded: decoding.Loaded) -> Reference:
    """Two streams of 40 tokens behind a prompt of 24."""
    given = kl.streams(loaded.tokenizer, 2, 64)
    return Reference.of(loaded.model, given, 24)


def test_divergence_by_hand() -> None:
    """KL of two coins, and 0 for the same logits up to a constant."""
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    by_hand = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(kl.divergence(p.log(), q.log())) == pytest.approx(by_hand, rel=1e-6)
    assert float(kl.divergence(p.log(), p.log() + 3)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("text", ["fp32", "fp16:nearest", "fp16,nvfp4", "fp8,int2:nearest"])
def test_states_have_names(text: str) -> None:
    """A name is parsed and printed as itself."""
    assert str(States.parse(text)) == text


@pytest.mark.parametrize("text", ["fp17", "fp16,fp17", "fp16:up", "int4", ""])
def test_wrong_names_are_errors(text: str) -> None:
    """Unknown formats and roundings are named."""
    with pytest.raises(ValueError, match="state"):
        States.parse(text)


def test_streams_are_pages_of_both_books(loaded: decoding.Loaded) -> None:
    """Rows differ, have the asked length, and are the same each time."""
    given = kl.streams(loaded.tokenizer, 4, 50)
    assert given.shape == (4, 50)
    assert len({tuple(row) for row in given.tolist()}) == 4
    assert torch.equal(given, kl.streams(loaded.tokenizer, 4, 50))
    with pytest.raises(ValueError, match="fewer tokens"):
        kl.streams(loaded.tokenizer, 2, 1_000_000)


def test_points_end_at_the_length() -> None:
    """N grows fourfold, up to the length."""
    assert kl.points(16) == [16]
    assert kl.points(100) == [16, 64, 100]
    assert kl.points(1024) == [16, 64, 256, 1024]


def test_logits_are_those_of_one_forward(loaded: decoding.Loaded) -> None:
    """Fed token by token, the model gives what one forward over the text gives."""
    given = kl.streams(loaded.tokenizer, 3, 40)
    for config in (kl.REFERENCE, AGAIN, Config(States(), 4)):
        stepped = torch.stack(list(kl.logits(loaded.model, given, 30, config)), 1)
        with torch.no_grad():
            whole = loaded.model(given).logits[:, 30:]
        assert stepped.shape == whole.shape
        assert float((stepped - whole).abs().max()) < 1e-3


@pytest.mark.parametrize(("window", "sizes"), [(1, [1]), (2, [1, 1]), (16, [1, 15])])
def test_steps_of_a_window(window: int, sizes: list[int]) -> None:
    """One step folds, the others fill the window, none has more tokens than backends take."""
    assert Config(States(), window).steps() == sizes
    assert Config(States(), 64).steps() == [1, 16, 16, 16, 15]
    assert kl.REFERENCE.steps() == [1]


@pytest.mark.parametrize("state", ["fp8:nearest", "fp32,nvfp4"])
def test_several_tokens_a_step_read_what_one_does(
    loaded: decoding.Loaded, reference: Reference, state: str
) -> None:
    """The same logits as decoding token by token, up to the order of additions in FP32."""
    config = Config(States.parse(state), 4)
    decoded = torch.stack(list(kl.logits(loaded.model, reference.given, 24, config)), 1)
    model: Any = loaded.model
    with config.engine(model), torch.inference_mode():
        cache = model(reference.given[:, :24], use_cache=True).past_key_values
        for i in range(24, reference.given.shape[1]):
            one = model(reference.given[:, i : i + 1], past_key_values=cache, use_cache=True)
            distance = kl.divergence(one.logits[:, -1], decoded[:, i - 24])
            assert float(distance.max()) < 1e-6


def test_fp32_is_the_floor(loaded: decoding.Loaded, reference: Reference) -> None:
    """Replay of FP32 states is as near as FP32 is; rounded states are not, the coarser the less."""
    found = {
        text: reference.measure(loaded.model, Config(States.parse(text), 4))[-1]
        for text in ("fp32", "fp16", "fp8", "fp32,nvfp4", "nvfp4")
    }
    floor, fp16, fp8, separate, shared = (found[text].kl for text in found)
    assert floor < 1e-9 < fp16 < fp8 < shared
    assert fp16 < separate < shared
    assert found["fp32"].top == 1.0
    assert reference.measure(loaded.model, AGAIN)[-1].kl < 1e-9


def test_points_average_streams_and_positions(
    loaded: decoding.Loaded, reference: Reference
) -> None:
    """A point's mean and error are over its streams; N = 16 sees the first 16 positions only."""
    config = Config(States("nvfp4"), 4)
    first, last = reference.measure(loaded.model, config)
    assert (first.n, last.n) == (16, 40)
    decoded = kl.logits(loaded.model, reference.given, 24, config)
    by_position = torch.stack(
        [kl.divergence(reference.kept[i], row) for i, row in enumerate(decoded, 1)]
    )
    for point in (first, last):
        mean = by_position[: point.n].mean(0)
        assert point.streams == pytest.approx(mean.tolist())
        assert point.kl == pytest.approx(float(mean.mean()))
        assert point.standard_error == pytest.approx(float(mean.std() / 2**0.5))


@pytest.mark.parametrize("alpha", [0.9, 0.99])
@pytest.mark.parametrize("state", ["fp16", "fp8"])
def test_stochastic_rounding_follows_the_law(state: str, alpha: float) -> None:
    """Variance s^2 / (1 - gamma^2): measured within its sampling error, for both windows."""
    for window in (1, 16):
        found = decay.run(state, "stochastic", alpha, window, decay.settled(alpha, window))
        assert found.bias == 0
        assert found.rms == pytest.approx(found.law, abs=4 * found.standard_error)
        assert found.rms > 1.1 * found.once


def test_the_law_by_hand() -> None:
    """Two folds: mean b (1 + gamma), variance s^2 (1 + gamma^2)."""
    assert decay.law(1.0, 1.0, 0.5, 2) == pytest.approx(1.5)
    assert decay.law(0.0, 1.0, 0.5, 2) == pytest.approx(math.sqrt(1.25))


def run(*arguments: str):
    """The command's result."""
    return CliRunner().invoke(app, ["evaluate", *arguments])


def test_kl_command() -> None:
    """Rows for every state, window and N as JSON; a view at window 1 is left out."""
    short = ("gdn", "--tokens", "20", "--streams", "2", "--prompt-tokens", "16")
    states = ("--state", "fp8", "--state", "fp32,nvfp4", "--window", "1", "--window", "4")
    result = run("kl", *short, *states, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["state"], row["window"], row["n"]) for row in rows] == [
        (state, window, n)
        for state, window in (("fp8", 1), ("fp8", 4), ("fp32,nvfp4", 4))
        for n in (16, 20)
    ]
    assert all(len(row["streams"]) == 2 and row["layer"] == "gdn" for row in rows)
    shown = run("kl", *short, "--state", "fp8")
    assert shown.exit_code == 0 and "fp8" in shown.stdout and "±" in shown.stdout
    assert run("kl", *short, "--state", "fp7").exit_code == 2


def test_kl_command_compares_a_bfloat16_model() -> None:
    """The reference stays float32: bfloat16 activations show, far above the floor of replay."""
    short = ("gdn", "--tokens", "20", "--streams", "2", "--prompt-tokens", "16", "--state", "fp32")
    found = {}
    for dtype in ("float32", "bfloat16"):
        result = run("kl", *short, "--dtype", dtype, "--json")
        assert result.exit_code == 0, result.output
        *_, last = json.loads(result.stdout)
        assert last["dtype"] == dtype
        found[dtype] = last["kl"]
    assert found["float32"] < 1e-9 < found["bfloat16"] < 1e-2


def test_decay_command() -> None:
    """A row for every rounding, window and decay."""
    result = run("decay", "--state", "fp8", "--window", "64", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 8 and {row["alpha"] for row in rows} == set(decay.ALPHAS)
    assert run("decay", "--state", "int4").exit_code == 2
