"""Compile the kernels that a program launches for a GPU that need not be there.

Run as a script by tests/test_compile.py: Triton reads TRITON_INTERPRET when kernels are decorated,
so this takes a process without it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lazystate import StateCache
from lazystate.ops.triton.settle import settle
from lazystate.sketch.view import Sketch
from samples import draw, draw_raw, layer, slots

HOPPER = GPUTarget("cuda", 90, 32)


class NoDriver:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        """The GPU compiled for."""
        return HOPPER

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The default stream."""
        return 0


def compile_only() -> None:
    """Let every launch end with the compiled kernel."""
    driver.set_active(NoDriver())
    run = JITFunction.run

    def warmed(self: JITFunction, *args: Any, **options: Any) -> Any:
        return run(self, *args, **(options | {"warmup": True}))

    JITFunction.run = warmed


def main(kind: str, batch: int, tokens: int, options: dict[str, Any]) -> None:
    """One step of `tokens` tokens at a batch of `batch` rows, and settling them.

    options: of the cache, beside those; "prologue", whose raw inputs the step takes; and "ranks"
        [4], which make the view a sketch, with "map" its map.
    """
    prologue = options.pop("prologue", None)
    compile_only()
    heads = 4 if kind == "kda" else 2
    spec = layer(kind, torch.bfloat16, heads=4, key_heads=heads, key_dim=128, value_dim=64)
    if ranks := options.pop("ranks", None):
        omega = torch.linalg.qr(torch.randn(1, 4, 128, max(ranks))).Q
        options["view"] = Sketch(omega, torch.tensor([ranks]), options.pop("map", "pivot"))
    cache = StateCache(spec, batch, max_tokens=tokens, backend="triton", **options)
    ticket = cache.begin(slots(*range(batch)), tokens)
    if prologue is None:
        cache.step(ticket, 0, *draw(spec, batch, tokens))
    else:
        cache.step(ticket, 0, *draw_raw(prologue, spec, batch, tokens))
    cache.commit(ticket)
    settle(cache._pools[0], ticket._rows)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
