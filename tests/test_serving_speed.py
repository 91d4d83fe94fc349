"""benchmarks/serving's whole-model speed without vLLM: loads, kernels' groups, processes, rows."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import Setup, refusals
from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from serving import kernels, speed, timed
from serving.calibration import synthetic
from serving.methods import BUDGET, CYCLE, METHODS, Load
from serving.shapes import SHAPES

NANO = ("NemotronHForCausalLM",)


@pytest.mark.parametrize("load", [Load(), Load((8, 256)), Load((128, 512), 2048, 3, 8, 3, 2.5)])
def test_requests_never_reach_their_longest(load: Load) -> None:
    """With every draft accepted, and steps that are half full of prompts."""
    steps = 2 * load.batches[-1] * load.prompt / BUDGET
    steps += len(load.batches) * (2 * load.settle + (load.cycles + 1) * CYCLE)
    assert load.prompt + steps * load.tokens <= load.longest
    assert load.prompt < load.context < load.longest and load.longest % 256 == 0


def test_engines_get_the_same_but_for_the_method() -> None:
    """Graphs of exactly the batches timed; methods add their own settings alone."""
    load = Load((2, 8), drafts=3, accepted=2.0)
    given = load.settings(METHODS["stock"], 1 << 30)
    assert given["compilation_config"] == {"cudagraph_capture_sizes": [8, 32]}
    assert given["max_num_batched_tokens"] == BUDGET and given["max_num_seqs"] == 8
    assert given["speculative_config"]["synthetic_acceptance_length"] == 2.0
    assert load.settings(METHODS["exact"], 1 << 30) == given
    replay = load.settings(METHODS["vllm-replay"], 1 << 30)
    assert replay == given | {"use_replayssm": True}
    assert "speculative_config" not in Load().settings(METHODS["stock"], 1)


def test_what_the_plugin_refuses_is_not_started() -> None:
    """Reasons are support.py's own; vLLM's replay is in its newer version only."""
    for version, release in (("0.33", "0.33.0"), ("0.26", "0.26.0")):
        assert METHODS["exact"].refused(version, NANO, 0) == []
        assert METHODS["stock"].refused(version, NANO, 3) == []
        for name in ("view-fp8", "fp16-view-nvfp4", "fp16-sketch-synthetic"):
            options = Options(**METHODS[name].options or {})
            told = METHODS[name].refused(version, NANO, 3)
            assert told == refusals(Setup(release, NANO, draft_tokens=3), options)
    assert METHODS["vllm-replay"].refused("0.26", NANO, 0)
    assert METHODS["vllm-replay"].refused("0.33", NANO, 3)
    assert not METHODS["vllm-replay"].refused("0.33", NANO, 0)


@pytest.mark.parametrize("name", SHAPES)
def test_a_synthetic_calibration_fits_the_model(name: str, tmp_path: Path) -> None:
    """All recurrent layers, ranks that are spread about their mean, and it says what it is."""
    from lazystate.presets import preset
    from lazystate.sketch.files import open_calibration

    shape, path = preset(name), tmp_path / "synthetic.safetensors"
    found = open_calibration(synthetic(name, SHAPES[name], path))
    assert len(found.origin.layers) == shape.recurrent_layers
    found.check(found.origin.layers, shape.layer)
    assert found.origin.notes["synthetic"] and "synthetic" in found.origin.model
    ranks = found.allocate(8).ranks.float()
    assert 6 < ranks.mean() < 10 and ranks.std() > 1
    given = METHODS["fp16-sketch-synthetic"].given(str(path))
    assert given and Options(**given).calibration == str(path)
    assert METHODS["exact"].given("x") == {} and METHODS["stock"].given("x") is None


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_selective_scan_update_kernel", "linear attention"),
        ("_causal_conv1d_update_kernel", "linear attention"),
        ("fused_recurrent_gated_delta_rule_packed_decode_kernel", "linear attention"),
        ("_replayssm_output_only_kernel", "linear attention"),
        ("step_kernel", "linear attention"),
        ("begin_kernel", "linear attention"),
        ("nvjet_tst_128x64_64x11_2x1_v_bz_coopB_TNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "GEMM"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>",
            "attention",
        ),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("triton_red_fused_add_chunk_gated_delta_1", "rest"),
        ("triton_tem_fused_mm_3", "GEMM"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "rest"),
        ("Memcpy DtoD (Device -> Device)", "rest"),
        ("_layer_norm_fwd_1pass_kernel", "rest"),
    ],
)
def test_kernels_have_their_group(name: str, group: str) -> None:
    """Names as profilers give them."""
    assert kernels.group(name) == group


def test_groups_hold_all_time() -> None:
    """Sums over groups, and the kernels that matter, longest first."""
    times = {"step_kernel": 50.0, "nvjet_a": 30.0, "flash_fwd": 15.0, "copy": 4.5, "x": 0.5}
    sums = kernels.grouped(times)
    assert tuple(sums) == kernels.GROUPS and sum(sums.values()) == 100.0
    assert sums["linear attention"] == 50.0 and sums["rest"] == 5.0
    assert list(kernels.largest(times)) == ["step_kernel", "nvjet_a", "flash_fwd", "copy"]


class Decoding:
    """An engine that prefills two requests a step, holds so many, and gives each a token."""

    def __init__(self, holds: int) -> None:
        self.holds, self.preemptions, self.running, self.waiting = holds, 0, [], []

    def add(self, name: str, prompt: list[int], count: int) -> None:
        """Queue a request."""
        assert count > 0 and prompt[:64] == prompt[64:128]
        self.waiting.append(name)

    def abort(self, names: list[str]) -> None:
        """Forget requests."""
        self.running = [name for name in self.running if name not in names]
        self.waiting = [name for name in self.waiting if name not in names]

    def step(self) -> list[tuple[str, int]]:
        """Prefill two, and give everything that runs a token."""
        room = min(2, self.holds - len(self.running))
        new, self.waiting = self.waiting[:room], self.waiting[room:]
        self.running += new
        return [(name, 1) for name in self.running]


def test_requests_become_more_and_fewer() -> None:
    """All decode before anything is timed; those left are spaced evenly, so are their phases."""
    case = timed.Timed(Decoding(99))  # pyright: ignore
    load = Load((8, 32))
    assert case.grow(8, load) and case.decoding() == 8
    assert case.grow(32, load) and case.decoding() == 32
    assert len(set(case.lengths.values())) == 16  # two a step were prefilled
    case.shrink(8)
    assert list(case.lengths) == [f"{row}" for row in range(0, 32, 4)]
    _, tokens = case.run(5)
    assert tokens == 40
    row = timed.step_row(case, load)
    assert row["batch"] == 8 and row["kept"] == 1.0
    assert row["us_least"] <= row["us"] <= row["us_most"]


def test_a_batch_that_does_not_fit_is_left_out() -> None:
    """None of its requests stays behind; those that fitted before do."""
    engine = Decoding(12)
    case = timed.Timed(engine)  # pyright: ignore
    load = Load((4, 16))
    assert case.grow(4, load) and not case.grow(16, load)
    assert len(engine.running) == len(case.lengths) == 4 and not engine.waiting
    assert case.grow(12, load)


def test_times_come_before_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches grow while they are timed and shrink while they are profiled, as far as they fit."""

    def profiled(case: timed.Timed) -> dict:
        return {"bench": "serving_breakdown", "batch": len(case.lengths)}

    monkeypatch.setattr(timed, "breakdown_row", profiled)
    case = timed.Timed(Decoding(12))  # pyright: ignore
    found = timed.rows(case, Load((1, 4, 8, 16)), (4, 8, 16), (1, 4, 8, 16))
    assert [(row["bench"][8:], row["batch"]) for row in found] == [
        ("step", 4),
        ("step", 8),
        ("breakdown", 8),
        ("breakdown", 4),
        ("breakdown", 1),
    ]


