"""Decode and verify kernels on one GPU: `make bench`; writes benchmarks/results/<gpu>/.

Every row was checked against the PyTorch backend in the same run, with the launch setting timed.
Times are the median of captured graphs that go through enough layers for a cold L2, at mixed phases
(rows spread evenly over a window, as in serving), folds, cursor and commit launches included. The
floor counts state bytes only: reads at read bandwidth, and the share that folds at copy bandwidth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import triton
from timing import ceilings, copies_for_cold_l2, graph_us

from lazystate import LayerSpec, StateCache
from lazystate.ops.triton.plain import plain_step
from lazystate.presets import preset

WINDOW = 16
TILES = (4, 8, 16)  # heights of the conventional kernel's tile that are tried
LAYERS = {
    "M1": preset("Nemotron-3-Nano-4B").layer,
    "M2": preset("Nemotron-3-Super-120B").layer,
    "G1": preset("Qwen3.5-4B").layer,
    "G2": preset("Qwen3.5-122B-A10B").layer,
    "K1": preset("GLM-5.3-Flash").layer,
}


def inputs(spec: LayerSpec, batch: int, tokens: int) -> list[torch.Tensor]:
    """Random prepared inputs of a step: unit keys, mild decays."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, tokens, *shape, device="cuda")

    k = torch.nn.functional.normalize(normal(spec.key_heads, spec.key_dim), dim=-1)
    q, v = normal(spec.key_heads, spec.key_dim), normal(spec.heads, spec.value_dim)
    log_decay = -torch.nn.functional.softplus(normal(*spec.decay_shape) - 3)
    beta = torch.sigmoid(normal(spec.heads))
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), log_decay, beta]


def cache_of(spec: LayerSpec, layers: int, batch: int, tokens: int, backend: str) -> StateCache:
    """A cache of equal layers with a state and without their convolutions."""
    bare = LayerSpec(
        spec.heads, spec.key_heads, spec.key_dim, spec.value_dim, spec.decay, spec.erase
    )
    cache = StateCache(
        [bare] * layers,
        batch,
        window=WINDOW,
        max_tokens=tokens,
        device="cuda",
        backend=backend,  # type: ignore[arg-type]
    )
    state = torch.randn(batch, *bare.state_shape, device="cuda") * 0.1
    cache.load(torch.arange(batch, device="cuda"), [state] * layers)
    return cache


