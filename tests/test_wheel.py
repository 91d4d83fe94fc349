"""The wheel, alone in an empty environment, is the whole package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from lazystate import shipped

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, on no path but its environment's own."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_compare_runs_from_the_wheel_alone(tmp_path: Path) -> None:
    """Code, models and books are in the wheel; only third-party packages come from outside."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, ROOT, cwd=ROOT)
    (wheel,) = tmp_path.glob("lazystate-*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # A path file makes the dependencies of this environment importable. It does not run the path
    # files in there, so an editable install of the working tree stays invisible.
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import lazystate; print(lazystate.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)

    options = ("--prompt-tokens", "64", "--tokens", "24", "--repeats", "1", "--json")
    compared = run(tmp_path / "venv" / "bin" / "lazystate", "compare", *options, cwd=tmp_path)
    rows = json.loads(compared)
    assert {row["model"] for row in rows} == set(shipped.models())
    assert len(rows) == 3 * len(shipped.models())
    assert all(row["identical"] for row in rows)
