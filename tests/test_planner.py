"""The planner: ReplaySSM's printed figures, and what the cache counts."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lazystate import LayerSpec, StateCache, count_traffic, planner
from lazystate.planner import HeadBytes, Record
from lazystate.presets import PRESETS, preset
from samples import KINDS, draw, layer, slots

FORMATS = [
    {"checkpoint": "fp16", "view": "nvfp4"},
    {"checkpoint": "fp8", "view": "int2"},
    {"checkpoint": "nvfp4"},
]
SUPER = HeadBytes.of(key_dim=128, value_dim=64)


def test_replay_moves_058_of_conventional():
    """ReplaySSM C.3: ratio 0.58 at L = 16 for Nemotron-3-Super's head."""
    assert SUPER.replay(16) / SUPER.conventional(16) == pytest.approx(0.58, abs=0.005)


def test_state_is_84_records():
    """ReplaySSM C.5: M_S / r = 84."""
    assert round(SUPER.state / SUPER.record) == 84


def test_best_windows_of_the_paper():
    """ReplaySSM C.5: L* about 13, and about 24 with T = 4 of which 3.5 are kept."""
    assert round(SUPER.best_window()) == 13
    assert round(SUPER.best_window(tokens=4, kept=3.5)) == 24


def test_equation_15_is_equation_13_for_one_token():
    """f(L) = M_replay / L where T = a = 1."""
    for window in (4, 13, 64):
        assert SUPER.replay_per_token(window) == pytest.approx(SUPER.replay(window) / window)


def test_best_window_minimises_equation_15():
    """Of the whole windows, those next to Eq. 16 move the fewest bytes by Eq. 15."""
    for tokens, kept in ((1, 1.0), (4, 3.5), (8, 2.0)):
        best = SUPER.best_window(tokens, kept)
        moved = {w: SUPER.replay_per_token(w, tokens, kept) for w in range(tokens, 200)}
        least = min(moved, key=moved.__getitem__)
        assert abs(least - best) < 1


def test_crossover_with_attention():
    """ReplaySSM C.2: 81,920 tokens for Nemotron-3-Super."""
    assert planner.crossover_tokens(preset("Nemotron-3-Super-120B")) == 81_920


def test_arithmetic_intensity():
    """ReplaySSM C.1: about 0.63 FLOP per byte for FP32, 1.25 for FP16."""
    assert planner.arithmetic_intensity(128, 64) == pytest.approx(0.63, abs=0.01)
    assert planner.arithmetic_intensity(128, 64, 2) == pytest.approx(1.25, abs=0.01)


@pytest.mark.parametrize(
    ("method", "least", "most"),
    [
        ("vLLM snapshots", 3.2, 9.7),
        ("The Mamba in the Llama", 3.2, 3.2),
        ("Snakes and Ladders, Activation Replay", 6.4, 6.4),
        ("Snakes and Ladders, Joint Attainment", 7.5, 7.5),
        ("STree, algorithm", 3.2, 3.2),
        ("STree, released path", 9.7, 9.7),
        ("ReplaySSM, no fold", 1.1, 1.1),
        ("ReplaySSM, fold", 2.1, 2.1),
    ],
)
def test_table_3(method, least, most):
    """ReplaySSM Table 3, model column: GB at B = 256, T = 2 and 8."""
    state = 4 * planner.state_elements(preset("Nemotron-3-Super-120B").layer)
    assert state == 4 * 2**20
    for tokens, printed in ((2, least), (8, most)):
        assert round(256 * planner.verify_bytes(method, state, tokens) / 1e9, 1) == printed


