"""The sketch of a layer's states as a read view: what a step multiplies instead of a checkpoint.

SketchSSM reads U C q~, with q~ the query times every decay and erase since the checkpoint, and
sums raw values. Putting the low-rank U C in the checkpoint's place gives the same numbers
(docs/maths.md, Eq. 16), so the step needs nothing of its own: its corrections are computed against
the view, as with a rounded copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lazystate.ops.torch.step import per_head, product
from lazystate.planner import Viewed
from lazystate.sketch import maps
from lazystate.sketch.traffic import MAPS, Map, view_bytes
from lazystate.spec import LayerSpec

DENSE = 0  # the rank of a head that reads a copy of its whole state


@dataclass(frozen=True)
class Sketch:
    """The sketches of all recurrent layers of a model: `StateCache(specs, ..., view=sketch)`.

    Attributes:
        omega: FP32 [layers, HV, K, G], orthonormal columns, leading first.
        ranks: int64 [layers, HV], 1 to G, or `DENSE` for a head that reads a copy of its state.
        map: "pivot", "exact", or "offline", which needs metric. metric: E0 [layers, HV, K, K].
        dtype: of all that is stored.
    """

    omega: Tensor
    ranks: Tensor
    map: Map = "pivot"
    metric: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    def check(self, specs: Sequence[LayerSpec]) -> None:
        """Whether it is of layers like these.

        Raises:
            ValueError: naming what differs.
        """
        layers, heads, key_dim = self.omega.shape[:3]
        if len(specs) != layers:
            raise ValueError(f"view must sketch {len(specs)} layers, got a sketch of {layers}")
        for number, spec in enumerate(specs):
            if (spec.heads, spec.key_dim) != (heads, key_dim):
                raise ValueError(
                    f"view must sketch {spec.heads} heads of key_dim {spec.key_dim} in layer "
                    f"{number}, got a sketch of {heads} heads of {key_dim}"
                )

    def allocate(self, layer: int, spec: LayerSpec, slots: int, device: torch.device) -> SketchView:
        """Room for one layer's sketches, see `Views`."""
        return SketchView.allocate(
            self.omega[layer].to(device, spec.compute),
            self.ranks[layer],
            slots,
            spec.value_dim,
            map=self.map,
            metric=None if self.metric is None else self.metric[layer],
            dtype=self.dtype,
        )

    def slice_heads(self, start: int, stop: int) -> Sketch:
        """The part of value heads start to stop - 1, as a tensor-parallel rank holds them.

        Raises:
            ValueError: for heads that there are not.
        """
        heads = self.ranks.shape[1]
        if not 0 <= start < stop <= heads:
            raise ValueError(f"heads must lie in 0..{heads}, got {start}..{stop}")
        metric = None if self.metric is None else self.metric[:, start:stop]
        return replace(
            self,
            omega=self.omega[:, start:stop],
            ranks=self.ranks[:, start:stop],
            metric=metric,
        )

    def planned(self, layer: int, spec: LayerSpec) -> Viewed:
        """What the planner counts for one layer."""
        room = self.allocate(layer, spec, 1, torch.device("cpu"))
        memory = sum(tensor.nbytes for tensor in room.stored.values())
        return Viewed("sketch", room.bytes_read(), memory)


