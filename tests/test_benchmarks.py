"""The benchmarks on a CPU: kernels interpreted, tiny layers, times of no meaning."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest
import torch

from lazystate.ops.tables import read
from lazystate.planner import traffic
from samples import layer
from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import drift
import ncu
import run
import tune
from kernels import cases, checks, folding, jobs, low, measure, sketch, tuning
from kernels.cases import LAYERS, Case, Ceilings
from kernels.runs import Replay

CEILINGS = Ceilings(4600.0, 4260.0)
if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu


def case(kind: str = "gdn", **changes) -> Case:
    """A case that the interpreter ends soon."""
    sizes = {"heads": 2, "key_heads": 2 if kind == "kda" else 1, "key_dim": 16, "value_dim": 16}
    spec = layer(kind, torch.bfloat16, **sizes)
    return replace(Case("tiny", spec, batch=2, window=4), **changes)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few layers, and one tile height."""
    monkeypatch.setattr(Case, "copies", lambda *_: 2)
    monkeypatch.setattr(measure, "TILES", ({"block_v": 16, "warps": 1},))
    monkeypatch.setattr(tuning, "REPEATS", 2)


@pytest.mark.parametrize("tokens, kept, folds", [(1, 1, 4), (2, 1, 3), (2, 2, 2), (4, 4, 1)])
def test_a_cycle_ends_where_it_began(tokens, kept, folds):
    """A period of steps folds every row once and leaves the phases as they were."""
    one = case(tokens=tokens, kept=kept)
    assert one.period == folds
    run = Replay(one, 1, "torch")
    run.cycle()
    before = run.cache._cursors.filled.clone()
    origin = run.cache._cursors.origin.clone()
    run.cycle()
    assert torch.equal(run.cache._cursors.filled, before)
    assert (run.cache._cursors.origin > origin).all()


def test_floors():
    """The floors of the issue: 15 reads and one read with its write, a write a snapshot."""
    one = Case("M2", LAYERS["M2"], 512)
    state = 512 * 128 * 64 * 128 * 4
    window = (15 * state / 4600 + 2 * state / 4260) / 16 / 1e3
    assert one.floor_us("replay", CEILINGS) == pytest.approx(window)
    assert one.floor_us("plain", CEILINGS) == pytest.approx(2 * state / 4260 / 1e3)
    verify = replace(one, tokens=4, kept=1)
    assert verify.period == 13
    assert verify.floor_us("snapshot", CEILINGS) == pytest.approx(5 * state / 4260 / 1e3)
    assert verify.floor_us("read", CEILINGS) == pytest.approx(state / 4600 / 1e3)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stored", [("nvfp4", None), ("fp16", "fp8")])
def test_low_precision_rows_are_checked(stored):
    """Two rows, reads alone and windows with folds, whose bytes are those of the formats."""
    checkpoint, view = stored
    one = case(checkpoint=checkpoint, view=view)
    read, window = low.rows(one, CEILINGS)
    assert read["us"] and window["us"]
    assert read["state_bytes"] == one.view_bytes < window["state_bytes"]


@pytest.mark.parametrize("map", ["pivot", "exact", pytest.param("offline", marks=SLOW)])
def test_sketch_rows_are_checked(map):
    """Windows, folds and reads of sketched states, whose bytes are those of the ranks."""
    one = case(view="sketch", rank=3, map=map)
    window, fold, read = sketch.rows(one, CEILINGS)
    assert window["us"] and fold["us"] and read["us"] and fold["plain_fold_us"]
    assert read["state_bytes"] == one.view_bytes < window["state_bytes"] < fold["state_bytes"]


def test_ranks_are_spread_around_their_mean():
    """As an allocation spreads them: few heads have many, all have one, the mean is met."""
    ranks = cases.sketch(Case("M2", LAYERS["M2"], 1, view="sketch", rank=8), 1).ranks[0]
    assert ranks.sum() == 8 * LAYERS["M2"].heads
    assert ranks.min() == 1 and ranks.max() >= 24