def test_a_process_writes_a_line_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the driver's specification to rows that the driver knows as done."""

    def engine(folder: Path, settings: dict, options: dict | None) -> Decoding:
        assert folder.name == "Qwen3.5-4B" and options == {} and settings["max_num_seqs"] == 8
        made = Decoding(99)
        made.start_s, made.fits = 1.0, lambda: 9.5  # pyright: ignore
        return made

    def profiled(case: timed.Timed) -> dict:
        return {"bench": "serving_breakdown", "batch": len(case.lengths)}

    words = ["Qwen3.5-4B", "--version", "0.33", "--batches", "2", "8", "--out", "x"]
    arguments, load = speed.options().parse_args(words), Load((2, 8))
    folder = tmp_path / "Qwen3.5-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[folder.name]))
    job = speed.Job(folder.name, METHODS["exact"], (2, 8), (2, 8))
    (tmp_path / "spec").write_text(json.dumps(speed.specification(arguments, load, job, folder)))
    monkeypatch.setattr(timed, "Engine", engine)
    monkeypatch.setattr(timed, "breakdown_row", profiled)
    monkeypatch.setattr(timed, "stand_before_the_cache", int)
    monkeypatch.setattr(timed, "ENVIRONMENT", {})
    monkeypatch.setattr(sys, "argv", ["timed", str(tmp_path / "spec"), str(tmp_path / "out"), "1"])
    timed.main()
    rows = speed.lines(tmp_path / "out")
    assert [(row["bench"][8:], row["batch"]) for row in rows] == [
        ("step", 2),
        ("step", 8),
        ("breakdown", 8),
        ("breakdown", 2),
    ]
    assert all(row["fits"] == 9.5 and row["window"] == 16 for row in rows)
    left, _ = speed.jobs(arguments, load, {folder.name: folder}, rows)
    assert [each.name for each in left] == ["Qwen3.5-4B-stock"]


