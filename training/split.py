"""Split a safetensors file into parts of limited size, and join such parts again.

Every part is itself a valid safetensors file that holds some of the tensors, so a part can be
looked at alone; a tensor is never cut. Use it where a single transfer is limited in size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HEADER = 64 * 1024  # room left in every part for the file's own header


def split(path: Path, limit: int) -> list[Path]:
    """Write `NAME.part-000.safetensors` and so on beside the file; returns their paths."""
    tensors = load_file(path)
    with safe_open(path, "pt") as source:
        metadata = source.metadata()
    groups: list[dict[str, torch.Tensor]] = [{}]
    room = limit - HEADER
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > limit - HEADER:
            raise SystemExit(f"{name} alone has {size} bytes, more than the limit")
        if size > room:
            groups.append({})
            room = limit - HEADER
        groups[-1][name] = tensor
        room -= size
    parts = []
    for number, group in enumerate(groups):
        part = path.with_name(f"{path.stem}.part-{number:03d}.safetensors")
        save_file(group, part, metadata)
        parts.append(part)
    return parts


def join(parts: list[Path], path: Path) -> None:
    """Write one file that holds the tensors of all parts."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] | None = None
    for part in parts:
        found = load_file(part)
        if repeated := tensors.keys() & found.keys():
            raise SystemExit(f"{part} repeats {sorted(repeated)}")
        tensors |= found
        with safe_open(part, "pt") as source:
            metadata = source.metadata() or metadata
    save_file(tensors, path, metadata)


def main() -> None:
    """Command line: `split.py FILE` or `split.py FILE --join PART...`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--join", type=Path, nargs="+", help="parts to join into FILE")
    parser.add_argument("--mib", type=int, default=16, help="largest part, in MiB")
    args = parser.parse_args()
    if args.join:
        join(sorted(args.join), args.file)
        return
    for part in split(args.file, args.mib * 2**20):
        print(part, part.stat().st_size)


if __name__ == "__main__":
    main()
