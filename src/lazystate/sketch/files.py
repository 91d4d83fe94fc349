"""Calibration files of either format, and of the shipped models."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lazystate import shipped
from lazystate.sketch import calibration_file, public_file
from lazystate.sketch.calibration_file import Calibration


def open_calibration(path: Path | str) -> Calibration:
    """A calibration from a file of this package or of `sketchssm`, or of a shipped model's name.

    Raises:
        ValueError: if it is neither, or damaged. FileNotFoundError: if it is not there.
    """
    if str(path) in shipped.models():
        path = shipped.model_folder(str(path)) / "calibration.safetensors"
    path = Path(path).expanduser()
    if path.is_file() and zipfile.is_zipfile(path):  # what torch.save writes
        return public_file.load_public(path)
    return calibration_file.load(path)
