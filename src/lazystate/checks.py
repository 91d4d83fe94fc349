"""Argument checks of the public interface: one clear error, before anything is changed.

Values are looked at only where they lie on the CPU: on a GPU that would make a step wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lazystate.formats import CHECKPOINTS, VIEWS, named
from lazystate.gates import Prologue
from lazystate.ops import Storage, Views
from lazystate.spec import LayerSpec

INTEGERS = (torch.int32, torch.int64)


def sizes(specs: Sequence[LayerSpec], slots: int, window: int, max_tokens: int) -> None:
    """The constructor's layers and sizes."""
    if not specs:
        raise ValueError("specs must hold at least one layer, got none")
    for spec in specs:
        if not isinstance(spec, LayerSpec):
            raise ValueError(f"specs must be LayerSpecs, got {type(spec).__name__}")
    for name, size in (("slots", slots), ("window", window), ("max_tokens", max_tokens)):
        integer(name, size)
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not 1 <= max_tokens <= window:
        raise ValueError(
            f"max_tokens must be 1 to window ({window}), got {max_tokens}: a step's tokens must "
            "fit a window; widen the window or draft less"
        )


def storage(
    specs: Sequence[LayerSpec],
    checkpoint: object,
    view: object,
    fold: str,
    rounding: str,
    seed: int,
) -> Storage:
    """The constructor's choice of how states are stored."""
    form = named("checkpoint", checkpoint, CHECKPOINTS)
    copy = view
    if isinstance(view, Views):
        view.check(specs)
    elif view is not None:
        copy = named("view", view, VIEWS)
    if fold not in ("raw", "cached"):
        raise ValueError(f"fold must be 'raw' or 'cached', got {fold!r}")
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(f"rounding must be 'stochastic' or 'nearest', got {rounding!r}")
    if fold == "cached" and copy is not None and any(spec.erase for spec in specs):
        raise ValueError(
            "fold must be 'raw' with a view on delta-rule layers, got 'cached': the corrections "
            "that steps cache carry the view's rounding, and would take it into the checkpoint"
        )
    integer("seed", seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be 0 to 2^32 - 1, got {seed}")
    return Storage(form, copy, fold, rounding, seed)  # pyright: ignore (checked above)


def integer(name: str, given: object) -> None:
    """A whole number, and no bool."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise ValueError(f"{name} must be an int, got {given!r}")


def is_tensor(name: str, given: object) -> None:
    """A tensor, and no list or number."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(given).__name__}: torch.tensor(...)")


def tensor(
    name: str,
    given: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device | None = None,
) -> None:
    """Shape and, unless None, dtype and device of one argument."""
    is_tensor(name, given)
    if tuple(given.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}")
    if dtype is not None and given.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype}, got {given.dtype}: convert it, or change the spec"
        )
    if device is not None:
        on(name, given, device)


def on(name: str, given: Tensor, device: torch.device) -> None:
    """Device of one argument."""
    if given.device != device:
        raise ValueError(
            f"{name} must be on {device}, where the cache is, got {given.device}: move it there"
        )


def inputs(
    spec: LayerSpec,
    batch: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    prologue: Prologue | None,
    device: torch.device,
) -> None:
    """The inputs of one step; batch is (B, T)."""
    tensor("q", q, (*batch, spec.key_heads, spec.key_dim), spec.activation, device)
    tensor("k", k, (*batch, spec.key_heads, spec.key_dim), spec.activation, device)
    tensor("v", v, (*batch, spec.heads, spec.value_dim), spec.activation, device)
    compute = spec.compute if prologue is None else None
    tensor("log_decay", log_decay, (*batch, *spec.decay_shape), compute, device)
    takes = spec.beta
    if prologue is not None:
        _prologue(spec, prologue, device)
        takes = prologue.kind != "mamba2"
    if (beta is not None) != takes:
        whose = "layer's spec" if prologue is None else f"{prologue.kind} prologue"
        needs = "a beta" if takes else "no beta"
        raise ValueError(f"beta: this {whose} has {needs}, got {beta if beta is None else 1}")
    if beta is not None:
        tensor("beta", beta, (*batch, spec.heads), compute, device)
    if skip is None:
        return
    is_tensor("skip", skip)
    if skip.shape not in ((spec.heads,), (spec.heads, spec.value_dim)):
        raise ValueError(
            f"skip must have shape {[spec.heads]} or {[spec.heads, spec.value_dim]}, got "
            f"{list(skip.shape)}"
        )
    on("skip", skip, device)


def log_decay(given: Tensor, slots: Tensor, lengths: Tensor | None) -> None:
    """No growth: log_decay [B, T, ...] <= 0 in every token that counts, where it is on the CPU.

    Padded rows and what is behind a row's length may hold anything.
    """
    if given.device.type != "cpu" or not bool((given > 0).any()):
        return
    tokens = torch.arange(given.shape[1])
    counts = (slots >= 0).unsqueeze(1).expand(-1, len(tokens))
    if lengths is not None:
        counts = counts & (tokens < lengths.unsqueeze(1))
    growth = given.masked_fill(~(given > 0), 0).flatten(2).amax(-1)  # what is NaN is none
    largest = growth.masked_fill(~counts, 0).max()
    if largest > 0:
        raise ValueError(
            f"log_decay must be at most 0, got {float(largest):.3g}: it is the natural logarithm "
            "of a decay in 0..1, not the decay itself, nor its negative"
        )


