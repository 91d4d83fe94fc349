"""The kernels compile for a Hopper GPU, which the interpreter cannot tell: it runs Python."""

from __future__ import annotations

import json
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
    compile_step(tmp_path, kind, batch, tokens)


@pytest.mark.parametrize(
    ("batch", "tokens", "options"),
    [
        (SMALL, 1, {"checkpoint": "nvfp4", "view": "int4"}),
        pytest.param(LARGE, 1, {"checkpoint": "fp16", "view": "nvfp4"}, marks=slow),
        pytest.param(LARGE, 4, {"checkpoint": "fp8", "view": "nvfp4"}, marks=slow),
        pytest.param(LARGE, 1, {"checkpoint": "nvfp4"}, marks=slow),
        pytest.param(LARGE, 4, {"checkpoint": "bf16", "view": "int2"}, marks=slow),
        pytest.param(SMALL, 4, {"view": "int8"}, marks=slow),
    ],
)
def test_low_precision_compiles(batch, tokens, options, tmp_path):
    rounding = "stochastic" if "checkpoint" in options else "nearest"
    compile_step(tmp_path, "gdn", batch, tokens, options | {"rounding": rounding})


@pytest.mark.parametrize(
    ("kind", "batch", "tokens", "prologue"),
    [
        ("gdn", LARGE, 1, "gdn"),
        pytest.param("kda", SMALL, 4, "kda_softplus", marks=slow),
        pytest.param("mamba2", LARGE, 1, "mamba2", marks=slow),
        pytest.param("mamba2", SMALL, 4, "mamba2", marks=slow),
        pytest.param("gdn", LARGE, 4, "gdn", marks=slow),
    ],
)
def test_fused_gates_compile(kind, batch, tokens, prologue, tmp_path):
    compile_step(tmp_path, kind, batch, tokens, {"prologue": prologue})


@pytest.mark.parametrize(
    ("kind", "batch", "tokens", "options"),
    [
        ("gdn", LARGE, 1, {"checkpoint": "fp16", "window": 32}),
        ("mamba2", LARGE, 1, {"map": "exact", "window": 32}),
        pytest.param("mamba2", LARGE, 1, {"window": 32}, marks=slow),
        pytest.param("kda", LARGE, 1, {"window": 32}, marks=slow),
        pytest.param("mamba2", SMALL, 4, {"window": 64}, marks=slow),
        pytest.param("gdn", LARGE, 4, {"window": 32}, marks=slow),
        pytest.param("kda", LARGE, 4, {"window": 16}, marks=slow),
        pytest.param("gdn", LARGE, 4, {"map": "exact", "window": 16}, marks=slow),
        pytest.param("kda", LARGE, 1, {"map": "exact", "window": 32}, marks=slow),
    ],
)
def test_sketches_compile(kind, batch, tokens, options, tmp_path):
    compile_step(tmp_path, kind, batch, tokens, options | {"ranks": [2, 20, 0, 8]})


@pytest.mark.parametrize(
    ("kind", "batch", "tokens"),
    [
        ("mamba2", SMALL, 4),
        pytest.param("gdn", SMALL, 1, marks=slow),
        pytest.param("gdn", LARGE, 4, marks=slow),
        pytest.param("kda", LARGE, 4, marks=slow),
        pytest.param("gdn", SMALL, 16, marks=slow),
    ],
)
def test_steps_of_pages_compile(kind, batch, tokens, tmp_path):
    made = compiled(tmp_path, kind, batch, tokens, "paged")
    assert made == {"place_kernel", "conv_kernel", "step_kernel", "settle_kernel", "turn_kernel"}


def compile_step(folder, kind, batch, tokens, options=None):
    """Compile one step of a model."""
    made = compiled(folder, kind, batch, tokens, json.dumps(options or {}))
    assert made == {"begin_kernel", "step_kernel", "commit_kernel", "settle_kernel"}


def compiled(folder, kind, batch, tokens, options):
    """The kernels that are compiled in a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, SCRIPT, kind, str(batch), str(tokens), options],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {path.stem for path in folder.rglob("*.cubin")}
