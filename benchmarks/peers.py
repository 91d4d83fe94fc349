"""The published kernels beside ours: benchmarks/run.py --only peers.

They are imported from an installed vLLM, or from the few files that benchmarks/fetch_peers.py
unpacks; without either this part is left out. Every row is checked against the PyTorch backend on
the same raw inputs. Rows are (impl "vllm") conventional decoding and verification with a snapshot
a token, at the launch settings that the package chooses ("default") and at the best of those that
it can be told, and its replay of Mamba-2 layers. Gates are computed in these kernels, as served.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kernels import vllm
from kernels.cases import LAYERS, Case, Ceilings, row
from kernels.checks import BOUND, difference, fresh, picked
from kernels.peer_runs import MambaReplay, Peer, kind_of
from timing import graph_us

BATCHES = (512, 256, 128, 32, 1)
Row = dict[str, Any]


def cases(layers: Sequence[str], batches: Sequence[int]) -> list[Case]:
    """Standard decoding, then verification at the largest batch up to 256."""
    if vllm.installed() is None:
        print("peers: vllm is not installed, see benchmarks/fetch_peers.py", file=sys.stderr)
        return []
    chosen = [batch for batch in BATCHES if batch in batches]
    found = [Case(name, LAYERS[name], batch) for batch in chosen for name in layers]
    large = min(256, max(batches))
    for tokens in (4, 8, 2):
        for name in layers:
            if name in ("M2", "G2") or tokens == 4:
                found.append(Case(name, LAYERS[name], large, tokens, tokens))
    return found


def rows(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[Row]:
    """The rows of one case."""
    yield from conventional(case, ceilings, dry)
    if kind_of(case) == "mamba2" and case.tokens == 1:
        yield from replay(case, ceilings, dry)


def conventional(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[Row]:
    """Default and best setting of the kernel that writes a state after every token."""
    method = "plain" if case.tokens == 1 else "snapshot"
    peer = Peer(case, 1 if dry else case.copies(64 if method == "plain" else 4))
    times: dict[str, tuple[float | None, float]] = {}
    for name, setting in peer.settings().items():
        with setting():
            if dry:
                peer.step()
                continue
            error = conventional_error(peer)
            us = graph_us(peer.step) / len(peer.states) if error <= BOUND else None
            times[name] = us, error
    best = min(times, key=lambda name: times[name][0] or float("inf"), default="default")
    for name in dict.fromkeys(("default", best) if times else ()):
        us, error = times[name]
        yield _row(case, method, ceilings, us, error, name)


def replay(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[Row]:
    """vLLM's replay at mixed phases, cursors given."""
    peer = MambaReplay(case, 1 if dry else case.copies())
    if dry:
        peer.cycle()
        return
    error = replay_error(peer)
    peer.start(1)
    us = None
    if error <= BOUND:
        us = graph_us(peer.cycle) / (case.window * len(peer.states))
    yield _row(case, "replay", ceilings, us, error, "default")


def conventional_error(peer: Peer) -> float:
    """Outputs of one step against the PyTorch backend."""
    case, rows = peer.case, picked(peer.case.batch)
    twin = fresh(case, peer.states[0][peer.index[rows, -1].long()])
    slots = torch.arange(len(rows), device=rows.device)
    ticket = twin.begin(slots, case.tokens)
    expected = twin.step(ticket, 0, *_rows_of(peer, rows))
    return difference([peer.step()[rows]], [expected])


def replay_error(peer: MambaReplay) -> float:
    """Outputs of a window and a step, all rows in step, against the PyTorch backend."""
    case, rows = peer.case, picked(peer.case.batch)
    twin = fresh(case, peer.states[0][peer.index[rows, 0].long()])
    slots = torch.arange(len(rows), device=rows.device)
    outs, expected = [], []
    for number in [*range(case.window), 0]:
        outs.append(peer.step(number)[rows].clone())
        ticket = twin.begin(slots)
        expected.append(twin.step(ticket, 0, *_rows_of(peer, rows)))
        twin.commit(ticket)
    return difference(outs, expected)


def _rows_of(peer: Peer, rows: torch.Tensor) -> list[Any]:
    *inputs, skip = peer.prepared()
    return [*(x if x is None else x[rows] for x in inputs), skip]


def _row(
    case: Case, method: str, ceilings: Ceilings, us: float | None, error: float, setting: str
) -> Row:
    return row(
        case,
        "decode" if case.tokens == 1 else "verify",
        method,
        us,
        floor_us=case.floor_us(method, ceilings),
        error=error,
        impl="vllm",
        version=vllm.installed(),
        launch=setting,
        state_bytes=sum(case.moved(method)),
    )