def test_raw_inputs_are_checked():
    """The same rows with the gates fused, conventional and replay."""
    rows = [*measure.decode(case("mamba2", prologue="mamba2"), CEILINGS)]
    assert [row["gates"] for row in rows] == ["mamba2"] * 2
    assert all(0 < row["error"] <= checks.BOUND and row["us"] for row in rows)


@pytest.mark.parametrize("kind", ["gdn", *(pytest.param(k, marks=SLOW) for k in ("mamba2", "kda"))])
def test_decode_rows_are_checked(kind):
    """Standard decoding gives a conventional and a replay row, both near the PyTorch backend."""
    plain, replay = measure.decode(case(kind), CEILINGS)
    assert (plain["method"], replay["method"]) == ("plain", "replay")
    for row in (plain, replay):
        assert 0 < row["error"] <= checks.BOUND and row["us"] > 0
        assert row["ratio"] == row["us"] / row["floor_us"]
        assert row["conventional_us"] == plain["us"]


@SLOW
def test_verify_and_fold_rows():
    """Verification has snapshots, all accepted and all rejected; folds are timed alone, too."""
    rows = [*measure.verify(case(tokens=2), CEILINGS), *measure.fold(case(), CEILINGS)]
    found = [(row["bench"], row["method"], row["kept"]) for row in rows]
    verify = [("verify", "snapshot", 2), ("verify", "replay", 2), ("verify", "replay", 1)]
    assert found == [*verify, ("fold", "replay", 1), ("read", "replay", 1)]
    assert all(row["us"] > 0 and row["error"] <= checks.BOUND for row in rows)


def test_a_wrong_kernel_gets_no_time(monkeypatch):
    """A row whose output is off has an error and no time."""
    step = Replay.step
    for factor in (1.02, float("nan")):
        monkeypatch.setattr(Replay, "step", lambda self, _=None, by=factor: step(self) * by)
        us, error = measure.time_replay(case(batch=2))
        assert us is None and not error <= checks.BOUND


def test_a_run_that_is_cut_short_says_so():
    """After the deadline nothing begins; a job that raises does not end the others."""

    def rows(given, *_):
        if given.batch == 2:
            raise RuntimeError("out of memory")
        yield {"batch": given.batch}

    todo = [jobs.Job("decode", replace(case(), batch=batch), rows) for batch in (1, 2, 3)]
    kept = []
    report = jobs.run(todo, CEILINGS, time.monotonic() + 60, kept.append)
    assert [row["batch"] for row in kept] == [1, 3]
    assert "out of memory" in report.failed[0] and not report.skipped
    assert len(jobs.run(todo, CEILINGS, time.monotonic() - 1, kept.append).skipped) == 3


def test_jobs_cover_the_issue():
    """All layers and batches; verification of T = 1..8 and 16; five windows; wanted ones first."""
    todo = jobs.jobs(["decode", "verify", "fold", "window"], list(LAYERS), [1, 256, 512])
    decode = [job.case for job in todo if job.part == "decode"]
    assert {(c.layer, c.batch) for c in decode} == {(n, b) for n in LAYERS for b in (1, 256, 512)}
    assert decode[0].batch == 512
    verify = {(job.case.layer, job.case.tokens) for job in todo if job.part == "verify"}
    assert {t for n, t in verify if n == "G2"} == {1, 2, 3, 4, 5, 6, 7, 8, 16}
    assert {n for n, t in verify if t == 4} == set(LAYERS)
    assert {job.case.window for job in todo if job.part == "window"} == {4, 8, 16, 32, 64}
    assert len({job.compiles for job in todo}) < len(todo)


def test_compiling_ahead_runs_every_kernel_once():
    """The dry run of a job goes through, and gives no rows."""
    for job in (measure.decode, measure.fold, measure.window):
        assert not list(job(case(), CEILINGS, True))
    assert not list(measure.verify(case(tokens=2), CEILINGS, True))


