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
from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import page_of
from lazystate.engines.vllm.support import Kind
from lazystate.ops.triton.conv import convolve_ring, turn
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.positions import Spans
from lazystate.ops.triton.settle import settle
from lazystate.sketch.view import Sketch
from samples import draw, draw_raw, layer, slots
from serving_model import Layer

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


def paged(kind: Kind, batch: int, tokens: int) -> None:
    """One step of pages of the vLLM engine, and what is done before a prefill."""
    compile_only()
    heads = 4 if kind == "kda" else 2
    value_dim = 128 if kind == "kda" else 64
    shapes = ((2 + tokens, 2 * heads * 128 + 4 * value_dim), (4, value_dim, 128))
    dtypes = (torch.bfloat16, torch.float32)
    page = page_of(kind, shapes, dtypes, torch.bfloat16, Options(), tokens=tokens)
    layer: Any = Layer(page, 8, "cpu")
    pool, group = page.pool(layer.named, 0), Group([layer], batch, torch.device("cpu"))
    starts = torch.arange(batch + 1, dtype=torch.int32) * tokens
    spans = Spans(starts[:-1], starts[:-1], starts[1:], starts[1:])
    ring, prologue = layer.named["conv"], "kda_softplus" if kind == "kda" else kind
    raw = draw_raw(prologue, page.spec, 1, batch * tokens)
    mixed = torch.empty(1, batch * tokens, ring.shape[-1], dtype=torch.bfloat16)
    rows = group.decode(spans, tokens)
    convolve_ring(ring, rows, mixed, torch.empty(ring.shape[-1], 4), None, True)
    step(pool, rows, *raw)
    rows = group.prefill(spans)
    settle(pool, rows)
    turn(ring, rows, 4)


if __name__ == "__main__":
    given = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4] == "paged":
        paged(*given)  # type: ignore[arg-type]
    else:
        main(*given, json.loads(sys.argv[4]))