@dataclass(frozen=True)
class SketchView:
    """Sketches of all slots of one layer, a rank for each head; dense heads keep a copy instead.

    Attributes:
        omega: [HV, K, G], zero behind a head's rank. ranks: int64 [HV], `DENSE` for a dense head.
        fixed: [HV, G, K], what stays the same for every request: Omega^T, or the offline map.
        map, pivots, ridge: which coefficient map, and its P and lambda.
        places: int64 [HV], a dense head's number among the dense heads.
        stored: by name, slot first: `sketch` [slots, HV, G, V], U's columns one after the other, so
            that a smaller rank reads less and not a part of every row; of the pivot map `keep`
            [.., HV, G], `mix` [.., HV, G, p], `keys` [.., HV, K, p]; of the exact map `map`
            [.., HV, G, K]; with dense heads `copy` [slots, dense heads, V, K].
    """

    omega: Tensor
    ranks: Tensor
    fixed: Tensor
    map: Map
    pivots: int
    ridge: float
    stored: dict[str, Tensor]
    places: Tensor

    @classmethod
    def allocate(
        cls,
        omega: Tensor,
        ranks: Tensor,
        slots: int,
        value_dim: int,
        *,
        map: Map = "pivot",
        pivots: int = maps.PIVOTS,
        ridge: float = maps.RIDGE,
        metric: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        columns: int = 0,
    ) -> SketchView:
        """Room for the sketches of `slots` states, on omega's device.

        All zeros: what lies behind a head's rank stays so, whichever backend writes the rest.

        Args:
            omega: [HV, K, G], compute dtype, orthonormal columns, leading first.
            ranks: int [HV], 1 to G, or `DENSE`. value_dim: V.
            map: "pivot", "exact" (ridge 0: minimum norm), or "offline", which needs metric.
            metric: E0 [HV, K, K]. dtype: of all that is stored.
            columns: room for this rank, where views of several layers must be alike; 0 for the
                largest of `ranks`.

        Raises:
            ValueError: for an unknown map, ranks that do not fit omega, or a missing metric.
        """
        if map not in MAPS:
            raise ValueError(f"map must be one of {', '.join(MAPS)}, got {map!r}")
        if ranks.shape != omega.shape[:1]:
            raise ValueError(f"ranks must be [{len(omega)}], one a head, got {list(ranks.shape)}")
        ranks = ranks.to(omega.device, torch.int64)
        omega = maps.padded(omega, ranks)
        omega = omega[..., : columns or max(int(ranks.max()), 1)].contiguous()
        heads, key_dim, largest = omega.shape
        fixed = omega.mT
        if map == "offline":
            if metric is None:
                raise ValueError("map 'offline' needs metric, the calibrated mean of S^T S")
            fixed = maps.offline_map(metric.to(omega), omega)
        pivots = min(pivots, largest)
        shapes: dict[str, tuple[int, ...]] = {"sketch": (heads, largest, value_dim)}
        if map == "pivot":
            shapes |= {"keep": (heads, largest), "mix": (heads, largest, pivots)}
            shapes |= {"keys": (heads, key_dim, pivots)}
        elif map == "exact":
            shapes |= {"map": (heads, largest, key_dim)}
        places = (ranks == DENSE).cumsum(0) - 1
        if dense := int(places[-1]) + 1:
            shapes |= {"copy": (dense, value_dim, key_dim)}
        stored = {
            name: torch.zeros(slots, *shape, dtype=dtype, device=omega.device)
            for name, shape in shapes.items()
        }
        return cls(omega, ranks, fixed.contiguous(), map, pivots, ridge, stored, places)

    def read(self, slots: Tensor | None, vectors: Tensor) -> Tensor:
        """The product S x: slots [B], vectors [B, X, K, n] -> [B, X, rows, n], X dividing HV.

        slots None: every slot of the pool, in order.
        """
        heads = len(self.omega)
        x = per_head(vectors, heads // vectors.shape[1], 1)
        part = {
            name: (t if slots is None else t.index_select(0, slots)).to(x.dtype)
            for name, t in self.stored.items()
        }
        if self.map == "exact":
            coefficients = product(part["map"], x)
        else:
            coefficients = product(self.fixed.expand(len(x), -1, -1, -1), x)
        if self.map == "pivot":
            near = product(part["mix"], product(part["keys"].mT, x))
            coefficients = part["keep"].unsqueeze(-1) * coefficients + near
        out = product(part["sketch"].mT, coefficients)
        if "copy" in part:
            dense = self.ranks == DENSE
            out[:, dense] = product(part["copy"], x[:, dense])
        rows = heads // vectors.shape[1] * out.shape[2]
        return out.reshape(len(x), vectors.shape[1], rows, x.shape[-1])

    def store(self, slots: Tensor, state: Tensor) -> None:
        """Sketch the folded state [B, HV, V, K], compute dtype, into `slots` [B]."""
        new = {"sketch": maps.sketch(state, self.omega).mT}
        if self.map == "pivot":
            factors = maps.pivot_map(state, self.omega, pivots=self.pivots, ridge=self.ridge)
            new |= {"keep": factors.keep, "mix": factors.mix, "keys": factors.keys}
        elif self.map == "exact":
            new["map"] = maps.exact_map(state, self.omega, ridge=self.ridge)
        if "copy" in self.stored:
            new["copy"] = state[:, self.ranks == DENSE]
        for name, part in new.items():
            self.stored[name].index_copy_(0, slots, part.to(self.stored[name].dtype))

    @cached_property
    def _bytes(self) -> int:
        value_dim, key_dim = self.stored["sketch"].shape[3], self.omega.shape[1]
        size = self.stored["sketch"].element_size()
        dense = value_dim * key_dim * size

        def of(rank: int) -> int:
            return view_bytes(
                key_dim, value_dim, rank, map=self.map, pivots=self.pivots, element=size
            )

        return sum(dense if rank == DENSE else of(rank) for rank in self.ranks.tolist())

    def bytes_read(self) -> int:
        """Bytes of one slot that a read needs: each head's own rank, without the padding."""
        return self._bytes

    def bytes_stored(self) -> int:
        """Bytes that one row's fold writes for the view, besides the checkpoint."""
        return self.bytes_read()

    def tensors(self) -> dict[str, Tensor]:
        """What the view keeps, by name, slot first."""
        return {f"view.{name}": tensor for name, tensor in self.stored.items()}
