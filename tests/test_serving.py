"""benchmarks/serving without vLLM: converted folders, cases, prompts and what is said of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from lazystate.shipped import model_folder, models
from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from lazystate.engines.vllm.options import Options
from serving import drive, folders, judge, prompts
from serving.cases import TOKENS, Case, cases
from serving.shapes import SHAPES


@pytest.mark.parametrize("version", ["0.26", "0.33"])
@pytest.mark.parametrize("model", models())
def test_weights_keep_their_values(model: str, version: str, tmp_path: Path) -> None:
    """Every weight is there under one name, with the same bytes."""
    folder = folders.shipped(model, version, tmp_path)
    old, new = (load_file(at / "model.safetensors") for at in (model_folder(model), folder))
    wrapped = (model, version) == ("gdn", "0.26")
    assert len(new) == len(old)
    for name, weight in old.items():
        assert new[f"model.language_{name}" if wrapped else name].equal(weight)


def test_the_pattern_is_that_of_the_layers(tmp_path: Path) -> None:
    """transformers reads the converted Mamba-2 config as the same layers."""
    old = AutoConfig.from_pretrained(model_folder("mamba2"))
    new = AutoConfig.from_pretrained(folders.shipped("mamba2", "0.33", tmp_path))
    assert new.layers_block_type == old.layers_block_type
    for name in ("n_groups", "conv_kernel", "chunk_size", "mamba_head_dim", "ssm_state_size"):
        assert getattr(new, name) == getattr(old, name)


def test_names_of_classes(tmp_path: Path) -> None:
    """0.26 has Qwen3.5 with a vision tower only; the text is inside, unchanged."""
    config = json.loads((folders.shipped("gdn", "0.26", tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    text = json.loads((folders.shipped("gdn", "0.33", tmp_path) / "config.json").read_text())
    assert text["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["text_config"] == text and text["mamba_ssm_dtype"] == "float32"
    with pytest.raises(ValueError, match="model must be one of"):
        folders.shipped("gpt", "0.33", tmp_path)


def test_shapes_are_the_presets() -> None:
    """The recurrent layers are those that the planner knows by the same name."""
    from lazystate.presets import preset, shape_from_config

    for name, config in SHAPES.items():
        found, known = shape_from_config(config), preset(name)
        assert found.layer == known.layer and found.recurrent_layers == known.recurrent_layers
        assert found.attention_layers == known.attention_layers


@pytest.mark.parametrize("model", models())
def test_prompts_fit(model: str) -> None:
    """Prompts and continuations are within the engine's longest; the same every time."""
    text = prompts.encoded(model)
    first, again = prompts.various(text), prompts.various(text)
    assert first == again and len(first) == 64
    family = prompts.related(text)
    assert family[0][:600] == family[8][:600] != family[1][:600]
    assert family[0] != family[8]
    for case in cases(model):
        longest = case.settings(model)["max_model_len"]
        assert max(map(len, first + family)) + TOKENS <= longest
    assert len({case.name for case in cases(model)}) == len(cases(model))
    assert sum(count for _, count in prompts.short(text)) > 10_000


def run(tokens: list[list[int]], by: float = 0.0, margin: float = 0.5) -> dict:
    """A run's record."""
    logprobs = [[-1.0 + by] * len(row) for row in tokens]
    margins = [[margin] * len(row) for row in tokens]
    numbers = {"steps": 3, "seconds": 1.0, "tokens_a_step": 1.0}
    counts = {"preemptions": 0, "cached": 0, "blocks_kept": 0}
    return {"tokens": tokens, "logprobs": logprobs, "margins": margins, **numbers, **counts}


def test_parting_is_found() -> None:
    """Equal rows, a row that parts, and how far the numbers were apart until then."""
    old, new = run([[1, 2, 3], [4, 5, 6]]), run([[1, 2, 3], [4, 7, 6]], by=0.25)
    found = judge.compare(old, new)
    assert (found["same"], found["first"], found["mean"]) == (1, 1, 1)
    assert (found["drift"], found["margin"]) == (0.25, 0.5)
    shorter = judge.compare(old, run([[1, 2, 3], [4, 5]]))
    assert (shorter["same"], shorter["first"]) == (1, 2)
    assert judge.compare(None, new)["same"] is None


def record(engine: str, case: Case, runs: dict) -> dict:
    """A process's file."""
    kept = {"case": case.as_json(), "vllm": "0.33.0", "torch": "2", "gpu": "H0"}
    return {"model": "gdn", "engine": engine, "runs": runs, **kept}


