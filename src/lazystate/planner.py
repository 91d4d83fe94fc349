"""What decoding moves and keeps: bytes of state, the best window, memory, the largest batch.

Two models of one thing. `HeadBytes` follows ReplaySSM's appendix C, for one head with a key of its
own; `traffic` counts the bytes of this package's layout, where a key is stored once for the heads
that share it, and follows the fold rule step by step. Pure functions; bytes and microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from lazystate.formats import CHECKPOINTS, VIEWS, named
from lazystate.presets import ModelShape
from lazystate.spec import LayerSpec

Method = Literal["plain", "snapshot", "replay"]
Stores = str | torch.dtype  # a format, by its name or its dtype

# State reads and writes of one verify step of T tokens (ReplaySSM Table 3).
STATE_PASSES = {
    "vLLM snapshots": (1, None),  # one write a token
    "The Mamba in the Llama": (1, 2),
    "Snakes and Ladders, Activation Replay": (3, 3),
    "Snakes and Ladders, Joint Attainment": (3, 4),
    "STree, algorithm": (2, 1),
    "STree, released path": (5, 4),
    "ReplaySSM, no fold": (1, 0),
    "ReplaySSM, fold": (1, 1),
}


@dataclass(frozen=True)
class HeadBytes:
    """One head with an FP32 state and a BF16 record of its own (ReplaySSM App. C.3).

    Attributes:
        state: M_S, bytes of the state. record: r, bytes of (v, k, decay).
    """

    state: int
    record: int

    @classmethod
    def of(cls, key_dim: int, value_dim: int) -> HeadBytes:
        """From K and V."""
        return cls(4 * key_dim * value_dim, 2 * value_dim + 2 * key_dim + 4)

    def conventional(self, window: int) -> int:
        """Bytes of `window` conventional steps (Eq. 13, left)."""
        return 2 * window * self.state

    def replay(self, window: int) -> float:
        """Bytes of one window of standard replay decoding (Eq. 13, right)."""
        records = (window - 1) * (window + 2) / 2
        return (window + 1) * self.state + records * self.record

    def replay_per_token(self, window: int, tokens: int = 1, kept: float = 1.0) -> float:
        """Bytes for a committed token, T tokens a step of which `kept` stay (Eq. 15)."""
        m, r = self.state, self.record
        reads = m / kept + m / window + r * window / (2 * kept) - r / 2
        return reads + r * tokens / kept - r * tokens / window

    def best_window(self, tokens: int = 1, kept: float = 1.0) -> float:
        """The window, a real number, that minimises Eq. 15 (Eq. 16)."""
        return math.sqrt(2 * kept * (self.state / self.record - tokens))


def arithmetic_intensity(key_dim: int, value_dim: int, state_bytes: int = 4) -> float:
    """FLOP per byte of a conventional step (ReplaySSM Eq. 12)."""
    return (5 * key_dim * value_dim - value_dim) / (2 * state_bytes * key_dim * value_dim)


def crossover_tokens(shape: ModelShape, state_bytes: int = 4) -> float:
    """Context length at which attention reads as much as conventional decoding moves (App. C.2).

    Raises:
        ValueError: if the shape does not state its attention layers or KV bytes.
    """
    if not shape.attention_layers or not shape.kv_bytes:
        raise ValueError(f"{shape.name}: attention_layers and kv_bytes must be known, see `source`")
    state = 2 * shape.recurrent_layers * state_elements(shape.layer) * state_bytes
    return state / (shape.attention_layers * shape.kv_bytes)


def verify_bytes(method: str, state_bytes: int, tokens: int) -> int:
    """Bytes of state that one verify step of a published method moves (ReplaySSM Table 3)."""
    reads, writes = STATE_PASSES[method]
    return (reads + (tokens if writes is None else writes)) * state_bytes


def state_elements(layer: LayerSpec) -> int:
    """Elements of one request's state in one layer."""
    return layer.heads * layer.key_dim * layer.value_dim


@dataclass(frozen=True)
class Viewed:
    """A view of one layer's state that is no format.

    Attributes:
        name: what it is called. read: bytes of a request that a step reads, and a fold writes.
        memory: bytes that a request's view takes.
    """

    name: str
    read: int
    memory: int


