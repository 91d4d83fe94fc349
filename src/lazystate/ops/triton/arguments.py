"""What kernels are given: constants they are compiled for, and pointers and strides by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lazystate.formats import Format
from lazystate.gates import Prologue
from lazystate.ops.pool import CastView, LowRank, Pool
from lazystate.ops.states import States
from lazystate.spec import LayerSpec

PIECE = 16  # elements of a piece of K, and records of a block: a block is one more piece


class Inputs(NamedTuple):
    """What a step is given: pointers, or their strides of one axis, in elements.

    A_log and dt_bias are a prologue's, dense and the same for all tokens.
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    A_log: Any
    dt_bias: Any


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


class Stored(NamedTuple):
    """The parts of states in a format, or their strides of a slot; behind a slot they are dense."""

    elements: Any
    scales: Any
    total: Any


class Sketched(NamedTuple):
    """The parts of sketches, see `SketchView`, or their strides of a slot, 0 for what has none.

    map: rows [HV, G, K] that give coefficients: Omega^T or the offline map, or of each slot the
        exact map. places: int64 [HV], a dense head's number among the dense heads.
    """

    sketch: Any
    keep: Any
    mix: Any
    keys: Any
    copy: Any
    map: Any
    omega: Any
    ranks: Any
    places: Any


class Copies(NamedTuple):
    """What is kept of all states: checkpoint and view, each with its strides."""

    checkpoint: Stored
    checkpoint_slot: Stored
    view: Stored | Sketched
    view_slot: Stored | Sketched


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
class Gate(Constants):
    """What is done to inputs as they are loaded.

    Attributes:
        KIND: "none" for prepared inputs, or a `Prologue`'s kind. BIAS: whether it has dt_bias.
        NORM: whether q and k are normalised, with EPS, and q then multiplied by SCALE.
        LIMITED: whether dt_limit is given, LEAST, MOST. BETA_SCALE, BOUND: beta_scale, lower_bound.
    """

    KIND: str
    BIAS: bool
    NORM: bool
    EPS: float
    SCALE: float
    LIMITED: bool
    LEAST: float
    MOST: float
    BETA_SCALE: float
    BOUND: float


@dataclass(frozen=True)
class Shape(Constants):
    """A layer, and its ring.

    Attributes:
        HV: value heads. H: key heads. GROUP: HV / H. K, V: sizes of a key and a value. KC: pieces
            of K. ORDER: elements of K from one of a piece to the next. KP: K, or the next power of
            two. G: log-decays of a head, 1 or K.
        KEYS, VALUES, GATES: numbers in all heads' keys, values and log-decays of one token.
        ERASE, CHANNEL, BETA: see `LayerSpec`.
        R: positions of the ring, 0 in the conventional step, which has none. BLOCKS: of 16 records
            in a window. RAW: whether folds use raw records.
        gate: of the inputs.
    """

    HV: int
    H: int
    GROUP: int
    K: int
    KC: int
    ORDER: int
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
    gate: Gate


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


@dataclass(frozen=True)
class Form(Constants):
    """A number format, for states of K.

    Attributes:
        KIND: "dense", "fp8", "nvfp4" or "int". BITS: of an element. PER_BYTE: elements in a byte.
            BYTES: of a row of K, where it is not dense. GROUP: elements of a scale. GROUPS: in a
            row. MANTISSA, LOWEST, LARGEST: see `Format`.
        WORD: bits that are read at once. WORDS: in a row. ORDER: elements in a word. HALF: those of
            its lower 16 bits, or all. STEP: what they are multiplied by, besides a scale.
    """

    KIND: str
    BITS: int
    PER_BYTE: int
    BYTES: int
    GROUP: int
    GROUPS: int
    MANTISSA: int
    LOWEST: int
    LARGEST: float
    WORD: int
    WORDS: int
    ORDER: int
    HALF: int
    STEP: float


@dataclass(frozen=True)
class SketchForm(Constants):
    """A sketch, where another view has a number format.

    Attributes:
        KIND: "sketch". MAP: "pivot", "exact" or "offline". G: largest rank. P: pivots. PP: P, or
            the next power of two. RIDGE: lambda. COPY: whether there are dense heads.
    """

    KIND: str
    MAP: str
    G: int
    P: int
    PP: int
    RIDGE: float
    COPY: bool


