"""The benchmarks on a CPU: kernels interpreted, tiny layers, times of no meaning."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch

from lazystate.ops.tables import read
from lazystate.ops.triton.launch import default_launch
from samples import layer
from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import tune
from kernels import checks, jobs, measure, tuning
from kernels.cases import LAYERS, Case, Ceilings
from kernels.runs import Replay

CEILINGS = Ceilings(4600.0, 4260.0)
if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu


def case(kind: str = "gdn", **changes) -> Case:
    """A case that the interpreter ends soon."""
    spec = layer(kind, torch.bfloat16, key_dim=16, value_dim=16)
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
    one = tuning.Trial("replay", case(), settings_of(case().spec))
    times = [(setting, 10.0 + n) for n, setting in enumerate(one.settings)]
    monkeypatch.setattr(tuning, "time_replay", lambda _: times)
    assert tuning.search(one) == times[0]
    monkeypatch.setattr(tuning, "repeats", lambda _, launch, __: asdict(launch) != times[0][0])
    assert tuning.search(one) == times[1]
    assert "refused" in capsys.readouterr().out
    step = Replay.step
    monkeypatch.setattr(Replay, "step", lambda self, launch=None: step(self, launch) * 1.02)
    assert tuning.search(one) is None


def settings_of(spec) -> tuple:
    """Two tile heights over the default setting."""
    start = asdict(default_launch(spec, 2))
    return tuple(tuning.combinations({"block_v": (8, 16)}, start))


@SLOW
@pytest.mark.parametrize("method, tokens", [("replay", 1), ("plain", 1), ("snapshot", 2)])
def test_tuning_runs(method, tokens):
    """Candidates are compiled, timed and checked; one is found."""
    one = case(tokens=tokens, kept=tokens)
    tiles = tuple({"block_v": height, "warps": 1} for height in (8, 16))
    trial = tuning.Trial(method, one, settings_of(one.spec) if method == "replay" else tiles)
    tuning.compile_part([trial], 0, 2)
    setting, us = tuning.search(trial)
    assert setting in trial.settings and us > 0


def test_trials_are_valid():
    """Plain for one token, snapshots for more; every tile divides the work."""
    todo = tuning.trials(["replay", "plain", "snapshot"], ["M1", "K1"], [1, 64], [1, 4], {})
    found = {(trial.method, trial.case.tokens) for trial in todo}
    assert found == {("replay", 1), ("plain", 1), ("replay", 4), ("snapshot", 4)}
    assert all(trial.settings for trial in todo)
    assert all(tuning.valid(t.case.spec, setting) for t in todo for setting in t.settings)


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