def test_the_cache_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte says that the engine stands there; it goes on after a line."""
    told = []

    class Executor:
        def initialize_from_config(self, configs: list) -> str:
            told.append("cache")
            return f"{configs}"

    class Input:
        def readline(self) -> str:
            told.append("line")
            return "go"

    module = type(sys)("vllm.v1.executor")
    module.Executor = Executor  # pyright: ignore
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.executor", module)
    monkeypatch.setattr(sys, "stdin", Input())
    ours, theirs = os.pipe()
    timed.stand_before_the_cache(theirs)
    assert Executor().initialize_from_config([1]) == "[1]"
    assert told == ["line", "cache"] and os.read(ours, 1) == b"r"


def test_what_is_asked_of_vllm_is_there() -> None:
    """In an installed vLLM: where an engine waits, how it counts requests, what it tells."""
    reason = "vLLM is not installed: this looks at its classes"
    engine = pytest.importorskip("vllm.v1.engine.llm_engine", reason=reason, exc_type=ImportError)
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.executor import Executor

    assert callable(Executor.initialize_from_config) and RequestOutputKind.DELTA
    for name in ("add_request", "abort_request", "step", "has_unfinished_requests"):
        assert callable(getattr(engine.LLMEngine, name))


ENGINE = """
import json, os, sys
spec = json.load(open(sys.argv[1]))
if spec == "broken":
    raise SystemExit("RuntimeError: broken")
os.write(int(sys.argv[3]), b"r")
assert sys.stdin.readline() == "go\\n"
if spec == "slow":
    import time; time.sleep(60)