@dataclass(frozen=True)
class Storing(Constants):
    """What a fold writes: the checkpoint's `Form`, and the view's.

    Attributes:
        VIEW: whether there is a view. STOCHASTIC: how the checkpoint is rounded. PLAIN: the states
            that steps read are what folds write, so that a fold can come first. TOTAL: whether a
            format needs a state's largest magnitude.
    """

    checkpoint: Form
    view: Form | SketchForm
    VIEW: bool
    STOCHASTIC: bool
    PLAIN: bool
    TOTAL: bool


@cache
def form_of(form: Format, key_dim: int) -> Form:
    """The constants of a format."""
    per_byte, word, order = _per_byte(form), _word(form, key_dim), order_of(form, key_dim)
    nbytes = triton.cdiv(key_dim, per_byte)
    return Form(
        KIND="dense" if form.dense else form.name if form.name in ("fp8", "nvfp4") else "int",
        BITS=form.bits,
        PER_BYTE=per_byte,
        BYTES=nbytes,
        GROUP=form.group or key_dim,
        GROUPS=triton.cdiv(key_dim, form.group or key_dim),
        MANTISSA=form.mantissa,
        LOWEST=form.lowest,
        LARGEST=form.largest,
        WORD=word,
        WORDS=8 * nbytes // word,
        ORDER=order,
        HALF=order // 2 if word == 32 else order,
        STEP={"fp8": 2.0**8, "nvfp4": 2.0**14}.get(form.name, 1.0),
    )


def _per_byte(form: Format) -> int:
    return 8 // form.bits if form.bits < 8 else 1


def _word(form: Format, key_dim: int) -> int:
    """Bits that are read at once: as many as rows, and with them slots, are multiples of.

    A piece's elements are a word apart: no more of them than K has.
    """
    row = 8 * triton.cdiv(key_dim, _per_byte(form))
    widest = triton.next_power_of_2(key_dim) // PIECE * form.bits
    return next((word for word in (32, 16) if row % word == 0 and word <= widest), 8)


def order_of(form: Format, key_dim: int) -> int:
    """Elements of K from one of a piece to the next: those of a word, or neighbours."""
    return 1 if form.dense else _word(form, key_dim) // form.bits


def storing_of(pool: Pool) -> Storing:
    """What folds of a pool write."""
    checkpoint, view, key_dim = pool.states.form, pool.view, pool.spec.key_dim
    if isinstance(view, LowRank):
        return _storing(checkpoint, _sketch_form(view), True, pool.states.key, key_dim)
    viewed = isinstance(view, CastView)
    read = view.states.form if isinstance(view, CastView) else checkpoint
    return _storing(checkpoint, read, viewed, pool.states.key, key_dim)


def _sketch_form(view: LowRank) -> SketchForm:
    return _sketch_constants(
        view.map, view.omega.shape[2], view.pivots, view.ridge, "copy" in view.stored
    )


@cache
def _sketch_constants(map: str, rank: int, pivots: int, ridge: float, dense: bool) -> SketchForm:
    return SketchForm(
        KIND="sketch",
        MAP=map,
        G=rank,
        P=pivots,
        PP=triton.next_power_of_2(pivots),
        RIDGE=ridge,
        COPY=dense,
    )


@cache
def _storing(
    checkpoint: Format,
    view: Format | SketchForm,
    viewed: bool,
    key: tuple[int, int] | None,
    key_dim: int,
) -> Storing:
    named = view.name if isinstance(view, Format) else "sketch"
    return Storing(
        checkpoint=form_of(checkpoint, key_dim),
        view=form_of(view, key_dim) if isinstance(view, Format) else view,
        VIEW=viewed,
        STOCHASTIC=key is not None,
        PLAIN=checkpoint.dense and not viewed and key is None,
        TOTAL="nvfp4" in (checkpoint.name, named),
    )


def states_of(pool: Pool) -> Copies:
    """A pool's checkpoints and views; what is absent is never touched."""
    if isinstance(pool.view, LowRank):
        return Copies(*_stored(pool.states), *_sketched(pool.view))
    view = pool.view.states if isinstance(pool.view, CastView) else pool.states
    return Copies(*_stored(pool.states), *_stored(view))


