"""docs/sketch.md keeps its word: its code runs, its commands exist, its tables are of numbers."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
import typer

from lazystate import shipped
from lazystate.cli import app
from lazystate.sketch.calibration_file import text_fingerprint
from lazystate.sketch.files import open_calibration
from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import sketch
import sketch_page
import sketch_rows
import sketch_text
from sketch_rows import Evidence, Ratio, ratio, verdict

PAGE = (ROOT / "docs" / "sketch.md").read_text("utf8")
COMMANDS = re.findall(r"^lazystate .*$", PAGE, re.MULTILINE)
ABOUT = {"device": "cpu", "torch": "2", "transformers": "5", "commit": "abc", "streams": 3}
ABOUT |= {"prompt": 512, "context": 256, "examples": 4}


def made_up(configs: dict[str, float], model: str = "gdn", part: str = "main") -> list[dict]:
    """Rows with these KL at the last N, and their multiples by stream."""
    rows = []
    for config, kl in configs.items():
        streams = [kl * by for by in (0.9, 1.0, 1.1)]
        point = {"n": 64, "kl": kl, "standard_error": kl / 10, "streams": streams, "top": 0.9}
        row = {"model": model, "part": part, "config": config, "window": 16, "share": 0.2}
        row |= {"bytes": 100.0 * (1 + len(rows)), "points": [{**point, "n": 16}, point]}
        rows.append(row)
    return rows


def everything() -> dict:
    """A record with every configuration of one model."""
    found = open_calibration("gdn")
    rows = made_up({name: 0.5 + i for i, name in enumerate(sketch.configurations(found, "torch"))})
    rows += made_up(dict.fromkeys(sketch.LONG, 2.0), part="long")
    answers = {"recall": dict.fromkeys(sketch.retrieval.TASKS, 0.5), "copied": 0.25}
    rows[0] |= {**answers, "tokens": [57, 57, 114, 114]}
    rows[1]["predicted"] = {"heads": 0.5, "windows": None, "outputs": 0.25, "recent": -0.5}
    return {**ABOUT, "tokens": [64], "runs": rows}


def test_its_code_runs() -> None:
    """The example is right as printed."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "sketch.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_understood(command, tmp_path, monkeypatch):
    """Every command line has arguments and options that there are."""
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "mine.safetensors"):
        Path(name).touch()
    chosen = typer.main.get_command(app)
    context, rest = None, shlex.split(command)[1:]
    while hasattr(chosen, "commands"):
        name, *rest = rest
        chosen = chosen.commands[name]  # pyright: ignore (a group)
    context = chosen.make_context("command", rest)
    assert not context.args


def test_its_tables_are_generated() -> None:
    """Tables and plot are what the script makes of the recorded numbers."""
    script = ROOT / "benchmarks" / "sketch_page.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_its_pictures_are_small() -> None:
    """Every picture exists and has less than 150 KB."""
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / "docs" / picture).stat().st_size < 150_000


def test_calibrations_are_not_of_the_evaluated_books() -> None:
    """As the page says, by their fingerprints."""
    books = [shipped.book(name) for name in shipped.books()]
    orders = [order for count in (1, 2) for order in permutations(books, count)]
    seen = {text_fingerprint(texts) for texts in orders}
    texts = {open_calibration(model).origin.text for model in shipped.models()}
    assert "" not in texts and not texts & seen


def test_every_table_has_all_that_is_measured() -> None:
    """A whole record fills every table; one model's absence is said."""
    found = Evidence(everything())
    tables = {name: table(found) for name, table in sketch_page.TABLES.items() if name != "text"}
    for name, text in tables.items():
        assert text.count("\n") >= 3 and sketch_rows.ABSENT not in text, name
    assert "Not measured yet: kda, mamba2." in tables["ranks"]
    assert "| 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 1.00 | 0.25 | 85.5 | 0.50 |" in tables["tasks"]
    assert "| gdn | sketch 2 | 0.50 | - | 0.25 | -0.50 |" in tables["prediction"]


def test_what_is_not_measured_is_said(monkeypatch) -> None:
    """Without a run, and with one that has only begun."""
    monkeypatch.setattr(sketch_page, "record", lambda _: None)
    static = {"costs", "layout", "retained", "text"}
    for name, table in sketch_page.TABLES.items():
        assert (table(Evidence(None)) == sketch_page.NOT_YET) == (name not in static)
        table(Evidence({**ABOUT, "runs": made_up({"fp32": 1e-12, "sketch 4": 0.5})}))
    begun = Evidence({**ABOUT, "runs": made_up({"sketch 4": 0.5})})
    assert sketch_rows.ABSENT in sketch_page.findings_table(begun)
    assert begun.models == ["gdn"] and begun.ratio("gdn", "sketch 4", "exact map") is None