def test_rows_have_the_right_reference() -> None:
    """The same prompts are compared with stock all at once; others with stock's same run."""
    exact, leak = Case("exact", "float16"), Case("leak", "float16", ("short",))
    texts, counted = [[1, 2], [3, 4]], [[5], [6]]
    records = [
        record("stock", exact, {"together": run(texts), "eights": run([[1, 2], [3, 5]])}),
        record("lazystate", exact, {"together": run(texts)}),
        record("stock", leak, {"short": run(counted)}),
        record("lazystate", leak, {"short": run([[5], [7]])}),
    ]
    found = {(r["impl"], r["case"], r["traffic"]): r["same"] for r in judge.rows(records)}
    assert found["stock", "exact", "together"] is None
    assert found["stock", "exact", "eights"] == 1
    assert found["lazystate", "exact", "together"] == 2
    assert found["lazystate", "leak", "short"] == 1
    lines = judge.table(judge.rows(records)).splitlines()
    assert len(lines) == 6 and "1/2" in lines[2]


def test_the_plugin_is_found_without_an_installation(tmp_path: Path) -> None:
    """A folder on the path is enough for Python to list the entry point."""
    from importlib.metadata import distributions

    try:
        folder = drive.plugin(tmp_path)
    except SystemExit as error:
        pytest.skip(str(error))
    (found,) = distributions(path=[str(folder)])
    assert [point.group for point in found.entry_points] == ["vllm.general_plugins"]
    assert found.entry_points[0].value.startswith("lazystate.engines.vllm")


@pytest.mark.parametrize("model", models())
def test_views_are_cases_of_lazystate_with_options_of_its_own(model: str) -> None:
    """One word names them all, and the engine's options take what they ask for."""
    chosen = [case for case in cases(model) if drive.asked(case, ["views", "exact"])]
    assert len(chosen) > 4 and chosen[0].name == "exact"
    for case in chosen[1:]:
        spec = drive.specification(
            drive.Job(model, "lazystate", case), "0.33", Path(model), {"window": 8}
        )
        options = Options(**spec["options"])
        assert (options.window, options.view) == (8, case.name.split("-")[1])


def test_drafts_with_prefixes_are_served_where_they_can_be() -> None:
    """By vLLM's second runner; 0.26 keeps states at the ends of blocks, as lazystate does."""
    named = {case.name: case for case in cases("gdn") if drive.asked(case, ["prefix"])}
    assert set(named) == {"prefix", "prefix-ngram"}
    both = named["prefix-ngram"]
    assert drive.possible("lazystate", both, "0.33") and drive.possible("stock", both, "0.26")
    assert not drive.possible("lazystate", both, "0.26")
    for version, mode in (("0.26", "align"), ("0.33", None)):
        job = drive.Job("gdn", "lazystate", named["prefix"])
        settings = drive.specification(job, version, Path("m"), {})["settings"]
        assert settings.get("mamba_cache_mode") == mode


def test_a_second_turn_goes_on_from_what_the_first_has_written() -> None:
    """Prompts of the second round are those of the first, their answers, and a few tokens."""
    from serving import run_case

    served: list = []

    class Echo:
        free = preemptions = 0

        def serve(self, requests, **_):
            served.append(requests)
            for one in requests:
                one.tokens = [7] * one.count
            return {"steps": 1, "seconds": 1.0, "tokens_a_step": 1.0}

    case = Case("prefix", "float16", ("turns",), caching=True)
    found = run_case.turns(Echo(), list(range(4000)), case)  # type: ignore[arg-type]
    first, second = served
    assert second[3].prompt[: len(first[3].prompt) + TOKENS] == first[3].prompt + [7] * TOKENS
    assert len(found["tokens"]) == 128 and len(second[3].prompt) > len(first[3].prompt) + TOKENS


def test_the_drive_writes_rows(tmp_path: Path, monkeypatch, capsys) -> None:
    """From options to files, with processes that write what an engine would have."""

    def pretend(job, spec, at, *_):
        case = Case(**{**spec["case"], "traffic": tuple(spec["case"]["traffic"])})
        runs = {name: run([[1, 2], [3, 4]]) for name in case.traffic}
        if job.model == "kda":
            return "failed with 1"
        (at / f"{job.name}.json").write_text(json.dumps(record(job.engine, case, runs)))
        return "done"

    monkeypatch.setattr(drive, "run", pretend)
    words = ["gdn", "kda", "--version", "0.33", "--engines", "stock", "--cases", "exact", "eager"]
    monkeypatch.setattr(sys, "argv", ["drive", *words, "--date", "d", "--out", str(tmp_path)])
    drive.main()
    written = json.loads((tmp_path / "d-serving.json").read_text())
    assert written["meta"]["failed"] == [
        "kda-stock-exact: failed with 1",
        "kda-stock-eager: failed with 1",
    ]
    assert {row["traffic"] for row in written["rows"]} >= {"together", "sizes"}
    assert (tmp_path / "serving.tgz").exists()
    assert "gdn-stock-exact: done" in capsys.readouterr().out
