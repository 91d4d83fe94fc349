"""The functional interface: pools, cursors, and one dispatch point with the backends behind it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, cast

import torch

from lazystate.ops.backend import Backend, Census
from lazystate.ops.pool import (
    CastView,
    Cursors,
    Fold,
    FullView,
    LowRank,
    Pool,
    Ring,
    Storage,
    View,
    Views,
    allocate,
)
from lazystate.ops.states import States
from lazystate.ops.torch.conv import history, remember
from lazystate.ops.torch.fold import replay
from lazystate.ops.torch.rows import standing
from lazystate.ops.traffic import Traffic, active, count_traffic

BackendName = Literal["auto", "torch", "triton"]
EXACT_RANK = 64  # largest of a least-squares map whose fold fits in a Hopper GPU's shared memory

__all__ = [
    "Backend",
    "BackendName",
    "CastView",
    "Census",
    "Cursors",
    "Fold",
    "FullView",
    "LowRank",
    "Pool",
    "Ring",
    "States",
    "Storage",
    "Traffic",
    "View",
    "Views",
    "active",
    "allocate",
    "backend",
    "count_step",
    "count_traffic",
    "history",
    "remember",
    "replay",
    "standing",
]


def backend(
    name: BackendName, device: torch.device, storage: Storage, window: int, max_tokens: int
) -> Backend:
    """The backend of that name; "auto" is Triton on a CUDA device and PyTorch elsewhere.

    Raises:
        ValueError: for another name, or if it does not do the storage, so long a window or so many
            tokens a step. ImportError: if Triton is asked for and not installed.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name not in ("torch", "triton"):
        raise ValueError(f"backend must be 'auto', 'torch' or 'triton', got {name!r}")
    if name == "triton" and getattr(storage.view, "map", None) == "exact":
        largest = int(cast(Any, storage.view).ranks.max())
        if largest > EXACT_RANK:
            raise ValueError(
                f"ranks of a sketch with map 'exact' must be at most {EXACT_RANK} for the backend "
                f"triton, got {largest}: take map 'pivot', or backend='torch'"
            )
    if name == "triton" and storage.checkpoint.name == "fp64":
        raise ValueError("checkpoint fp64 needs backend='torch', got the backend triton")
    if name == "triton":
        for argument, value, most in (("window", window, 64), ("max_tokens", max_tokens, 16)):
            if value > most:
                raise ValueError(
                    f"{argument} must be at most {most} for the backend triton, got {value}: take "
                    "less, or backend='torch'"
                )
    return cast(Backend, import_module(f"lazystate.ops.{name}"))


def count_step(traffic: Traffic, pool: Pool, census: Census) -> None:
    """Add the bytes of one layer's step: what the algorithm reads and writes, padding excluded."""
    spec, checkpoint = pool.spec, pool.states.nbytes
    used = ("k", "u", "log_decay") if spec.erase else ()
    traffic.read += census.views * pool.view.bytes_read() + census.checkpoints * checkpoint
    traffic.read += census.held * pool.record_bytes(*used)
    if spec.erase and pool.ring.v is not None:
        traffic.read += census.folded * pool.record_bytes("v", "beta")
    traffic.written += census.folding * (checkpoint + pool.view.bytes_stored())
    traffic.written += census.new * pool.record_bytes()
