"""What kernels are given: constants they are compiled for, and pointers and strides by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lazystate.ops.pool import Pool
from lazystate.spec import LayerSpec

PIECE = 16  # elements of a piece of K, and records of a block: a block is one more piece


class Inputs(NamedTuple):
    """What a step is given: pointers, or their strides of one axis, in elements."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any


class Strides(NamedTuple):
    """Strides of all inputs; behind a head they are dense."""

    row: Inputs
    token: Inputs
    head: Inputs


class Ring(NamedTuple):
    """A ring's tensors, or their strides of a slot; behind a slot they are dense."""

    k: Any
    v: Any
    u: Any
    log_decay: Any
    beta: Any


class Constants:
    """Numbers a kernel is compiled for, under one name: an argument that is a `tl.constexpr`.

    The compiler wants each of them to be one as well; to the interpreter they are plain numbers.
    """

    def __post_init__(self) -> None:
        if triton.knobs.runtime.interpret:
            return
        for field in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


@dataclass(frozen=True)
class Shape(Constants):
    """A layer, and its ring.

    Attributes:
        HV: value heads. H: key heads. GROUP: HV / H. K, V: sizes of a key and a value. KC: pieces
            of K. KP: K, or the next power of two. G: log-decays of a head, 1 or K.
        KEYS, VALUES, GATES: numbers in all heads' keys, values and log-decays of one token.
        ERASE, CHANNEL, BETA: see `LayerSpec`.
        R: positions of the ring, 0 in the conventional step, which has none. BLOCKS: of 16 records
            in a window. RAW: whether folds use raw records.
    """

    HV: int
    H: int
    GROUP: int
    K: int
    KC: int
    KP: int
    V: int
    G: int
    KEYS: int
    VALUES: int
    GATES: int
    ERASE: bool
    CHANNEL: bool
    BETA: bool
    R: int
    BLOCKS: int
    RAW: bool


@dataclass(frozen=True)
class Tiling(Constants):
    """How a launch cuts the rows [V] of states.

    Attributes:
        BV: value channels of a tile. TILES: tiles of a program. PER_HEAD: of a head. STAGES: in
            flight.
    """

    BV: int
    TILES: int
    PER_HEAD: int
    STAGES: int


@cache
def shape_of(spec: LayerSpec, window: int = 0, records: int = 0, raw: bool = True) -> Shape:
    """The constants that a kernel takes from a layer, and from its ring if it has one."""
    gates = spec.key_dim if spec.decay == "channel" else 1
    return Shape(
        HV=spec.heads,
        H=spec.key_heads,
        GROUP=spec.group,
        K=spec.key_dim,
        KC=triton.cdiv(spec.key_dim, PIECE),
        KP=triton.next_power_of_2(spec.key_dim),
        V=spec.value_dim,
        G=gates,
        KEYS=spec.key_heads * spec.key_dim,
        VALUES=spec.heads * spec.value_dim,
        GATES=spec.heads * gates,
        ERASE=spec.erase,
        CHANNEL=spec.decay == "channel",
        BETA=spec.beta,
        R=records,
        BLOCKS=triton.cdiv(window, PIECE),
        RAW=raw,
    )


def pool_shape(pool: Pool) -> Shape:
    """The constants of a pool's layer and ring."""
    return shape_of(pool.spec, pool.window, pool.ring.k.shape[1], pool.ring.v is not None)


def inputs_of(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None
) -> tuple[Inputs, Strides]:
    """A step's inputs [B, T, heads, ...] and their strides."""
    inputs = Inputs(q, k, v, log_decay, log_decay if beta is None else beta)
    return inputs, Strides(*(Inputs(*(x.stride(axis) for x in inputs)) for axis in range(3)))


def ring_of(pool: Pool) -> tuple[Ring, Ring]:
    """A pool's ring, and its strides of a slot; what is absent is never touched."""
    ring = pool.ring
    parts = Ring(ring.k, ring.v, ring.u, ring.log_decay, ring.beta)
    parts = Ring(*(ring.k if part is None else part for part in parts))
    return parts, Ring(*(part.stride(0) for part in parts))