def test_tuning_keeps_the_fastest_that_passes(monkeypatch, capsys):
    """The fastest setting wins unless it is wrong or not repeatable: then it is refused by name."""
    one = tuning.Trial("replay", case(), ({"block_v": (8, 16)},))
    monkeypatch.setattr(tuning, "time_replay", lambda _, some: [(s, s["block_v"]) for s in some])
    found = tuning.search(one)
    assert found and (found[0]["block_v"], found[1]) == (8, 8)
    monkeypatch.setattr(tuning, "repeats", lambda _, launch, __: launch.block_v != 8)
    found = tuning.search(one)
    assert found and found[0]["block_v"] == 16
    assert "refused" in capsys.readouterr().out
    step = Replay.step
    monkeypatch.setattr(Replay, "step", lambda self, launch=None: step(self, launch) * 1.02)
    assert tuning.search(one) is None


def test_groups_of_fields_are_searched_in_turn(monkeypatch):
    """The second group starts from the best of the first; nothing is timed twice."""
    timed = []

    def time_replay(_, some):
        timed.extend(tuple(setting.values()) for setting in some)
        return [(s, 100.0 - s["block_v"] - s["warps"]) for s in some]

    monkeypatch.setattr(tuning, "time_replay", time_replay)
    monkeypatch.setattr(tuning, "replay_passes", lambda *_: "")
    groups = ({"block_v": (8, 16)}, {"warps": (1, 2, 4)})
    setting, us = tuning.search(tuning.Trial("replay", case(), groups))
    assert (setting["block_v"], setting["warps"], us) == (16, 4, 80.0)
    assert len(timed) == len(set(timed)) == 4


@SLOW
@pytest.mark.parametrize("method, tokens", [("replay", 1), ("plain", 1), ("snapshot", 2)])
def test_tuning_runs(method, tokens):
    """Candidates are compiled, timed and checked; one is found."""
    one = case(tokens=tokens, kept=tokens)
    trial = tuning.Trial(method, one, ({"block_v": (8, 16)},))
    tuning.compile_part([trial], 0, 2)
    found = tuning.search(trial)
    assert found and found[0]["block_v"] in (8, 16) and found[1] > 0


def test_trials_are_valid():
    """Plain for one token, snapshots for more; every tile divides the work."""
    todo = tuning.trials(["replay", "plain", "snapshot"], ["M1", "K1"], [1, 64], [1, 4], {})
    found = {(trial.method, trial.case.tokens) for trial in todo}
    assert found == {("replay", 1), ("plain", 1), ("replay", 4), ("snapshot", 4)}
    for trial in todo:
        settings = tuning.candidates(trial, trial.groups[0], tuning.first(trial))
        assert settings and all(tuning.valid(trial.case.spec, each) for each in settings)


def test_a_table_is_merged(tmp_path):
    """New entries take the place of old ones; the file is read back as it was written."""
    trial = tuning.Trial("plain", case(), ())
    old = tune.entry(trial, {"block_v": 8}, 9.0)
    new = tune.entry(trial, {"block_v": 16}, 8.0)
    other = tune.entry(tuning.Trial("plain", case(batch=4), ()), {"block_v": 4}, 7.0)
    tune.write(tmp_path / "gpu.json", {"gpu": "GPU"}, tune.merged([old, other], [new]))
    table = json.loads((tmp_path / "gpu.json").read_text())
    assert table["gpu"] == "GPU"
    assert [one["setting"]["block_v"] for one in table["entries"]] == [16, 4]
    assert len(read(table)) == 2


