"""What one page of one layer holds: vLLM's own states, and behind them view and ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.sketches import Sketches
from lazystate.engines.vllm.support import Kind
from lazystate.formats import Format
from lazystate.ops import Storage
from lazystate.ops.pool import CastView, FullView, Pool, Ring, View, record_parts
from lazystate.ops.states import States
from lazystate.ops.triton.positions import CURSOR
from lazystate.spec import LayerSpec

ALIGN = 16  # bytes, of a vector load


@dataclass(frozen=True)
class Part:
    """One tensor of a page: its name, and shape and dtype of one block's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in a page."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Page:
    """One layer's page.

    vLLM packs parts back to back, so that what aligns them is a part as well ("pad").

    Attributes:
        spec: of the layer on this device, its heads divided. window: L. storage: of its states.
        tokens: T, most tokens of a step that is no prefill.
        parts: in order; "conv" and "state" are those of vLLM's own layer.
        state: dtype of the state in vLLM's own layer, which prefill reads and writes.
    """

    spec: LayerSpec
    window: int
    tokens: int
    storage: Storage
    parts: tuple[Part, ...]
    state: torch.dtype

    @property
    def widened(self) -> bool:
        """Whether checkpoints are not what vLLM's prefill reads and writes."""
        form = self.storage.checkpoint
        return not form.dense or form.dtype != self.state

    @property
    def stated(self) -> tuple[Part, ...]:
        """The parts as a layer states them to vLLM, which copies them one by one: what is behind
        the state is one of bytes.
        """
        end = 1 + [part.name for part in self.parts].index("state")
        rest = sum(part.nbytes for part in self.parts[end:])
        return (*self.parts[:end], Part("rest", (rest,), torch.uint8))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the parts that are stated."""
        return tuple(part.shape for part in self.stated)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the parts that are stated."""
        return tuple(part.dtype for part in self.stated)

    @property
    def records(self) -> int:
        """R, positions of a ring."""
        return self.window + self.tokens

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """All parts by name. tensors: of those that are stated, [blocks, ...]."""
        *before, rest = tensors
        found = {part.name: x for part, x in zip(self.parts, before, strict=False)}
        offset = 0
        for part in self.parts[len(before) :]:
            bytes_of = rest[:, offset : offset + part.nbytes]
            found[part.name] = bytes_of.view(part.dtype).unflatten(1, part.shape)
            offset += part.nbytes
        return found

    def prefilled(self, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What vLLM's prefill reads and writes: the last width - 1 inputs, and the state."""
        return parts["conv"][:, self.tokens - 1 :], parts["state"]

    def pool(self, by_name: dict[str, Tensor], layer: int, device: int = 0) -> Pool:
        """The pages of one layer as a pool: a slot is a block, and slots are a page apart.

        Args:
            by_name: all parts, each [blocks, ...] and dense behind the block.
            layer: its number in the model. device: which of those that share the layer's heads.

        Raises:
            ValueError: for a layer that the calibration of a sketch lacks.
        """
        storage = self.storage
        key = (storage.seed, layer) if storage.rounding == "stochastic" else None
        form = storage.checkpoint
        names = form.shapes(self.spec.value_dim, self.spec.key_dim)
        parts = {name: by_name[_stated(name)] for name in names}
        states = States(form, self.spec.state_shape, parts, key if form.narrow else None)
        exact = FullView(states, self.spec.compute)
        view = self._view(by_name, layer, device) or exact
        raw = not self.spec.erase or storage.fold == "raw"
        records = {name: by_name[name] for name in record_parts(self.spec, raw)}
        ring = Ring(**records)  # type: ignore[arg-type]
        return Pool(self.spec, self.window, storage.fold, states, ring, exact, view, None)

    def _view(self, by_name: dict[str, Tensor], layer: int, device: int) -> View | None:
        form = self.storage.view
        if isinstance(form, Format):
            parts = {
                name: by_name[_viewed(name)] for name in form.shapes(*self.spec.state_shape[1:])
            }
            return CastView(States(form, self.spec.state_shape, parts), self.spec.compute)
        if isinstance(form, Sketches):
            parts = {name: by_name[_viewed(name)] for name in form.parts(self.spec)}
            return form.view(layer, device, self.spec, parts)
        return None


def page_of(
    kind: Kind,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    activation: torch.dtype,
    options: Options,
    devices: int = 1,
    tokens: int = 1,
) -> Page:
    """The page of a layer.

    Made from what vLLM itself keeps, which the layer and the model's class both state, so that the
    two cannot disagree on the page.

    Args:
        kind: of the layer.
        shapes, dtypes: of the convolution's state [width - 1 + drafts, C] and of the state
            [HV, V, K].
        activation: dtype of the model. devices: over which a layer's heads are divided.
        tokens: T, a token and its drafts.

    Raises:
        ValueError: for options that do not fit the layer.
    """
    (_, channels), (heads, value_dim, key_dim) = shapes
    spec = LayerSpec(
        heads=heads,
        key_heads=(channels - heads * value_dim) // (2 * key_dim),
        key_dim=key_dim,
        value_dim=value_dim,
        decay="channel" if kind == "kda" else "scalar",
        erase=kind != "mamba2",
        activation=activation,
    )
    storage = options.storage(spec, dtypes[1], devices)
    records = options.window + tokens
    raw = not spec.erase or storage.fold == "raw"
    parts = [
        Part("conv", tuple(shapes[0]), dtypes[0]),
        *(
            Part(_stated(name), (heads, *shape), dtype)
            for name, (shape, dtype) in storage.checkpoint.shapes(value_dim, key_dim).items()
        ),
        Part("cursor", (CURSOR,), torch.int32),
        *_view_parts(storage, spec),
        *(
            Part(name, (records, *shape), dtype)
            for name, (dtype, shape) in record_parts(spec, raw).items()
        ),
    ]
    return Page(spec, options.window, tokens, storage, _aligned(*parts), dtypes[1])


def _view_parts(storage: Storage, spec: LayerSpec) -> Iterator[Part]:
    if isinstance(storage.view, Format):
        for name, (shape, dtype) in storage.view.shapes(spec.value_dim, spec.key_dim).items():
            yield Part(_viewed(name), (spec.heads, *shape), dtype)
    elif isinstance(storage.view, Sketches):
        for name, (dtype, count) in storage.view.parts(spec).items():
            yield Part(_viewed(name), (count,), dtype)


def _stated(name: str) -> str:
    return "state" if name == "elements" else f"state.{name}"


def _viewed(name: str) -> str:
    return f"view.{name}"


def _aligned(*parts: Part) -> tuple[Part, ...]:
    aligned: list[Part] = []
    for part in parts:
        aligned.append(part)
        if rest := -part.nbytes % ALIGN:
            aligned.append(Part("pad", (rest,), torch.uint8))
    return tuple(aligned)
