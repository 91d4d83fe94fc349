"""Which method decodes a layer faster: by measured times, or by the bytes where there are none.

A pure function of shape, batch and tokens. It never prefers replay where a measurement next to the
case has the conventional kernel ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lazystate.ops.tables import Entry, like
from lazystate.planner import step_us, traffic
from lazystate.spec import LayerSpec

# What replay costs more than a conventional step however few the bytes: at batch 1 the published
# kernels take 6.5 us where conventional ones take 4.1. For shapes that were not measured.
EXTRA_US = 3.0


@dataclass(frozen=True)
class Choice:
    """A method and why.

    Attributes:
        method: plain or snapshot (conventional, T = 1 or more), or replay.
        replay_us, conventional_us: microseconds of one step of one layer.
        measured: whether these are from a table, on a line between its batches, else from the bytes
            moved.
    """

    method: Literal["plain", "snapshot", "replay"]
    replay_us: float
    conventional_us: float
    measured: bool

    def __str__(self) -> str:
        source = "from measurements" if self.measured else "by the bytes"
        return (
            f"{self.method} (a step of a layer: replay {self.replay_us:,.1f} us, conventional "
            f"{self.conventional_us:,.1f} us, {source})"
        )


def auto(
    spec: LayerSpec,
    batch: int,
    tokens: int = 1,
    *,
    table: Sequence[Entry] = (),
    window: int = 16,
    read_gbs: float = 4600.0,
    copy_gbs: float = 4260.0,
) -> Choice:
    """Choose conventional decoding or replay for a step.

    Args:
        batch: B. tokens: T, all of them kept. window: L of replay.
        table: `lazystate.ops.tables.entries(gpu)`; its times count for layers that differ from
            `spec` in the number of heads alone, at equal heads times batch.
        read_gbs, copy_gbs: for a layer that is not in the table.
    """
    conventional: Literal["plain", "snapshot"] = "plain" if tokens == 1 else "snapshot"
    pairs = _pairs(spec, tokens, window, conventional, table)
    if not pairs:
        replay_us = EXTRA_US + _predicted(spec, "replay", batch, tokens, window, read_gbs, copy_gbs)
        plain_us = _predicted(spec, conventional, batch, tokens, window, read_gbs, copy_gbs)
        return Choice(
            "replay" if replay_us < plain_us else conventional, replay_us, plain_us, False
        )
    work = batch * spec.heads
    below = max((known for known in pairs if known <= work), default=min(pairs))
    above = min((known for known in pairs if known >= work), default=max(pairs))
    ahead = all(pairs[known][0] <= pairs[known][1] for known in (below, above))
    share = (work - below) / (above - below) if above > below else 0.0
    replay_us, plain_us = (
        low + share * (high - low) for low, high in zip(pairs[below], pairs[above], strict=True)
    )
    return Choice("replay" if ahead else conventional, replay_us, plain_us, True)


def _pairs(
    spec: LayerSpec, tokens: int, window: int, conventional: str, table: Sequence[Entry]
) -> dict[int, tuple[float, float]]:
    """(replay, conventional) microseconds by batch times heads, where both were measured."""
    times: dict[str, dict[int, float]] = {"replay": {}, conventional: {}}
    for entry in table:
        if like(entry, spec) and entry.tokens == tokens and entry.window == window:
            times.get(entry.method, {})[entry.batch * entry.shape["heads"]] = entry.us
    replay, plain = times["replay"], times[conventional]
    return {work: (replay[work], plain[work]) for work in replay.keys() & plain.keys()}


def _predicted(
    spec: LayerSpec,
    method: Literal["plain", "snapshot", "replay"],
    batch: int,
    tokens: int,
    window: int,
    read_gbs: float,
    copy_gbs: float,
) -> float:
    moved = traffic(spec, method, window=window, tokens=tokens, kept=tokens)
    return step_us(batch * tokens * moved.read, batch * tokens * moved.written, read_gbs, copy_gbs)