@dataclass(frozen=True)
class Stored:
    """Bytes of one request's state in one layer, by what touches them.

    Attributes:
        checkpoint: read and written by a fold. read: by a step that does not fold.
        copy: of a view that is kept besides the checkpoint; a fold writes it. memory: it takes.
    """

    checkpoint: int
    read: int
    copy: int
    memory: int

    @classmethod
    def of(cls, layer: LayerSpec, checkpoint: Stores, view: Stores | Viewed | None) -> Stored:
        """From the formats' names or dtypes; view None: steps read the checkpoint."""

        def nbytes(form) -> int:
            return layer.heads * form.nbytes(layer.value_dim, layer.key_dim)

        state = nbytes(named("checkpoint", checkpoint, CHECKPOINTS))
        if view is None:
            return cls(state, state, 0, 0)
        if isinstance(view, Viewed):
            return cls(state, view.read, view.read, view.memory)
        copy = nbytes(named("view", view, VIEWS))
        return cls(state, copy, copy, copy)


@dataclass(frozen=True)
class Record:
    """Bytes of one token's record in one layer, by what reads them.

    Attributes:
        read: read by every step. raw: read besides when the record is folded. total: written.
    """

    read: int
    raw: int
    total: int

    @classmethod
    def of(cls, layer: LayerSpec, fold: str = "raw") -> Record:
        """From a layer; with erase a step reads the cached u and only a raw fold reads v, beta."""
        gate = math.prod(layer.decay_shape) * layer.compute.itemsize
        key = layer.key_heads * layer.key_dim * layer.activation.itemsize
        value = layer.heads * layer.value_dim * layer.activation.itemsize
        beta = layer.heads * layer.compute.itemsize if layer.beta else 0
        if not layer.erase:
            return cls(key + gate + value + beta, 0, key + gate + value + beta)
        used = key + gate + layer.heads * layer.value_dim * layer.correction.itemsize
        raw = value + beta if fold == "raw" else 0
        return cls(used, raw, used + raw)


