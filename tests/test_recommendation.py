"""`recommend`: the cheapest state that keeps an error, by the recorded evidence."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from lazystate import LayerSpec, StateCache
from lazystate.planner import traffic
from lazystate.recommendation import CLASSES, LONGEST, Evidence, recommend

KINDS = {
    "mamba2": LayerSpec(128, 8, 128, 64, "scalar", False),
    "gdn": LayerSpec(64, 16, 128, 128, "scalar", True),
    "kda": LayerSpec(32, 32, 128, 128, "channel", True),
}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_classes_keep_their_bounds_at_fewer_and_fewer_bytes(kind: str) -> None:
    """exact is FP32 states; every class expects no more error than it allows."""
    found = [recommend(KINDS[kind], error=error) for error in CLASSES]
    assert (found[0].checkpoint, found[0].view, found[0].expected) == ("fp32", None, 0.0)
    assert all(one.expected <= one.allowed for one in found)
    assert found[0].nbytes > found[1].nbytes > found[2].nbytes
    assert recommend(KINDS[kind]) == found[1]


@kinds
@pytest.mark.parametrize("window", [4, 16, 64])
def test_nothing_recorded_is_cheaper_within_the_error(kind: str, window: int) -> None:
    """Of checkpoints and views that were measured, none with fewer bytes keeps the error."""
    evidence, spec = Evidence.of(kind), KINDS[kind]
    found = recommend(spec, window=window)
    longer = max(1, 16 / window) * LONGEST / evidence.tokens
    for checkpoint, view in itertools.product(("fp16", "fp8", "nvfp4"), (None, "fp8", "nvfp4")):
        kl = evidence.states[checkpoint].kl * longer
        if view:
            by = evidence.windows[view]
            kl += evidence.states[f"fp32,{view}"].kl * by[min(window, 16)] / by[16]
        moved = traffic(spec, "replay", window=window, checkpoint=checkpoint, view=view).total
        assert kl > found.allowed or moved >= found.nbytes, (checkpoint, view)


@kinds
def test_no_measured_pair_exceeds_the_sum_of_its_parts(kind: str) -> None:
    """Checkpoint and view together err no more than each alone, to four standard errors."""
    evidence = Evidence.of(kind)
    for checkpoint, view in itertools.product(("fp16", "fp8"), ("fp8", "nvfp4")):
        both = evidence.states[f"{checkpoint},{view}"]
        parts = [evidence.states[checkpoint], evidence.states[f"fp32,{view}"]]
        spread = math.hypot(both.error, *(part.error for part in parts))
        assert both.kl < sum(part.kl for part in parts) + 4 * spread, (checkpoint, view)


@kinds
def test_bytes_alone_give_the_least_error_that_they_allow(kind: str) -> None:
    """More bytes never give more error; both bounds hold where both are given."""
    spec = KINDS[kind]
    plain = traffic(spec, "plain").total
    bounds = [part * plain for part in (0.18, 0.25, 0.35, 0.65)]
    found = [recommend(spec, nbytes=most) for most in bounds]
    assert all(one.nbytes <= most for one, most in zip(found, bounds, strict=True))
    errors = [one.expected for one in found]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    assert "the least error within" in str(found[0])
    both = recommend(spec, error="loose", nbytes=0.2 * plain)
    assert both.expected <= both.allowed and both.nbytes <= 0.2 * plain
    with pytest.raises(ValueError, match="no recorded state keeps error"):
        recommend(spec, error="exact", nbytes=0.2 * plain)


@kinds
def test_nearest_is_for_lengths_that_were_measured(kind: str) -> None:
    """Its bias may add up faster than the formula says: not beyond the evidence."""
    tokens = Evidence.of(kind).tokens
    short, long = (recommend(KINDS[kind], tokens=n) for n in (tokens, tokens + 1))
    assert short.rounding == "nearest" and short.state.endswith(":nearest")
    assert long.rounding == "stochastic"
    assert short.expected <= long.expected


@kinds
def test_it_says_what_it_rests_on(kind: str) -> None:
    """One sentence with the formats, the bytes, and the figure that was measured."""
    found = recommend(KINDS[kind])
    said = str(found)
    for text in (found.checkpoint, found.view or "", f"{found.of_plain:.3f}", "window 16", kind):
        assert text in said
    assert f"{found.evidence.states[found.state]} measured after 1,024 tokens" in said
    assert "\n" not in said


def test_its_options_are_a_cache_s() -> None:
    """`StateCache` takes them as they are."""
    spec = LayerSpec(2, 1, 32, 16, "scalar", True)
    found = recommend(spec, error="loose", window=8)
    cache = StateCache(spec, 2, **found.options)
    assert cache.window == 8
    assert cache.nbytes < StateCache(spec, 2, window=8).nbytes


def test_a_view_needs_a_window_that_was_measured() -> None:
    """At window 1 every step folds, and between 1 and 4 no view was measured."""
    spec = KINDS["gdn"]
    assert recommend(spec, error="loose", window=1).view is None
    assert recommend(spec, error="loose", window=4).view is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"error": "small"}, "error must be one of exact, close, loose"),
        ({"error": -1.0}, "error must be nats of KL"),
        ({"error": math.nan}, "error must be nats of KL"),
        ({"nbytes": 0}, "nbytes must be above 0"),
        ({"window": 0}, "window must be an int of at least 1"),
        ({"tokens": True}, "tokens must be an int of at least 1"),
    ],
)
def test_wrong_arguments_are_named(given: dict, message: str) -> None:
    """One error that says what is accepted."""
    with pytest.raises(ValueError, match=message):
        recommend(KINDS["gdn"], **given)


@pytest.mark.parametrize(("decay", "beta"), [("channel", True), ("scalar", False)])
def test_layers_without_evidence_are_refused(decay: str, beta: bool) -> None:
    """GLA and Lightning: nothing was measured."""
    with pytest.raises(ValueError, match="no error was measured for such a layer"):
        recommend(LayerSpec(4, 4, 32, 32, decay, False, beta))  # pyright: ignore


def test_its_evidence_is_recorded() -> None:
    """Every number of the package's record is one of benchmarks/results."""
    record = {}
    for folder in ("cpu", "h200"):
        path = RESULTS / folder / "low_precision.json"
        record |= json.loads(path.read_text("utf8")) if path.exists() else {}
    rows = record["states"]["rows"] + record["bfloat16"]["rows"]
    known = {(row["model"], row["n"], row["kl"], row["standard_error"]) for row in rows}
    for kind in KINDS:
        evidence = Evidence.of(kind)
        for one in (*evidence.states.values(), evidence.bfloat16):
            assert (kind, evidence.tokens, one.kl, one.error) in known
