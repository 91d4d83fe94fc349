"""Writes sketchssm-calibration.pt and sketchssm-trace.pt beside itself with the package sketchssm.

The calibration file is what the package packs from random numbers; the trace is those numbers, from
which a test computes the scores again. To repeat: pip install sketchssm==0.1.15 pyyaml, in an
environment of its own, and run this file.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import torch
import yaml
from sketchssm.calibration import calibration
from sketchssm.calibration.core.allocation import allocate
from sketchssm.calibration.core.basis import fit
from sketchssm.calibration.core.scoring import score

LAYERS, REQUESTS, WINDOWS, HEADS, GROUPS, VALUES, KEYS, WINDOW = 2, 1, 3, 4, 2, 16, 16, 4
GEOMETRY = {
    "key_dim": KEYS,
    "value_dim": VALUES,
    "groups": GROUPS,
    "window": WINDOW,
    "erase": True,
}
HERE = Path(__file__).parent


def bundle(folder: Path) -> dict:
    """A bundle folder as sketchssm's pipeline leaves one; returns the trace."""
    lead = LAYERS, REQUESTS, WINDOWS, HEADS
    trace = {
        "state": torch.randn(*lead, VALUES, KEYS) * 0.7 ** torch.arange(KEYS),
        "effective_query": torch.randn(*lead, KEYS, WINDOW),
        "gradient": torch.randn(*lead, VALUES, WINDOW),
    }
    state, query = trace["state"].double(), trace["effective_query"].double()
    counts = torch.full((LAYERS,), REQUESTS * WINDOWS)
    basis = fit(
        {
            "head_scov": (state.mT @ state).sum((1, 2)),
            "head_qcov": (query @ query.mT).sum((1, 2)),
            "head_cov_windows": counts,
            "head_cov_queries": counts * WINDOW,
            "layer_ids": [1, 3],
        },
        GROUPS,
        8,
    )
    curves = score(trace, basis)
    options = {"value_dim": VALUES, "window": WINDOW, "erase": True}
    table = allocate(curves, basis, mean_rank=2, **options)
    parts = {"basis.pt": basis, "curves.pt": curves, "table.pt": table}
    for name, part in parts.items():
        torch.save(part, folder / name)
    files = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in parts
    }
    manifest = {
        "schema_version": 1,
        "model": "tiny",
        "family": "gdn",
        "K": KEYS,
        "V": VALUES,
        "W": WINDOW,
        "groups": GROUPS,
        "erase": True,
        "basis": "basis.pt",
        "curves": "curves.pt",
        "basis_fingerprint": basis["meta"]["basis_fingerprint"],
        "allocations": {"2": {"file": "table.pt"}},
        "allocation_objective": "joint_dot_sq_sum",
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config = {
        "geometry": GEOMETRY,
        "model": {"name": "tiny", "family": "gdn"},
        "allocation": {"mean_ranks": [2]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return trace


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trace = bundle(Path(folder))
        torch.save(calibration.package(folder), HERE / "sketchssm-calibration.pt")
    torch.save(trace, HERE / "sketchssm-trace.pt")