def _sketched(view: LowRank) -> tuple[Sketched, Sketched]:
    u = view.stored["sketch"]
    moving = [view.stored.get(name, u) for name in ("sketch", "keep", "mix", "keys", "copy")]
    own = view.stored.get("map")
    parts = Sketched(
        *moving, view.fixed if own is None else own, view.omega, view.ranks, view.places
    )
    step = 0 if own is None else own.stride(0)
    return parts, Sketched(*(part.stride(0) for part in moving), step, 0, 0, 0)


def _stored(states: States) -> tuple[Stored, Stored]:
    elements = states.parts["elements"]
    parts = Stored(*(states.parts.get(name, elements) for name in Stored._fields))
    return parts, Stored(*(part.stride(0) for part in parts))


def seed_of(pool: Pool) -> int:
    """Key of a pool's random bits as one number; 0 where nothing is random."""
    seed, layer = pool.states.key or (0, 0)
    return seed + (layer << 32)


def gate_of(prologue: Prologue | None, key_dim: int) -> Gate:
    """The constants of a prologue."""
    if prologue is None:
        return _gate("none", False, 0.0, 1.0, (0.0, 0.0), 1.0, 0.0)
    scale = key_dim**-0.5 if prologue.scale is None else prologue.scale
    return _gate(
        prologue.kind,
        prologue.dt_bias is not None,
        prologue.eps,
        scale,
        prologue.dt_limit,
        prologue.beta_scale,
        prologue.lower_bound,
    )


@cache
def _gate(
    kind: str,
    bias: bool,
    eps: float,
    scale: float,
    limit: tuple[float, float],
    beta_scale: float,
    bound: float,
) -> Gate:
    norm = kind not in ("none", "mamba2")
    limited = kind == "mamba2" and limit != (0.0, float("inf"))
    return Gate(kind, bias, norm, eps, scale, limited, *limit, beta_scale, bound)


@cache
def shape_of(
    spec: LayerSpec,
    gate: Gate,
    window: int = 0,
    records: int = 0,
    raw: bool = True,
    order: int = 1,
) -> Shape:
    """The constants that a kernel takes from a layer, and from its ring if it has one.

    order: elements of K in a word of the states that are read.
    """
    gates = spec.key_dim if spec.decay == "channel" else 1
    return Shape(
        HV=spec.heads,
        H=spec.key_heads,
        GROUP=spec.group,
        K=spec.key_dim,
        KC=order * triton.cdiv(spec.key_dim, order * PIECE),
        ORDER=order,
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
        gate=gate,
    )


def pool_shape(pool: Pool, viewed: bool, prologue: Prologue | None) -> Shape:
    """The constants of a pool's layer and ring, for reading its views or its checkpoints."""
    ring, states = pool.ring, pool.states
    if viewed and isinstance(pool.view, CastView):
        states = pool.view.states
    raw = ring.v is not None
    gate = gate_of(prologue, pool.spec.key_dim)
    order = 1
    if not (viewed and isinstance(pool.view, LowRank)):
        order = order_of(states.form, pool.spec.key_dim)
    return shape_of(pool.spec, gate, pool.window, ring.k.shape[1], raw, order)


def inputs_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    prologue: Prologue | None,
) -> tuple[Inputs, Strides]:
    """A step's inputs [B, T, heads, ...] and their strides; what is absent is never used."""
    moving = (q, k, v, log_decay, log_decay if beta is None else beta)
    A_log = log_decay if prologue is None else prologue.A_log
    bias = A_log if prologue is None or prologue.dt_bias is None else prologue.dt_bias
    strides = (Inputs(*(x.stride(axis) for x in moving), 0, 0) for axis in range(3))
    return Inputs(*moving, A_log, bias), Strides(*strides)


def ring_of(pool: Pool) -> tuple[Ring, Ring]:
    """A pool's ring, and its strides of a slot; what is absent is never touched."""
    ring = pool.ring
    parts = Ring(ring.k, ring.v, ring.u, ring.log_decay, ring.beta)
    parts = Ring(*(ring.k if part is None else part for part in parts))
    return parts, Ring(*(part.stride(0) for part in parts))