@pytest.mark.parametrize("fold", ["raw", "cached"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "kept"), [(1, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("formats", [{}, *FORMATS], ids=str)
def test_predicts_what_the_cache_counts(kind, fold, tokens, kept, formats):
    """Counted bytes over whole fold cycles are the predicted ones, exactly."""
    spec = layer(kind, torch.float32)
    if formats.get("view") and spec.erase:
        fold = "raw"  # the one that a view allows
    cache = StateCache(spec, 1, window=8, max_tokens=tokens, fold=fold, **formats)
    cache.load(slots(0), [torch.randn(1, *spec.state_shape)])

    def steps(until: int) -> None:
        """Steps, up to and including the one that folds for the `until`-th time from now."""
        while until:
            ticket = cache.begin(slots(0), tokens)
            cache.step(ticket, 0, *draw(spec, 1, tokens))
            until -= int(ticket._rows.folding.numel())
            cache.commit(ticket, slots(kept))

    steps(1)
    with count_traffic() as counted:
        steps(3)
    options = {"window": 8, "tokens": tokens, "kept": kept, "fold": fold}
    moved = planner.traffic(spec, "replay", **options, **formats)
    assert counted.read / counted.tokens == pytest.approx(moved.read, rel=1e-12)
    assert counted.written / counted.tokens == pytest.approx(moved.written, rel=1e-12)


@pytest.mark.parametrize("fold", ["raw", "cached"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formats", [{}, *FORMATS], ids=str)
def test_slot_bytes_are_what_the_cache_allocates(kind, fold, formats):
    """Memory of a request, cursors excluded (33 bytes, shared by all layers)."""
    spec = layer(kind, torch.bfloat16, conv_channels=7, conv_width=4)
    if formats.get("view") and spec.erase:
        fold = "raw"
    cache = StateCache(spec, 3, window=8, max_tokens=3, fold=fold, **formats)
    planned = planner.slot_bytes(spec, "replay", window=8, tokens=3, fold=fold, **formats)
    assert cache.nbytes_per_slot - 33 == planned


@pytest.mark.parametrize(("tokens", "kept"), [(1, 1.0), (4, 3.5), (8, 2.0)])
def test_best_window_is_the_least_of_all(tokens, kept):
    """No window moves fewer bytes than the best one."""
    for shape in PRESETS.values():
        spec, step = shape.layer, {"tokens": tokens, "kept": kept}
        moved = {
            window: planner.traffic(spec, "replay", window=window, **step).total
            for window in range(tokens, 65)
        }
        assert moved[planner.best_window(spec, **step)] == min(moved.values())


@pytest.mark.parametrize(("tokens", "kept", "window"), [(2, 1.5, 16), (4, 2.2, 16), (8, 3.3, 32)])
def test_a_mean_acceptance_stands_for_a_random_one(tokens, kept, window):
    """Steps that keep all tokens or one, at random: 2% from the prediction, which knows the mean.

    Only when a step folds depends on more than the mean: less than T records of a window.
    """
    spec = preset("Qwen3.5-4B").layer
    record, state = Record.of(spec), 4 * planner.state_elements(spec)
    generator = random.Random(0)
    held = moved = committed = 0
    for _ in range(50_000):
        due = held + tokens > window
        moved += state * (1 + due) + held * (record.read + record.raw * due)
        moved += tokens * record.total
        step = tokens if generator.random() < (kept - 1) / (tokens - 1) else 1
        committed, held = committed + step, (0 if due else held) + step
    predicted = planner.traffic(spec, "replay", window=window, tokens=tokens, kept=kept).total
    assert predicted == pytest.approx(moved / committed, rel=0.02)


def test_memory_grows_with_window_and_tokens():
    """Each record more costs its bytes, and a longer step never less memory."""
    for shape in PRESETS.values():
        sizes = [planner.slot_bytes(shape.layer, "replay", window=w) for w in range(1, 33)]
        steps = {later - earlier for earlier, later in itertools.pairwise(sizes)}
        assert steps == {Record.of(shape.layer).total}
        for method in ("snapshot", "replay"):
            longer = [planner.slot_bytes(shape.layer, method, tokens=t) for t in range(1, 9)]
            assert longer == sorted(set(longer))


def test_a_plan_prints_as_one_line():
    """Method, window, bytes, time, memory and batch, for a reader."""
    shape = preset("Qwen3.5-4B")
    made = planner.plan(shape, "replay", batch=8, read_gbs=4600, copy_gbs=4260, window=16)
    assert str(made).startswith("replay (T = 1, window 16): ") and "requests" not in str(made)
    made = planner.plan(
        shape, "plain", batch=8, read_gbs=4600, copy_gbs=4260, free_bytes=made.request_bytes * 9
    )
    assert "window" not in str(made) and str(made).endswith("at most 10 requests")


def test_snapshots_cost_a_state_a_token():
    """Conventional verification reads one state and writes T, and keeps 1 + T."""
    spec: LayerSpec = preset("Qwen3.5-4B").layer
    state = 4 * planner.state_elements(spec)
    assert planner.traffic(spec, "snapshot", tokens=4, kept=2).total == 5 * state / 2
    assert planner.slot_bytes(spec, "snapshot", tokens=4) > 5 * state


def test_a_smaller_view_is_read_between_folds():
    """A view of no bytes leaves the folds and the records."""
    spec = preset("Nemotron-3-Super-120B").layer
    full = planner.traffic(spec, "replay", window=16)
    none = planner.traffic(spec, "replay", window=16, view=planner.Viewed("nothing", 0, 0))
    state = 4 * planner.state_elements(spec)
    assert full.read - none.read == pytest.approx(15 / 16 * state)


def test_formats_by_hand():
    """Nemotron-3-Super's layer, L = 16: FP16 checkpoint and NVFP4 view, counted by hand."""
    spec = preset("Nemotron-3-Super-120B").layer
    n, record = planner.state_elements(spec), Record.of(spec).total
    view, state = spec.heads * (64 * 128 // 2 + 64 * 8 + 4), 2 * n
    moved = planner.traffic(spec, "replay", window=16, checkpoint="fp16", view="nvfp4")
    records = 16 * 17 / 2 / 16  # held by the steps of a window, 1 to 16, of which folds read all
    assert moved.read == pytest.approx(15 / 16 * view + state / 16 + records * record)
    assert moved.written == pytest.approx((state + view) / 16 + record)
    full = planner.traffic(spec, "replay", window=16)
    assert moved.total < full.total / 3
    longer = planner.best_window(spec, checkpoint="fp32", view="nvfp4")
    assert longer > planner.best_window(spec, checkpoint="nvfp4")
    with pytest.raises(ValueError, match="view must be one of"):
        planner.traffic(spec, "replay", view="fp6")


def test_step_time_pairs_reads_with_writes():
    """A byte read and written costs two at copy speed; the rest is read."""
    assert planner.step_us(3e9, 1e9, 2000, 1000) == pytest.approx(1e3 * (2 / 2 + 2 / 1))


@pytest.mark.parametrize(("tokens", "kept"), [(0, 1), (17, 1), (4, 0.5), (4, 5)])
def test_refuses_what_cannot_be(tokens, kept):
    """Tokens above the window, or kept outside 1..T, are named."""
    with pytest.raises(ValueError, match="must be 1 to"):
        planner.traffic(preset("Qwen3.5-4B").layer, "replay", tokens=tokens, kept=kept)


def test_record_without_erase_is_read_whole():
    """Mamba-2 has no cached correction: a step reads all of a record, and a fold nothing more."""
    record = Record.of(preset("Nemotron-3-Super-120B").layer)
    assert record.read == record.total == 8 * 128 * 2 + 128 * 64 * 2 + 2 * 128 * 4
