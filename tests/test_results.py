"""Tables and plots of the kernels' numbers, from made-up results that have every kind of row."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import plots
import readme
import serving_page
import tables
from kernels.cases import LAYERS, VERIFY, WINDOWS, Case, Ceilings, row

CEILINGS = Ceilings(4600.0, 4260.0)
META = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "commit": "abc", "date": "2026-12-01"}


def made_up() -> list[dict]:
    """Every time is its floor and a half, a conventional one of vLLM's twice the floor."""
    rows = []

    def add(case: Case, bench: str, method: str, by: float = 1.5, kind: str = "", **more) -> None:
        floor = case.floor_us(kind or method, CEILINGS)
        rows.append(row(case, bench, method, by * floor, floor_us=floor, error=1e-3, **more))

    for name, spec in LAYERS.items():
        case = Case(name, spec, 256)
        for batch in (1, 256):
            for method in ("plain", "replay"):
                add(replace(case, batch=batch), "decode", method)
        add(case, "decode", "plain", 2.0, impl="vllm", launch="default")
        for length in WINDOWS:
            add(replace(case, window=length), "window", "replay")
        for bench in ("fold", "read"):
            add(case, bench, "replay", kind=bench)
        for tokens in VERIFY:
            add(replace(case, tokens=tokens, kept=tokens), "verify", "snapshot")
            for kept in {tokens, 1}:
                add(replace(case, tokens=tokens, kept=kept), "verify", "replay")
        counted = dict.fromkeys(("read", "written", "planned_read", "planned_written"), 2_000_000)
        rows.append({"bench": "ncu", "layer": name, "batch": 256, "step": "fold", "ratio": 1.0})
        rows[-1] |= counted
    for method, us in (("stock", 300.0), ("exact", 200.0)):
        kind = {"model": "Qwen3.5-4B", "vllm": "0.33.0", "method": method, "tokens": 1, "fits": 9.0}
        kind |= {"impl": "stock" if method == "stock" else "lazystate", "batch": 8}
        speed = {"us": us, "tokens_per_s": 1 / us, "conventional_tokens_per_s": 1 / 300.0}
        rows.append({"bench": "serving_step"} | kind | speed)
        spent = {"gpu_us": 100.0, "groups": {"GEMM": 60.0, "attention": 40.0}}
        rows.append({"bench": "serving_breakdown"} | kind | spent)
    trend = {"worst": 1e-7, "mean": 1e-7, "growth": 0.01, "t": 0.3}
    kind = {"layer": "GDN", "activation": "bfloat16", "checkpoint": "float32", "fold": "raw"}
    return [*rows, {"bench": "drift", **kind, **trend}]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results, found in place of the real ones."""
    (tmp_path / "h200").mkdir()
    old, new = {**META, "date": "2026-11-30"}, {**META, "read_gbs": 4600.0, "copy_gbs": 4260.0}
    wrong = [{**one, "us": 1e6} if "us" in one else one for one in made_up()]
    for meta, rows in ((old, wrong), (new, made_up())):
        path = tmp_path / "h200" / f"{meta['date']}-kernels.json"
        path.write_text(json.dumps({"meta": meta, "rows": rows}))
    monkeypatch.setattr(tables.newest, "__defaults__", ("lazystate", tmp_path))
    return tmp_path


def test_every_table_is_made_from_the_newest_numbers(results):
    """All tables have lines, from the file of the later date, with ratios to the floor."""
    for name, table in tables.TABLES.items():
        text = table()
        assert text.count("\n") > 3 and "2026-11-30" not in text, name
    assert "| M2 | 256 | 756.2 | 1.50 |" in tables.decode()
    assert "| 2.00 |" in tables.peers() and "4,600 GB/s" in tables.peers()
    assert tables.traffic().count("| 2 | 2 | 2 | 2 | 1.000 |") == len(LAYERS)
    assert "| GDN | bfloat16 | raw | 1.0e-07 | +1.0% | - | - | - | - | +0.3 |" in tables.drift()
    assert readme.speed().count("\n") > len(LAYERS)
    assert "| 0.33.0 | 1 | exact | 0.20 (1.50x) | 9 |" in serving_page.speed()


def test_nothing_measured_is_said(results):
    """Without rows a table says so."""
    for path in results.glob("h200/*"):
        path.unlink()
    assert {table() for table in tables.TABLES.values()} == {tables.NOTHING}
    assert serving_page.speed() == tables.NOTHING
    assert all(draw() is None for draw in plots.PLOTS.values())


def test_plots_carry_their_numbers(results, monkeypatch):
    """All plots are drawn, and a change of a number is noticed."""
    monkeypatch.setattr(plots, "FOLDER", results / "plots")
    monkeypatch.setattr(sys, "argv", ["plots.py"])
    plots.main()
    assert {path.stem for path in (results / "plots").iterdir()} == set(plots.PLOTS)
    monkeypatch.setattr(sys, "argv", ["plots.py", "--check"])
    plots.main()
    newest = results / "h200" / "2026-12-01-kernels.json"
    newest.write_text(newest.read_text().replace('"error": 0.001', '"error": 0.002', 1))
    with pytest.raises(SystemExit, match="behind its numbers"):
        plots.main()
