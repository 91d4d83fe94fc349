"""The kernels compile for a Hopper GPU, which the interpreter cannot tell: it runs Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_kernels.py"
SMALL, LARGE = 1, 2048  # batches on either side of where the launch setting changes
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "batch", "tokens"),
    [
        ("mamba2", LARGE, 1),
        ("gdn", SMALL, 1),
        ("kda", LARGE, 4),
        pytest.param("mamba2", SMALL, 4, marks=slow),
        pytest.param("mamba2", LARGE, 4, marks=slow),
        pytest.param("gdn", LARGE, 1, marks=slow),
        pytest.param("gdn", LARGE, 4, marks=slow),
        pytest.param("gdn", SMALL, 16, marks=slow),
        pytest.param("kda", SMALL, 1, marks=slow),
        pytest.param("kda", LARGE, 1, marks=slow),
        pytest.param("gla", LARGE, 4, marks=slow),
        pytest.param("lightning", SMALL, 1, marks=slow),
    ],
)
def test_a_model_step_compiles(kind, batch, tokens, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, kind, str(batch), str(tokens)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert made == {"begin_kernel", "step_kernel", "commit_kernel"}