@SLOW
def test_drift_of_the_kernels(monkeypatch):
    """A short run of the GPU drift: raw folds keep FP32 rounding, a narrow checkpoint does not."""
    small = {"HEADS": 2, "KEY_DIM": 8, "VALUE_DIM": 8, "WINDOW": 4}
    for name, size in small.items():
        monkeypatch.setattr(drift, name, size)
    kinds, stored = ("GDN", "GLA"), (torch.float32, torch.bfloat16)
    rows = list(folding.rows(kinds, (torch.bfloat16,), stored, tokens=4 * drift.WINDOW))
    found = {(r["layer"], r["checkpoint"], r["fold"]): r["worst"] for r in rows}
    assert len(found) == 6
    for name in kinds:
        assert found[name, "float32", "raw"] <= 1e-6
        assert 1e-4 < found[name, "bfloat16", "raw"] < 1e-1
    assert found["GDN", "float32", "raw"] < found["GDN", "float32", "cached"] <= 2e-3
    assert len(folding.units()) == 45
    assert not list(folding.compile_unit(("GLA", torch.float32, torch.float16)))


HEAD = """\
==PROF== Connected to process 4711
==PROF== Profiling "begin_kernel" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"""
LINE = (
    '"{}","4711","python3.12","127.0.0.1","{}","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",'
    '"Command line profiler metrics","{}","{}","{}"\n'
)
COUNTS = (
    (0, "begin_kernel", "Kbyte", "12.80", "byte", "0"),
    (1, "step_kernel", "Mbyte", "1,070.50", "Gbyte", "1.07"),
    (2, "spin_kernel(long)", "Kbyte", "1", "Kbyte", "1"),
    (3, "plain_kernel", "byte", "7", "byte", "8"),
    (4, "spin_kernel(long)", "Kbyte", "1", "Kbyte", "1"),
)


def test_counters_are_read():
    """The profiler's CSV: units, thousands, steps between marks; no table is an error."""
    text = HEAD
    for number, kernel, *read_of, write_unit, written in COUNTS:
        text += LINE.format(number, kernel, "dram__bytes_read.sum", *read_of)
        text += LINE.format(number, kernel, "dram__bytes_write.sum", write_unit, written)
    first = 1_070_512_800, 1_070_000_000, ["begin_kernel", "step_kernel"]
    assert ncu.counted(text) == [first, (7, 8, ["plain_kernel"])]
    with pytest.raises(ValueError, match="no table"):
        ncu.counted("==ERROR== The user does not have permission")


def test_predicted_bytes_are_the_planners():
    """A cycle of predicted steps moves what the planner says for a token, up to the mean held."""
    one = Case("G2", LAYERS["G2"], 1)
    plan = traffic(one.spec, "replay", window=16)
    reads = [ncu.predicted(one, "read")] * 15 + [ncu.predicted(one, "fold")]
    read, written = (sum(pair) / 16 for pair in zip(*reads, strict=True))
    assert written == pytest.approx(plan.written)
    assert read == pytest.approx(plan.read, rel=1e-3)
    assert ncu.predicted(one, "plain") == (one.state_bytes, one.state_bytes)


@pytest.fixture
def pretended(monkeypatch):
    """A GPU, as far as the commands ask; what they run is interpreted, and one layer is tiny."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H0")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(run, "ceilings", lambda: CEILINGS)
    monkeypatch.setitem(LAYERS, "M1", case("mamba2").spec)


@SLOW
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_commands_write_files(pretended, monkeypatch, tmp_path, capsys):
    """run.py and tune.py from their options to their JSON; what they print names every row."""
    options = ["--layers", "M1", "--batches", "2", "--out", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--only", "decode", *options, "--date", "2026-01-02"]
    )
    run.main()
    record = json.loads((tmp_path / "h0" / "2026-01-02-kernels.json").read_text())
    assert record["meta"]["commit"] == "abc" and record["meta"]["skipped"] == []
    assert [row["method"] for row in record["rows"]] == ["plain", "replay"]
    tiles = {"block_v": (8, 16), "warps": (1,)}
    monkeypatch.setattr(tuning, "TILES", tiles)
    monkeypatch.setattr(sys, "argv", ["tune.py", "--methods", "plain", *options])
    tune.main()
    (found,) = json.loads((tmp_path / "h0.json").read_text())["entries"]
    assert found["method"] == "plain" and found["setting"]["block_v"] in (8, 16)
    printed = capsys.readouterr().out
    assert "replay" in printed and "of floor" in printed and "plain M1 B 2 T 1" in printed
