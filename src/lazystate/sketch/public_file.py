"""Calibration files of the package `sketchssm` (format sketchssm-calibration, schema 1).

They exist for published models. Their bases are of unit columns that are not orthogonal; every
prefix of columns spans the same after orthonormalisation, so their scores stay valid.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lazystate.sketch.calibration_file import Calibration, Origin
from lazystate.sketch.prefix import completed, orthonormal

FORMAT = "sketchssm-calibration"
SCHEMA = 1


def load_public(path: Path | str) -> Calibration:
    """Read a public calibration file; nothing in it is executed.

    Raises:
        ValueError: if the file is of another format or schema, wants to execute something, or its
            parts do not belong together.
        FileNotFoundError: if it is not there.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no calibration file {path}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path.name} does not hold plain tensors and numbers only") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a {FORMAT} file")
    if found.get("schema_version") != SCHEMA:
        raise ValueError(
            f"{path.name} has schema {found.get('schema_version')}, this package reads {SCHEMA}"
        )
    try:
        return _converted(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is damaged: {type(error).__name__} {error}") from error


def _converted(found: dict[str, Any]) -> Calibration:
    geometry, curves = found["geometry"], found["curves"]
    rows: Tensor = found["omega"]  # [layers, groups, rank, K]
    expected = geometry["groups"], geometry["key_dim"]
    if rows.dim() != 4 or (rows.shape[1], rows.shape[3]) != expected:
        raise ValueError(f"omega {list(rows.shape)} does not fit groups and key_dim {expected}")
    identity = _fingerprint(rows)
    if {found["basis_fingerprint"], curves["meta"]["basis_fingerprint"]} != {identity}:
        raise ValueError("basis and scores do not belong together: their fingerprints differ")
    sums, count = curves["joint_dot_sq_sum"], int(curves["joint_nstep"])
    if count < 1 or sums.dim() != 3 or sums.shape[2] <= rows.shape[2]:
        raise ValueError(
            f"scores {list(sums.shape)} over {count} tokens do not fit {rows.shape[2]} columns"
        )
    omega = orthonormal(rows.double().mT)
    if bool((omega.abs().amax(-2) == 0).any()):
        omega = completed(omega)[..., : rows.shape[2]]
    origin = Origin(
        model=str(found["model"]["name"]),
        layers=tuple(int(layer) for layer in found["layer_ids"]),
        value_dim=int(geometry["value_dim"]),
        window=int(geometry["window"]),
        erase=bool(geometry["erase"]),
        notes={
            "format": FORMAT,
            "family": str(found["model"]["family"]),
            "basis_fingerprint": identity,
        },
    )
    scores = sums.double()[..., : rows.shape[2] + 1] / count
    return Calibration(origin, omega.float(), scores.float())


def _fingerprint(rows: Tensor) -> str:
    """The identity that these files give a basis: SHA-256 of its shape and FP32 numbers."""
    rows = rows.float().contiguous()
    digest = hashlib.sha256(str(tuple(rows.shape)).encode())
    digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