def _prologue(spec: LayerSpec, prologue: Prologue, device: torch.device) -> None:
    """A prologue that makes what the layer takes."""
    if not isinstance(prologue, Prologue):
        raise ValueError(f"prologue must be a gates.Prologue, got {type(prologue).__name__}")
    channel = prologue.kind.startswith("kda")
    made = ("channel" if channel else "scalar", prologue.kind != "mamba2", True)
    if made != (spec.decay, spec.erase, spec.beta):
        raise ValueError(
            f"prologue makes inputs of a {prologue.kind} layer, but the spec has decay "
            f"{spec.decay!r}, erase {spec.erase}, beta {spec.beta}"
        )
    tensor("prologue's A_log", prologue.A_log, (spec.heads,), None, device)
    if prologue.dt_bias is not None:
        rest = spec.key_dim if channel else 1
        tensor("prologue's dt_bias", prologue.dt_bias, (spec.heads * rest,), None, device)


def per_layer(name: str, given: Sequence, layers: int) -> None:
    """One entry a layer."""
    if len(given) != layers:
        raise ValueError(
            f"{name} must have one entry for each of {layers} layers, got {len(given)}"
        )


def cursors(given: dict[str, Tensor], window: int, max_tokens: int) -> None:
    """Cursors of an export, each [n]: such as steps and loads leave them.

    Its values are read wherever they lie: an import is no part of a step.
    """
    at = {name: given[f"cursors.{name}"].cpu() for name in ("origin", "filled", "limit", "writes")}
    empty = given["cursors.empty"].cpu()
    wrong = {
        "origin": (at["origin"] < 0) | (empty & (at["origin"] > 0)),
        "limit": (at["limit"] < max_tokens) | (at["limit"] > window),
        "filled": (at["filled"] < 0) | (at["filled"] > at["limit"]),
        "writes": (at["writes"] < 0) | (empty & (at["writes"] > 0)),
    }
    for name, bad in wrong.items():
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            raise ValueError(
                f"exported['cursors.{name}'] is damaged: no step or load leaves "
                f"{int(at[name][place])} in place {place}, with limit {int(at['limit'][place])} of "
                f"window {window} and empty {bool(empty[place])}; export the requests again"
            )


def slots(given: Tensor, total: int, *, padded: bool, repeated: bool) -> Tensor:
    """Slot numbers as int64 [n]: in range, distinct unless repeated, negative only if padded."""
    is_tensor("slots", given)
    if given.dim() != 1 or given.dtype not in INTEGERS:
        raise ValueError(
            f"slots must be a one-dimensional int32 or int64 tensor, got {list(given.shape)} "
            f"of {given.dtype}"
        )
    given = given.to(torch.int64)
    if given.device.type != "cpu":
        return given
    numbers = given.tolist()
    real = [number for number in numbers if number >= 0]
    if not padded and len(real) < len(numbers):
        raise ValueError(f"slots must be 0 to {total - 1}, got {min(numbers)}")
    if real and max(real) >= total:
        raise ValueError(f"slots must be below {total}, got {max(real)}")
    if not repeated and len(set(real)) < len(real):
        raise ValueError("slots must be distinct, got one twice: a slot is one request")
    return given


def counts(name: str, given: Tensor, rows: int, low: int, high: int) -> Tensor:
    """Integer counts as int64 [rows], each low to high."""
    _integers(name, given, rows)
    if (
        given.device.type == "cpu"
        and rows
        and not low <= int(given.min()) <= int(given.max()) <= high
    ):
        raise ValueError(f"{name} must be {low} to {high}, got {given.tolist()}")
    return given.to(torch.int64)


def kept(given: Tensor, slots: Tensor, lengths: Tensor | None, tokens: int) -> Tensor:
    """Kept tokens as int64 [B]: 1 to the row's length, 0 on padded rows and rows of length 0."""
    _integers("kept", given, slots.numel())
    if given.device.type == "cpu":
        most = torch.full_like(slots, tokens) if lengths is None else lengths
        most = most.cpu()
        idle = (slots.cpu() < 0) | (most == 0)
        if bool((~idle & ((given < 1) | (given > most))).any()):
            raise ValueError(
                "kept must be 1 to the row's length (it counts the first token, which is always "
                f"kept), got {given.tolist()} for lengths {most.tolist()}"
            )
    return given.to(torch.int64)


def _integers(name: str, given: Tensor, rows: int) -> None:
    """An int32 or int64 tensor [rows]."""
    is_tensor(name, given)
    if tuple(given.shape) != (rows,) or given.dtype not in INTEGERS:
        raise ValueError(
            f"{name} must be an int32 or int64 tensor of shape [{rows}], got {list(given.shape)} "
            f"of {given.dtype}"
        )