def check(spec: LayerSpec, batch: int, tokens: int) -> float:
    """Largest error relative to the largest output, against PyTorch, over two windows.

    With the launch setting of that batch size, which is one from 64 rows on.
    """
    batch = min(batch, 64)
    worst = 0.0
    caches = []
    for name in ("triton", "torch"):
        torch.manual_seed(0)
        caches.append(cache_of(spec, 1, batch + 2, tokens, name))
    rows = torch.randperm(batch + 2, device="cuda")[:batch]
    for _ in range(2 * WINDOW // tokens + 2):
        step = inputs(spec, batch, tokens)
        outs = []
        for cache in caches:
            ticket = cache.begin(rows, tokens)
            outs.append(cache.step(ticket, 0, *step).float())
            cache.commit(ticket)
        worst = max(worst, float((outs[0] - outs[1]).abs().max() / outs[1].abs().max()))
    return worst


def check_plain(spec: LayerSpec) -> float:
    """The same for one conventional step from loaded states, the worst of all tile heights."""
    torch.manual_seed(0)
    cache = cache_of(spec, 1, 6, 1, "torch")
    rows, step = torch.tensor([4, 0, 5, 2], device="cuda"), inputs(spec, 4, 1)
    states = cache.materialize(torch.arange(6, device="cuda"))[0]
    ticket = cache.begin(rows)
    expected = cache.step(ticket, 0, *step).float()
    worst = 0.0
    for block_v in TILES:
        out = plain_step(spec, states.clone(), rows, rows, *step, block_v=block_v).float()
        worst = max(worst, float((out - expected).abs().max() / expected.abs().max()))
    return worst


def replay_us(spec: LayerSpec, batch: int, tokens: int, kept: int) -> float:
    """Microseconds of one layer's step at mixed phases, its share of the cursor launches too."""
    state = batch * spec.heads * spec.key_dim * spec.value_dim * 4
    layers = copies_for_cold_l2(state)
    cache = cache_of(spec, layers, batch, tokens, "triton")
    for pool in cache._pools:
        for ring in pool.ring.tensors().values():
            ring.normal_(0, 0.1)
        pool.ring.log_decay.uniform_(-0.1, 0)
    cycle = WINDOW - tokens + 1
    phases = torch.arange(batch, device="cuda") % (cycle + (tokens == 1))
    cache._cursors.filled.copy_(phases)
    rows = torch.randperm(batch, device="cuda")
    step, taken = inputs(spec, batch, tokens), torch.full((batch,), kept, device="cuda")
    steps = 2

    def run() -> None:
        for _ in range(steps):
            ticket = cache.begin(rows, tokens)
            for layer in range(layers):
                cache.step(ticket, layer, *step)
            cache.commit(ticket, taken)

    return graph_us(run) / (layers * steps)


def plain_us(spec: LayerSpec, batch: int) -> float:
    """Microseconds of the conventional step at its best tile height."""
    state = torch.randn(batch, spec.heads, spec.value_dim, spec.key_dim, device="cuda")
    pools = [state.clone() for _ in range(copies_for_cold_l2(state.nbytes))]
    rows, step = torch.randperm(batch, device="cuda"), inputs(spec, batch, 1)

    def timed(block_v: int) -> float:
        def run() -> None:
            for pool in pools:
                plain_step(spec, pool, rows, rows, *step, block_v=block_v)

        return graph_us(run) / len(pools)

    return min(timed(block_v) for block_v in TILES)


def decode_rows(name: str, read_gbs: float, copy_gbs: float) -> Iterator[dict]:
    """Standard decoding of one layer over batch sizes, conventional and replay."""
    spec = LAYERS[name]
    plain_error = check_plain(spec)
    for batch in (1, 8, 32, 128, 256, 512):
        error = check(spec, batch, 1)
        state = batch * spec.heads * spec.key_dim * spec.value_dim * 4
        floor = ((WINDOW - 1) * state / read_gbs + 2 * state / copy_gbs) / WINDOW / 1e3
        plain = plain_us(spec, batch)
        shared = row_of("decode", name, batch, 1, 1, error) | {"conventional_us": plain}
        yield {
            **shared,
            "method": "plain",
            "error": plain_error,
            "window": None,
            "us": plain,
            "floor_us": 2 * state / copy_gbs / 1e3,
        }
        yield {**shared, "us": replay_us(spec, batch, 1, 1), "floor_us": floor}


def verify_rows(name: str) -> Iterator[dict]:
    """Verification of T drafts at batch 256, all accepted and all rejected."""
    for tokens in (4, 8):
        error = check(LAYERS[name], 256, tokens)
        for kept in (tokens, 1):
            us = replay_us(LAYERS[name], 256, tokens, kept)
            yield row_of("verify", name, 256, tokens, kept, error) | {"us": us}


def row_of(bench: str, layer: str, batch: int, tokens: int, kept: int, error: float) -> dict:
    """A row of replay decoding, times to be filled in."""
    return {
        "bench": bench,
        "layer": layer,
        "batch": batch,
        "tokens": tokens,
        "kept": kept,
        "impl": "lazystate",
        "method": "replay",
        "view": "full",
        "checkpoint": "float32",
        "window": WINDOW,
        "phases": "mixed",
        "us": None,
        "floor_us": None,
        "conventional_us": None,
        "error": error,
    }


def meta(commit: str, read_gbs: float, copy_gbs: float) -> dict:
    """Where and how the numbers were taken."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "read_gbs": read_gbs,
        "copy_gbs": copy_gbs,
        "method": " ".join((__doc__ or "").split()),
    }


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure, print a line a row, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--commit", default=None, help="revision measured, if there is no git here")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/run.py needs a CUDA device: on a CPU, run `make demo`")
    read_gbs, copy_gbs = ceilings()
    result = {"meta": meta(arguments.commit or _commit(), read_gbs, copy_gbs), "rows": []}
    folder = arguments.out / torch.cuda.get_device_name().split()[-1].lower()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['meta']['date']}-decode.json"
    for name in arguments.layers:
        rows = [decode_rows(name, read_gbs, copy_gbs)]
        rows += [verify_rows(name)] if name in ("M2", "G2") else []
        for row in chain(*rows):
            result["rows"].append(row)
            print(_line(row), flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(path, file=sys.stderr)


def _line(row: dict) -> str:
    ratio = f"{row['us'] / row['floor_us']:.2f} of floor" if row["floor_us"] else ""
    what = f"{row['bench']:7}{row['layer']:4}{row['method']:7} B {row['batch']:4} T {row['tokens']}"
    return f"{what} kept {row['kept']} {row['us']:8.1f} us  error {row['error']:.1e}  {ratio}"


if __name__ == "__main__":
    main()
