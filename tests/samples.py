"""Layers small enough to follow by hand, and inputs for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lazystate import LayerSpec, StateCache
from lazystate.gates import Inputs, Kind, Prologue, Raw
from lazystate.reference.tokens import TokenCache

_HEADS: dict[str, Any] = {"heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 5}

# Every choice of decay, erase and beta that a published layer makes.
SPECS = {
    "mamba2": LayerSpec(**_HEADS, decay="scalar", erase=False),
    "gdn": LayerSpec(**_HEADS, decay="scalar", erase=True),
    "kda": LayerSpec(**_HEADS | {"key_heads": 4}, decay="channel", erase=True),
    "gla": LayerSpec(**_HEADS, decay="channel", erase=False, beta=False),
    "lightning": LayerSpec(**_HEADS, decay="scalar", erase=False, beta=False),
}
KINDS = list(SPECS)

# From "keeps everything" to a reset, past what exp can represent in any dtype.
EXTREME = (0.0, -1e-8, -5.0, -30.0, -100.0, -float("inf"))


def layer(kind: str, activation: torch.dtype = torch.float64, **changes: Any) -> LayerSpec:
    """A small layer of a kind."""
    return replace(SPECS[kind], activation=activation, **changes)


def draw(
    spec: LayerSpec,
    batch: int,
    tokens: int,
    *,
    decays: tuple[float, ...] | None = None,
    generator: torch.Generator | None = None,
) -> Inputs:
    """Random inputs of a layer: unit keys, and log-decays as models have them or from `decays`."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, dtype=torch.float64, generator=generator)

    q, k = normal(spec.key_heads, spec.key_dim), normal(spec.key_heads, spec.key_dim)
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay = -torch.nn.functional.softplus(normal(*spec.decay_shape) - 2)
    if decays is not None:
        which = torch.randint(len(decays), log_decay.shape, generator=generator)
        log_decay = torch.tensor(decays, dtype=torch.float64)[which]
    beta = torch.sigmoid(normal(spec.heads)).to(spec.compute) if spec.beta else None
    v = normal(spec.heads, spec.value_dim)
    narrow = (x.to(spec.activation) for x in (q, k, v))
    return Inputs(*narrow, log_decay.to(spec.compute), beta)


def draw_raw(
    kind: Kind, spec: LayerSpec, batch: int, tokens: int, *, packed: bool = False, **options: Any
) -> Raw:
    """Random raw inputs of a layer, q and k of any length, with a prologue of `options`.

    packed: q, k and v are slices of one tensor, as a projection leaves them.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape).to(spec.activation)

    keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
    q, k, v = normal(2 * keys + values).split([keys, keys, values], -1)
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    bias = spec.heads * (spec.key_dim if spec.decay == "channel" else 1)
    weights = {"A_log": torch.randn(spec.heads) / 2, "dt_bias": torch.randn(bias) - 2}
    return Raw(
        q.unflatten(-1, (spec.key_heads, spec.key_dim)),
        k.unflatten(-1, (spec.key_heads, spec.key_dim)),
        v.unflatten(-1, (spec.heads, spec.value_dim)),
        normal(*spec.decay_shape),
        None if kind == "mamba2" else normal(spec.heads),
        None,
        Prologue(kind, **weights | options),
    )


def slots(*numbers: int) -> Tensor:
    """A slot tensor."""
    return torch.tensor(numbers, dtype=torch.int64)


def pair(specs: LayerSpec | list[LayerSpec], count: int, **options: Any):
    """A cache and the list-of-tokens model of the same slots."""
    listed = [specs] if isinstance(specs, LayerSpec) else specs
    return StateCache(listed, count, **options), TokenCache(listed, count)


def advance(cache: StateCache, rows: Tensor, inputs: Inputs, kept: Tensor | None = None) -> Tensor:
    """One model step of a cache of one layer: outputs [B, T, HV, V]."""
    ticket = cache.begin(rows, inputs.q.shape[1])
    out = cache.step(ticket, 0, *inputs)
    cache.commit(ticket, kept)
    return out


def rows_of(inputs: Inputs, rows: Tensor) -> Inputs:
    """The given batch rows of a step's inputs."""
    return inputs._replace(
        **{
            name: x[rows]
            for name, x in inputs._asdict().items()
            if x is not None and name != "skip"
        }
    )