@dataclass(frozen=True)
class Moved:
    """Bytes for one committed token of one request in one layer."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


def traffic(
    layer: LayerSpec,
    method: Method,
    *,
    window: int = 16,
    tokens: int = 1,
    kept: float = 1.0,
    checkpoint: Stores = torch.float32,
    view: Stores | Viewed | None = None,
    fold: str = "raw",
) -> Moved:
    """State and record bytes for a committed token, in the long run.

    Args:
        tokens: T of a step. kept: mean tokens of a step that are committed, 1 to T.
        checkpoint, view: formats, or another view's bytes, of replay; the other methods keep
            states as the checkpoint.

    Raises:
        ValueError: for tokens above the window, kept outside 1..tokens, or an unknown format.
    """
    _check(window, tokens, kept)
    stored = Stored.of(layer, checkpoint, view)
    state = stored.checkpoint
    if method == "plain":
        return Moved(state, state)
    if method == "snapshot":
        return Moved(state / kept, tokens * state / kept)
    record = Record.of(layer, fold)
    steps, folds, held, folded = _cycles(window, tokens, kept)
    read = (steps - folds) * stored.read + folds * state + held * record.read + folded * record.raw
    written = folds * (state + stored.copy) + steps * tokens * record.total
    return Moved(read / (steps * kept), written / (steps * kept))


def _cycles(window: int, tokens: int, kept: float) -> tuple[int, int, int, int]:
    """(steps, folds, records held summed over steps, records folded) of 64 whole fold cycles.

    A fractional `kept` is committed as whole tokens whose running mean is `kept`.
    """
    held, steps, folds, held_sum, folded, committed = 0, 0, 0, 0, 0, 0
    counting = False
    while folds < 64:
        due = held + tokens > window
        if counting:
            steps, held_sum = steps + 1, held_sum + held
            folds, folded = folds + due, folded + held * due
        counting = counting or due
        target = math.floor((committed + 1) * kept) - math.floor(committed * kept)
        committed += 1
        held = (0 if due else held) + min(max(target, 1), tokens)
    return steps, folds, held_sum, folded


def best_window(
    layer: LayerSpec,
    *,
    tokens: int = 1,
    kept: float = 1.0,
    checkpoint: Stores = torch.float32,
    view: Stores | Viewed | None = None,
    fold: str = "raw",
    largest: int = 64,
) -> int:
    """The window, `tokens` to `largest`, that moves the fewest bytes for a token.

    It is `tokens` where those are more than `largest`.
    """

    def moved(window: int) -> float:
        return traffic(
            layer,
            "replay",
            window=window,
            tokens=tokens,
            kept=kept,
            checkpoint=checkpoint,
            view=view,
            fold=fold,
        ).total

    return min(range(tokens, max(largest, tokens) + 1), key=moved)


def slot_bytes(
    layer: LayerSpec,
    method: Method,
    *,
    window: int = 16,
    tokens: int = 1,
    checkpoint: Stores = torch.float32,
    view: Stores | Viewed | None = None,
    fold: str = "raw",
) -> int:
    """Memory of one request in one layer: states or checkpoint and view, ring, conv inputs."""
    stored = Stored.of(layer, checkpoint, view)
    state = stored.checkpoint
    conv_input = layer.conv_channels * layer.activation.itemsize
    past = (layer.conv_width - 1) * conv_input
    if method == "plain":
        return state + past
    conv = past + tokens * conv_input
    if method == "snapshot":
        return (1 + tokens) * state + conv
    return state + stored.memory + (window + tokens) * Record.of(layer, fold).total + conv


@dataclass(frozen=True)
class Plan:
    """One method for one model; the keys of `lazystate plan --json`.

    Attributes:
        checkpoint: format of the states. view: of the copy that steps read; "full" for none.
        state_bytes_per_token: bytes of state and records for a committed token, all layers.
        step_us: microseconds that a batch's step needs at least for them; request_bytes: memory of
            one request, all recurrent layers; max_batch: requests that fit, None if not asked.
    """

    method: Method
    checkpoint: str
    view: str
    window: int | None
    tokens: int
    state_bytes_per_token: float
    step_us: float
    request_bytes: int
    max_batch: int | None

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        batch = "" if self.max_batch is None else f", at most {self.max_batch:,} requests"
        formats = "" if self.checkpoint == "fp32" else f", {self.checkpoint}"
        formats += "" if self.view == "full" else f", {self.view} view"
        return (
            f"{self.method} (T = {self.tokens}{window}{formats}): "
            f"{self.state_bytes_per_token:,.0f} state bytes a token, "
            f"{self.step_us:,.0f} us a step, "
            f"{self.request_bytes / 2**20:,.1f} MiB a request{batch}"
        )


def plan(
    shape: ModelShape,
    method: Method,
    *,
    batch: int,
    read_gbs: float,
    copy_gbs: float,
    window: int | None = None,
    tokens: int = 1,
    kept: float = 1.0,
    checkpoint: Stores = torch.float32,
    view: Stores | Viewed | None = None,
    free_bytes: int | None = None,
    context: int = 0,
) -> Plan:
    """Plan a method on a GPU.

    Args:
        read_gbs, copy_gbs: what a plain read and a copy (bytes read plus written) reach, GB/s.
        window: None for the best one. checkpoint, view: formats, as in `traffic`.
        free_bytes: memory for requests, weights excluded.
        context: tokens of KV cache that a request holds, where the shape states its KV bytes.
    """
    layer, layers = shape.layer, shape.recurrent_layers
    formats = {"checkpoint": checkpoint, "view": view}
    if method == "replay" and window is None:
        window = best_window(layer, tokens=tokens, kept=kept, **formats)
    used = window or max(16, tokens)  # of replay; the other methods have none
    moved = traffic(layer, method, window=used, tokens=tokens, kept=kept, **formats)
    per_step = batch * layers * kept
    memory = layers * slot_bytes(layer, method, window=used, tokens=tokens, **formats)
    kv = context * (shape.attention_layers or 0) * (shape.kv_bytes or 0)
    return Plan(
        method=method,
        checkpoint=named("checkpoint", checkpoint, CHECKPOINTS).name,
        view=_name(view),
        window=window if method == "replay" else None,
        tokens=tokens,
        state_bytes_per_token=layers * moved.total,
        step_us=step_us(per_step * moved.read, per_step * moved.written, read_gbs, copy_gbs),
        request_bytes=memory,
        max_batch=None if free_bytes is None else largest_batch(memory + kv, free_bytes),
    )


def _name(view: Stores | Viewed | None) -> str:
    """What `Plan` calls a view."""
    if view is None:
        return "full"
    return view.name if isinstance(view, Viewed) else named("view", view, VIEWS).name


def step_us(read: float, written: float, read_gbs: float, copy_gbs: float) -> float:
    """Microseconds to move the bytes: a read with its write at copy speed, the rest at read."""
    paired = min(read, written)
    return (max(read - paired, 0) / read_gbs + (paired + written) / copy_gbs) / 1e3


def largest_batch(request_bytes: int, free_bytes: int) -> int:
    """Requests that fit into the free memory."""
    return max(free_bytes // request_bytes, 0)


def _check(window: int, tokens: int, kept: float) -> None:
    if not 1 <= tokens <= window:
        raise ValueError(f"tokens must be 1 to window ({window}), got {tokens}")
    if not 1 <= kept <= tokens:
        raise ValueError(f"kept must be 1 to tokens ({tokens}), got {kept}")
