"""The README keeps its word: its code runs, and its table is made of the recorded numbers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_is_short() -> None:
    """A page, not a manual."""
    assert README.count("\n") < 200


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(code: str) -> None:
    """Every Python example runs as printed."""
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_its_versions_are_those_of_the_package() -> None:
    """What must be installed is said as the package's metadata have it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    least = dict(entry.split(">=") for entry in project["dependencies"])
    python = project["requires-python"].removeprefix(">=")
    asked = f"Python {python}, torch {least['torch']} and transformers {least['transformers']}, or"
    assert asked in README


def test_links_exist() -> None:
    """Every relative link leads to a file."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("script", ["readme.py", "tables.py", "plots.py", "serving_page.py"])
def test_tables_are_generated(script: str) -> None:
    """Tables and plots are what the scripts make of the recorded numbers."""
    command = [sys.executable, ROOT / "benchmarks" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
