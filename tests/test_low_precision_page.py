"""docs/low_precision.md keeps its word: its code runs, its tables are made of numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from lazystate.formats import CHECKPOINTS, FORMATS, VIEWS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "low_precision.md").read_text("utf8")


def test_its_code_runs() -> None:
    """The examples are right as printed."""
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    for code in examples:
        exec(compile(code, "low_precision.md", "exec"), {"__name__": "page"})


def test_its_formats_are_those_of_the_code() -> None:
    """Every format is listed with its bytes, and with what it can store."""
    seen = {}
    table = PAGE.split("| format |")[1].split("\n\n")[0]
    for row in re.findall(r"^\| (`.*) \|$", table, re.MULTILINE):
        names, _, _, sizes, checkpoint, view = (cell.strip() for cell in row.split("|"))
        numbers = [int(size.replace(",", "")) for size in re.findall(r"[\d,]*\d", sizes)]
        found = re.findall(r"`(\w+)`", names)
        for i, name in enumerate(found):
            seen[name] = numbers[min(i, len(numbers) - 1)]
            assert (name in CHECKPOINTS, name in VIEWS) == (checkpoint == "yes", view == "yes")
    expected = {name: form.nbytes(64, 128) for name, form in FORMATS.items() if name != "fp64"}
    assert seen == expected


def test_its_tables_are_generated() -> None:
    """The tables are what the script makes of the recorded numbers."""
    script = ROOT / "benchmarks" / "low_precision.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_its_pictures_are_small() -> None:
    """Every picture exists and has less than 150 KB."""
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert len(pictures) == 3
    for picture in pictures:
        assert (ROOT / "docs" / picture).stat().st_size < 150_000