def test_calibration_texts_differ_in_their_facts_only(monkeypatch) -> None:
    """All prose is in both; facts have other names than the tasks'; their table has all rows."""
    prose = sketch_text.prose()
    mixed = sketch_text.with_facts(prose)
    assert [each for each in mixed if each in set(prose)] == prose
    facts = [each for each in mixed if each.startswith("The code for the ")]
    asked = [each for each in mixed if each.startswith("What is the code for the ")]
    assert len(facts) + len(asked) + len(prose) == len(mixed) and len(asked) > len(facts) / 3
    for words in ("COLOURS", "THINGS"):
        ours, theirs = (getattr(each, words).split() for each in (sketch_text, sketch.retrieval))
        assert not set(ours) & set(theirs)
    row = {"model": "kda", "recall": dict.fromkeys("abcd", 0.5), "kl": 0.1, "standard_error": 0.01}
    rows = [{**row, "config": "fp32", "text": "-"}, {**row, "config": "sketch 4", "text": "prose"}]
    about = {**ABOUT, "tokens": 64, "rows": rows}
    monkeypatch.setattr(sketch_page, "record", lambda _: about)
    text = sketch_page.text_table(Evidence(None))
    assert "| kda | sketch 4 | prose | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 1.00 | 1.0e-01" in text
    assert "Not measured yet: gdn, mamba2." in text


def test_the_plot_carries_its_numbers(tmp_path, monkeypatch) -> None:
    """It is drawn from a part of a run as well, and a change of a number is noticed."""
    monkeypatch.setattr(sketch_page, "PLOTS", tmp_path)
    begun = Evidence({**ABOUT, "runs": made_up({"sketch 4": 0.5})})
    for found in (begun, Evidence(everything())):
        with pytest.raises(SystemExit, match="behind its numbers"):
            sketch_page.plot(found, check=True)
        sketch_page.plot(found, check=False)
        sketch_page.plot(found, check=True)


def test_equal_bytes_name_the_better_view() -> None:
    """A copy of no more bytes and clearly less KL is to take; larger ones do not count."""
    kl = {"int2 view": 8.0, "sketch 2": 4.0, "nvfp4 view": 1.0, "sketch 4": 2.0, "fp8 view": 0.5}
    lines = sketch_page.bytes_table(Evidence({**ABOUT, "runs": made_up(kl)})).splitlines()
    assert lines[2] == (
        "| gdn | sketch 2 | 200 | int2 view: 2x (2 to 2) | nvfp4 view: 1.50x | sketch |"
    )
    assert lines[3] == (
        "| gdn | sketch 4 | 400 | nvfp4 view: 0.5x (0.5 to 0.5) | nvfp4 view: 0.75x | copy |"
    )


def test_ratios_have_the_errors_of_paired_streams() -> None:
    """What all streams share cancels; of independent ones the error is that of the mean's log."""
    noisy = [1.0, 2.0, 4.0]
    same = ratio([3 * each for each in noisy], noisy)
    assert math.isclose(same.value, 3) and math.isclose(same.low, 3) and math.isclose(same.high, 3)
    assert ratio([2.0], [1.0]) == Ratio(2.0, 0.0, math.inf)
    wide = ratio([0.98, 1.0, 1.02], [1.0, 1.0, 1.0])
    assert math.isclose(math.log(wide.high), 2 * 0.02 / math.sqrt(3), rel_tol=1e-2)


def test_verdicts() -> None:
    """Of ratios above, around and below 1."""
    above, around, below = Ratio(2, 1.5, 3), Ratio(1, 0.5, 2), Ratio(0.5, 0.3, 0.8)
    assert verdict([above, None]) == "yes" and verdict([below]) == "the other way"
    assert verdict([above, below]) == "in part" and verdict([around, below]) == "not seen"
    assert verdict([None]) == sketch_rows.ABSENT


def test_parts_are_joined_while_they_are_written(tmp_path) -> None:
    """Parts that have not begun and lines without an end are left out; runs are not mixed."""
    about, rows = {**ABOUT, "tokens": 64}, made_up({"fp32": 1e-12, "sketch 4": 0.5})
    text = "".join(json.dumps(line) + "\n" for line in (about, *rows))
    (tmp_path / "gdn-main.jsonl").write_text(text[:-20])
    (tmp_path / "kda-main.jsonl").touch()
    sketch.join(tmp_path, tmp_path)
    record = json.loads((tmp_path / "cpu" / "sketch.json").read_text())
    assert record == {**ABOUT, "tokens": [64], "runs": rows[:1]}
    (tmp_path / "kda-main.jsonl").write_text(json.dumps({**about, "streams": 4}) + "\n")
    with pytest.raises(SystemExit, match="different runs"):
        sketch.join(tmp_path, tmp_path)
    with pytest.raises(SystemExit, match="none begun"):
        sketch.join(tmp_path / "cpu", tmp_path)
