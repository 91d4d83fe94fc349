"""What an interrupted calibration goes on from: one file of its sums beside the one it makes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Sums = dict[str, Tensor]


@dataclass
class Kept:
    """Sums so far, saved now and then and when a part is done.

    Attributes:
        path: of the file. identity: of everything that the sums depend on.
        seconds: between two savings.
    """

    path: Path
    identity: str
    seconds: float
    _last: float = 0.0

    def restore(self, sums: Sums) -> tuple[str, int]:
        """Fill `sums` in place from the file: (the part it was in, batches of it that are done).

        ("", 0) if there is no file.

        Raises:
            ValueError: if the file is of a calibration of another model, text or option.
        """
        self._last = time.monotonic()
        if not self.path.is_file():
            return "", 0
        with safe_open(self.path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("identity") != self.identity:
                raise ValueError(
                    f"{self.path.name} is left from a calibration with other options, text or "
                    "model: remove it to start anew, or give the old ones to go on"
                )
            for name, tensor in sums.items():
                tensor.copy_(file.get_tensor(name))
        return about["part"], int(about["done"])

    def save(self, part: str, done: int, sums: Sums, *, now: bool) -> None:
        """Write the file, if `now` or if the last time is long ago; never half of it."""
        if not now and time.monotonic() - self._last < self.seconds:
            return
        about = {"identity": self.identity, "part": part, "done": str(done)}
        half = self.path.with_name(self.path.name + ".half")
        save_file({name: x.cpu().contiguous() for name, x in sums.items()}, half, metadata=about)
        half.replace(self.path)
        self._last = time.monotonic()

    def remove(self) -> None:
        """The calibration is done."""
        self.path.unlink(missing_ok=True)
