"""Tuned settings: a JSON table per GPU, written by `benchmarks/tune.py` and never at run time.

A table is {"gpu", "torch", "triton", "date", "commit", "entries"}; an entry is one measurement:

    {"method": "replay", "shape": {...}, "batch": 256, "tokens": 1, "window": 16,
     "setting": {"block_v": 32, ...}, "us": 402.1}

method is "replay" (the step kernel), "sketch" (the same where it reads sketches), "plain" (the
conventional one) or "snapshot" (the same with a state after every token); us is microseconds of one
step of one layer at its best setting, rows at mixed phases and all tokens kept. Settings are names
and numbers: this module knows no kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lazystate.spec import LayerSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Setting = Mapping[str, Any]
Launch = TypeVar("Launch", bound="DataclassInstance")


@dataclass(frozen=True)
class Entry:
    """One tuned measurement; see the module's head.

    Attributes:
        shape: as `shape_of` gives it. setting: fields of a launch setting. us: its time.
    """

    method: str
    shape: Mapping[str, Any]
    batch: int
    tokens: int
    window: int
    setting: Setting
    us: float


def shape_of(spec: LayerSpec) -> dict[str, Any]:
    """What of a layer a setting depends on."""
    return {
        "heads": spec.heads,
        "key_heads": spec.key_heads,
        "key_dim": spec.key_dim,
        "value_dim": spec.value_dim,
        "decay": spec.decay,
        "erase": spec.erase,
    }


def slug(gpu: str) -> str:
    """A GPU's name as a file's: "NVIDIA H200" is "h200"."""
    return "-".join(gpu.lower().replace("nvidia", "").split())


@lru_cache(maxsize=8)
def entries(gpu: str) -> tuple[Entry, ...]:
    """The table of a GPU by the name that the driver gives it; empty where none is shipped."""
    path = files("lazystate.ops") / "tuned" / f"{slug(gpu)}.json"
    if not path.is_file():
        return ()
    return read(json.loads(path.read_text("utf8")))


def read(table: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The entries of a parsed table."""
    return tuple(Entry(**entry) for entry in table["entries"])


def nearest(
    table: tuple[Entry, ...], method: str, spec: LayerSpec, batch: int, tokens: int, window: int
) -> Entry | None:
    """The entry that fits best, or None.

    Its K, V, decay, erase and heads a key must be the layer's, as they decide which settings are
    valid; then tokens, window and batch times heads, which is what fills a GPU, are as near as they
    come, in that order, by their ratio.
    """

    def far(one: int, other: int) -> float:
        return abs(math.log2(one / other))

    def distance(entry: Entry) -> tuple[float, float, float]:
        work = far(entry.batch * entry.shape["heads"], batch * spec.heads)
        return far(entry.tokens, tokens), far(entry.window, window), work

    fitting = [entry for entry in table if entry.method == method and like(entry, spec)]
    return min(fitting, key=distance, default=None)


def like(entry: Entry, spec: LayerSpec) -> bool:
    """Whether an entry's layer differs from a layer in the number of its heads at most."""
    own, shape = shape_of(spec), entry.shape
    alike = all(own[name] == shape[name] for name in ("key_dim", "value_dim", "decay", "erase"))
    return alike and shape["heads"] == spec.group * shape["key_heads"]


def setting(
    method: str,
    spec: LayerSpec,
    batch: int,
    tokens: int = 1,
    window: int = 16,
    device: torch.device | str = "cuda",
) -> dict[str, Any] | None:
    """The tuned setting for a step on a device, or None where its GPU has no table."""
    found = _found(method, spec, batch, tokens, window, torch.device(device))
    return None if found is None else dict(found.setting)


def tuned(
    default: Launch,
    method: str,
    spec: LayerSpec,
    batch: int,
    tokens: int,
    window: int,
    device: torch.device,
) -> Launch:
    """A launch setting, a frozen dataclass, with what is tuned for the step put in."""
    found = _found(method, spec, batch, tokens, window, device)
    return default if found is None else replace(default, **found.setting)


@lru_cache(maxsize=4096)
def _found(
    method: str, spec: LayerSpec, batch: int, tokens: int, window: int, device: torch.device
) -> Entry | None:
    if device.type != "cuda":
        return None
    table = entries(torch.cuda.get_device_name(device))
    return nearest(table, method, spec, batch, tokens, window)