open(sys.argv[2], "w").write("{}\\n")
"""


def test_engines_start_together_and_are_timed_in_turn(tmp_path: Path, capsys) -> None:
    """One that breaks and one that is too slow do not keep the others from it."""
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "__init__.py").touch()
    (tmp_path / "serving" / "timed.py").write_text(ENGINE)
    processes = []
    for model in ("broken", "good", "slow", "last"):
        job = speed.Job(model, METHODS["stock"], (1,), ())
        (tmp_path / f"{job.name}.spec").write_text(json.dumps(model))
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        processes.append(speed.Process(job, tmp_path, environment))
    ended = speed.side_by_side(processes, time.monotonic() + speed.SHORTEST + 30, 2.0)
    assert ended == {
        "broken-stock": "did not start",
        "good-stock": "done",
        "slow-stock": "stopped after 2 s",
        "last-stock": "done",
    }
    assert speed.lines(tmp_path / "good-stock.jsonl") == [{}]
    assert not speed.lines(tmp_path / "slow-stock.jsonl")
    assert "RuntimeError: broken" in capsys.readouterr().out


class Pretended:
    """A process that writes what an engine would have timed, and knows no batch above 8."""

    def __init__(self, job: speed.Job, at: Path, environment: dict[str, str]) -> None:
        self.job, self.at, self.log = job, at, at / "log"
        self.path = environment["PYTHONPATH"].split(os.pathsep)

    def started(self, seconds: float) -> bool:
        """Be ready at once."""
        return seconds > 0

    def go(self, seconds: float) -> str:
        """Write the rows."""
        assert seconds > 0
        spec = json.loads((self.at / f"{self.job.name}.spec").read_text())
        assert (spec["options"] is None) == (self.job.method.name == "stock")
        assert any("plugin" in each for each in self.path) == (spec["options"] is not None)
        us = 200.0 if spec["options"] is None else 100.0
        with (self.at / f"{self.job.name}.jsonl").open("a") as file:
            for batch in (b for b in spec["steps"] if b <= 8):
                common = spec["row"] | {"batch": batch, "fits": 9.5, "bench": "serving_step"}
                step = {"us": us, "tokens_per_s": 1e6 / us, "kept": 1.0, "context": 5}
                file.write(json.dumps(common | step) + "\n")
            for batch in (b for b in spec["breakdowns"] if b <= 8):
                common = spec["row"] | {"batch": batch, "bench": "serving_breakdown"}
                sums = dict.fromkeys(kernels.GROUPS, 1.0)
                file.write(json.dumps(common | {"groups": sums, "gpu_us": 4.0}) + "\n")
        return "done"

    def end(self) -> None:
        """Nothing runs."""


def drive(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> dict:
    words = ["speed", "Qwen3.5-4B", "--version", "0.33", "--date", "d", "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(speed, "Process", Pretended)
    speed.main()
    return json.loads((out / "d-speed.json").read_text())


def test_the_drive_writes_rows_and_goes_on(tmp_path: Path, monkeypatch, capsys) -> None:
    """Stock beside lazystate; what a file has is not timed again; what is refused is said."""
    first, second = tmp_path / "a", tmp_path / "b"
    written = drive(monkeypatch, first, "--batches", "8", "16")
    steps = [row for row in written["rows"] if row["bench"] == "serving_step"]
    assert [(row["method"], row["batch"], row["conventional_us"]) for row in steps] == [
        ("stock", 8, 200.0),
        ("exact", 8, 200.0),
    ]
    assert "2.00x" in capsys.readouterr().out
    assert (first / "speed-logs.tgz").exists()

    have = str(first / "speed.jsonl")
    more = ("--batches", "8", "1", "--resume", have, "--methods", "stock", "exact")
    written = drive(monkeypatch, second, *more)
    steps = [row for row in written["rows"] if row["bench"] == "serving_step"]
    assert {(row["method"], row["batch"]) for row in steps} == {
        (method, batch) for method in ("stock", "exact") for batch in (8, 1)
    }
    lines = speed.lines(second / "speed.jsonl")
    assert len(lines) == 8 == len({speed.key(row) for row in lines})
    assert written["meta"]["failed"] == []


@pytest.mark.parametrize("name", SHAPES)
def test_a_refused_method_has_its_reason(name: str, tmp_path: Path, monkeypatch) -> None:
    """vLLM 0.26 has no replay of its own."""
    words = ["speed", name, "--version", "0.26", "--date", "d", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--methods", "vllm-replay"])
    monkeypatch.setattr(speed, "Process", Pretended)
    speed.main()
    (reason,) = json.loads((tmp_path / "d-speed.json").read_text())["meta"]["refused"]
    assert reason.startswith(f"{name}-vllm-replay: vLLM 0.26 has no use_replayssm")
