"""StateCache: the recurrent state of many requests as checkpoints and rings (docs/maths.md).

One model step is `begin`, then for every layer `convolve` and `step`, then `commit`:

    ticket = cache.begin(slots, tokens=4)
    for layer in range(cache.layers):
        mixed = cache.convolve(ticket, layer, x, weight)
        out = cache.step(ticket, layer, q, k, v, log_decay, beta)
    cache.commit(ticket, kept)

Standard decoding has one token and keeps it; speculative verification has more and keeps the
accepted ones. Rolling back is not committing. Nothing here carries gradients: a state that did
would hold on to every step before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lazystate import checks, ops
from lazystate.formats import Rounding
from lazystate.gates import Prologue
from lazystate.spec import LayerSpec


class StepError(RuntimeError):
    """A call came at the wrong moment: a step left open, committed twice, or not finished."""


@dataclass
class Ticket:
    """One model step in progress; `StateCache.commit` consumes it.

    Attributes:
        slots: int64 [B]. tokens: T. lengths: int64 [B], or None where all rows have T.
    """

    slots: Tensor
    tokens: int
    lengths: Tensor | None
    _rows: Any
    _stepped: set[int] = field(default_factory=set)
    _convolved: set[int] = field(default_factory=set)


class StateCache:
    """Recurrent state of `slots` requests in all recurrent layers of one model.

    Args:
        specs: one LayerSpec a recurrent layer, in order (or a single one).
        slots: requests that can be held; a slot is any number in [0, slots).
        window: L, committed records a slot holds at most before they are folded; 1 or more.
        max_tokens: most tokens of one step, 1 to `window`; a ring has L + max_tokens positions.
        checkpoint: format of the state after a fold: "fp32", "fp16", "bf16", "fp8" or "nvfp4"
            (`lazystate.formats`), or a dtype.
        view: format of a second copy, which steps that do not fold read in place of the checkpoint:
            one of these, "int8", "int4" or "int2", rounded to nearest; or a
            `lazystate.sketch.Sketch` of the layers. Its error does not accumulate, since folds
            start from the checkpoint. None: no copy.
        rounding: into a checkpoint narrower than FP32: "stochastic", without a bias that would add
            up from fold to fold, or "nearest".
        seed: of stochastic rounding, 0 to 2^32 - 1. A program gives the same bits again; what is
            drawn depends on seed, layer, slot, head, and how often the slot was written.
        fold: "raw" derives the corrections of delta-rule layers again from raw records, "cached"
            folds the rounded ones: fewer bytes, and a drift that docs/measured.md states.
        device: where all tensors live.
        backend: "torch", "triton" (windows up to 64, up to 16 tokens a step), or "auto" for Triton
            on a CUDA device and PyTorch elsewhere.

    Raises:
        ValueError: for a size or format out of range, naming the argument; for a backend that does
            not do what is asked.
    """

    def __init__(
        self,
        specs: LayerSpec | Sequence[LayerSpec],
        slots: int,
        *,
        window: int = 16,
        max_tokens: int = 1,
        checkpoint: str | torch.dtype = torch.float32,
        view: str | torch.dtype | ops.Views | None = None,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        fold: ops.Fold = "raw",
        device: torch.device | str = "cpu",
        backend: ops.BackendName = "auto",
    ) -> None:
        self.specs = (specs,) if isinstance(specs, LayerSpec) else tuple(specs)
        checks.sizes(self.specs, slots, window, max_tokens)
        storage = checks.storage(self.specs, checkpoint, view, fold, rounding, seed)
        self.slots, self.window, self.max_tokens = slots, window, max_tokens
        self._storage = storage
        self.device = torch.device(device)
        self._backend = ops.backend(backend, self.device, storage, window, max_tokens)
        self._records = window + max_tokens
        self._open: Ticket | None = None
        self._cursors = ops.Cursors.allocate(slots, window, self.device)
        self.device = self._cursors.origin.device  # "cuda" has got its number
        self._pools = [
            ops.allocate(
                spec,
                slots,
                layer=layer,
                window=window,
                max_tokens=max_tokens,
                storage=storage,
                device=self.device,
            )
            for layer, spec in enumerate(self.specs)
        ]
        self.reset(torch.arange(slots, device=self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> StateCache:
        """A cache with copies of all requests, an open step included."""
        memo[id(self._backend)] = self._backend  # a module, which cannot be copied
        new = object.__new__(StateCache)
        memo[id(self)] = new
        vars(new).update(deepcopy(vars(self), memo))
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what builds such a cache, and what it holds; not while a step is open."""
        self._require_closed("pickle")
        backend = self._backend.__name__.rpartition(".")[2]  # pyright: ignore (a module)
        options = {
            "window": self.window,
            "max_tokens": self.max_tokens,
            "device": self.device,
            "backend": backend,
            **self._storage.options,
        }
        return _unpickled, (self.specs, self.slots, options, self._tensors())

    @property
    def layers(self) -> int:
        """Recurrent layers held."""
        return len(self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoints, rings, views, convolution inputs and cursors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def nbytes_per_slot(self) -> int:
        """Bytes that one request takes."""
        return self.nbytes // self.slots

    def begin(self, slots: Tensor, tokens: int = 1, lengths: Tensor | None = None) -> Ticket:
        """Start a model step: decide, once for all layers, which rows fold and where they append.

        Args:
            slots: int64 [B], distinct; a negative slot is a padded row, which does nothing.
            tokens: T, 1 to max_tokens.
            lengths: integer [B] in 0..T where rows differ (drafts are ragged); None for T each.
                A row of length 0 does nothing.

        Raises:
            StepError: if the last step was not committed.
            ValueError: for slots, tokens or lengths out of range.
        """
        self._require_closed("begin")
        checks.integer("tokens", tokens)
        if not 1 <= tokens <= self.max_tokens:
            raise ValueError(
                f"tokens must be 1 to max_tokens ({self.max_tokens}), got {tokens}; give the cache "
                "a larger max_tokens, or take the step in pieces"
            )
        slots = self._slots(slots, padded=True)
        if lengths is not None:
            lengths = checks.counts("lengths", lengths, slots.numel(), 0, tokens).to(self.device)
        rows = self._backend.begin(
            self._cursors, slots, lengths, tokens, self.window, self._records
        )
        self._open = Ticket(slots, tokens, lengths, rows)
        return self._open

    def convolve(
        self,
        ticket: Ticket,
        layer: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        silu: bool = True,
    ) -> Tensor:
        """The layer's short causal convolution; its inputs are kept and committed like records.

        Args:
            x: [B, T, C]. weight: [C, width]. bias: [C] or None. silu: apply SiLU to the result.

        Returns:
            [B, T, C], dtype of x; zeros on padded rows and behind a row's length.
        """
        if torch.is_grad_enabled():  # cheaper, where it is off anyway, than to enter it again
            with torch.no_grad():
                return self.convolve(ticket, layer, x, weight, bias, silu=silu)
        spec = self._layer(ticket, layer)
        if not spec.conv_channels:
            raise ValueError(f"layer {layer} has no convolution: its spec has conv_channels = 0")
        channels, device = spec.conv_channels, self.device
        shape = ticket.slots.numel(), ticket.tokens, channels
        checks.tensor("x", x, shape, spec.activation, device)
        checks.tensor("weight", weight, (channels, spec.conv_width), None, device)
        if bias is not None:
            checks.tensor("bias", bias, (channels,), None, device)
        ticket._convolved.add(layer)
        return self._backend.convolve(self._pools[layer], ticket._rows, x, weight, bias, silu)

    def step(
        self,
        ticket: Ticket,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None = None,
        skip: Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Tensor:
        """Outputs of T tokens in one layer (Eq. 8-14), e.g. `step(ticket, 0, *gates.gdn(...))`.

        Args:
            q, k: [B, T, H, K]. v: [B, T, HV, V]; activation dtype.
            log_decay: [B, T, HV] or [B, T, HV, K], natural logarithm, <= 0 (-inf is a reset),
                compute dtype (FP32).
            beta: [B, T, HV], compute dtype, exactly where the spec has beta.
            skip: [HV] or [HV, V]: adds skip * v to the output (Mamba-2's D).
            prologue: makes the step's inputs from raw ones, in the kernel where there is one: q and
                k then come before normalisation, log_decay is the raw gate (dt, a) and beta the raw
                b, both of any floating dtype (`gates.Raw`).

        Returns:
            [B, T, HV, V], activation dtype; zeros on padded rows and behind a row's length.

        Raises:
            StepError: if the ticket is not the open one, the layer has stepped already, or it has a
                convolution that was not called.
            ValueError: for a shape or dtype that the layer's spec does not state, a tensor that is
                not on the cache's device, or log_decay above 0 (checked where it is on the CPU;
                elsewhere the state then grows, as the recurrence says, up to infinity).
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.step(ticket, layer, q, k, v, log_decay, beta, skip, prologue)
        spec = self._layer(ticket, layer)
        if layer in ticket._stepped:
            raise StepError(f"layer {layer} has already stepped in this model step")
        if spec.conv_channels and layer not in ticket._convolved:
            raise StepError(f"step before convolve in layer {layer}, whose spec has a convolution")
        batch = ticket.slots.numel(), ticket.tokens
        checks.inputs(spec, batch, q, k, v, log_decay, beta, skip, prologue, self.device)
        if prologue is None:
            checks.log_decay(log_decay, ticket.slots, ticket.lengths)
        ticket._stepped.add(layer)
        pool = self._pools[layer]
        out = self._backend.step(pool, ticket._rows, q, k, v, log_decay, beta, skip, prologue)
        if (traffic := ops.active()) is not None:
            ops.count_step(traffic, pool, self._backend.census(ticket._rows))
        return out

    def commit(self, ticket: Ticket, kept: Tensor | None = None) -> None:
        """Finish a model step: keep the first `kept` tokens of each row, forget the others.

        Args:
            kept: integer [B], 1 to the row's length (0 only for rows that did nothing); None keeps
                all.

        Raises:
            StepError: if the ticket is not the open one or a layer has not stepped.
            ValueError: for counts out of range (checked where they are on the CPU).
        """
        self._require_open(ticket)
        if missing := sorted(set(range(self.layers)) - ticket._stepped):
            raise StepError(f"commit before layers {missing} have stepped; discard gives a step up")
        if kept is not None:
            kept = checks.kept(kept, ticket.slots, ticket.lengths, ticket.tokens).to(self.device)
        self._backend.commit(self._cursors, ticket._rows, kept, self.window)
        if (traffic := ops.active()) is not None:
            new = self._backend.census(ticket._rows).new
            traffic.tokens += new if kept is None else int(kept[ticket.slots >= 0].sum())
        self._open = None

    def discard(self, ticket: Ticket) -> None:
        """Finish a model step at any moment and keep none of its tokens.

        Folds that it made stay, and those of layers that have not stepped are made.

        Raises:
            StepError: if the ticket is not the open one.
        """
        self._require_open(ticket)
        for layer in set(range(self.layers)) - ticket._stepped:
            self._backend.settle(self._pools[layer], ticket._rows)
        none = torch.zeros_like(ticket.slots)
        self._backend.commit(self._cursors, ticket._rows, none, self.window)
        self._open = None

    @torch.no_grad()
    def load(
        self,
        slots: Tensor,
        states: Sequence[Tensor],
        conv: Sequence[Tensor | None] | None = None,
        *,
        phase: Tensor | None = None,
    ) -> None:
        """Take over states from prefill: they become checkpoints, the rings are empty.

        Args:
            slots: int64 [n], distinct.
            states: a tensor [n, HV, V, K] for every layer, rounded into checkpoint and view as a
                fold would.
            conv: [n, C, width - 1] last inputs, oldest first, for every layer (None: zeros).
            phase: integer [n], 0 to window - max_tokens: tokens by which the first fold comes
                early, so that rows that start together do not fold together. None: 0.

        Raises:
            StepError: while a step is open. ValueError: for a shape that the specs do not state.
        """
        self._require_closed("load")
        slots = self._slots(slots)
        checks.per_layer("states", states, self.layers)
        for spec, state in zip(self.specs, states, strict=True):
            checks.tensor("states", state, (slots.numel(), *spec.state_shape), None)
        if phase is not None:
            phase = checks.counts("phase", phase, slots.numel(), 0, self.window - self.max_tokens)
        self._start(slots, conv)
        if phase is not None:
            self._cursors.limit[slots] -= phase.to(self.device)
        self._cursors.empty[slots] = False
        for pool, state in zip(self._pools, states, strict=True):
            exact = state.to(self.device)
            pool.states.write(slots, exact, self._cursors.writes[slots])
            pool.view.store(slots, exact)
        self._cursors.writes[slots] += 1

    def reset(self, slots: Tensor) -> None:
        """Make slots fresh: zero state, empty ring, zero convolution inputs. slots: int64 [n].

        Stochastic rounding starts over, too; after `load` alone it goes on with new draws.
        """
        self._require_closed("reset")
        slots = self._slots(slots)
        self._start(slots, None)
        self._cursors.writes[slots] = 0

    def materialize(self, slots: Tensor) -> list[Tensor]:
        """The exact states after all committed tokens (Eq. 8), from checkpoint and records.

        Nothing is changed, and a view is not read.

        Args:
            slots: int64 [n].

        Returns:
            For every layer [n, HV, V, K] in compute dtype.
        """
        self._require_closed("materialize")
        rows = self._standing(slots)
        everyone = torch.arange(rows.slots.numel(), device=self.device)
        return [ops.replay(pool, rows, everyone) for pool in self._pools]

    def conv_history(self, slots: Tensor) -> list[Tensor | None]:
        """For every layer the last width - 1 committed inputs [n, C, width - 1], oldest first."""
        self._require_closed("conv_history")
        rows = self._standing(slots)
        return [None if pool.conv is None else ops.history(pool, rows) for pool in self._pools]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy requests, rings and cursors included: int64 [n] slots to [n] distinct slots.

        The sets may overlap (a permutation works): all is read before anything is written.
        """
        self._require_closed("copy")
        source, target = self._slots(source, repeated=True), self._slots(target)
        if source.shape != target.shape:
            raise ValueError(
                f"target must have as many slots as source ({source.numel()}), got {target.numel()}"
            )
        for tensor in self._tensors().values():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def export(self, slots: Tensor) -> dict[str, Tensor]:
        """Requests as named tensors, slot first, mid-window as they stand; `import_` takes them.

        Any cache of the same specs, window, max_tokens, checkpoint, view and fold takes them, on
        any device; they can be saved with safetensors.
        """
        self._require_closed("export")
        slots = self._slots(slots)
        named = {name: tensor.index_select(0, slots) for name, tensor in self._tensors().items()}
        return {**named, "layout": self._layout(slots)}

    @torch.no_grad()
    def import_(self, slots: Tensor, exported: dict[str, Tensor]) -> None:
        """Put exported requests into slots [n], in the order of the export.

        Raises:
            ValueError: if names, shapes or dtypes are not this cache's: it was built otherwise; or
                if the cursors are such as no cache leaves behind.
        """
        self._require_closed("import_")
        slots = self._slots(slots)
        own = self._tensors()
        names = {*own, "layout"}
        if names != exported.keys():
            raise ValueError(
                f"exported does not fit this cache: {sorted(names ^ exported.keys())} are in one "
                "and not in the other; build both with the same specs, fold and formats"
            )
        layout = self._layout(slots)
        checks.tensor("exported['layout']", exported["layout"], tuple(layout.shape), torch.int64)
        if not torch.equal(exported["layout"].to(self.device), layout):
            raise ValueError(
                f"exported does not fit this cache: it has [window, max_tokens] "
                f"{exported['layout'].unique(dim=0).tolist()}, this cache {layout[0].tolist()}"
            )
        for name, tensor in own.items():
            shape = (slots.numel(), *tensor.shape[1:])
            checks.tensor(f"exported[{name!r}]", exported[name], shape, tensor.dtype)
        checks.cursors(exported, self.window, self.max_tokens)
        for name, tensor in own.items():
            tensor.index_copy_(0, slots, exported[name].to(self.device))

    def _start(self, slots: Tensor, conv: Sequence[Tensor | None] | None) -> None:
        """Empty rings at token 0 with the given convolution inputs."""
        if conv is None:
            conv = [None] * self.layers
        checks.per_layer("conv", conv, self.layers)
        for spec, inputs in zip(self.specs, conv, strict=True):
            if inputs is not None:
                shape = (slots.numel(), spec.conv_channels, max(spec.conv_width - 1, 0))
                checks.tensor("conv", inputs, shape, spec.activation)
        cursors = self._cursors
        cursors.origin[slots] = 0
        cursors.filled[slots] = 0
        cursors.limit[slots] = self.window
        cursors.empty[slots] = True
        rows = self._standing(slots)
        for pool, inputs in zip(self._pools, conv, strict=True):
            if pool.conv is not None:
                ops.remember(pool, rows, inputs)

    def _layout(self, slots: Tensor) -> Tensor:
        """[n, 2], what the shapes do not tell: rings of one size may have different windows."""
        layout = torch.tensor([[self.window, self.max_tokens]], device=self.device)
        return layout.expand(slots.numel(), -1).contiguous()

    def _standing(self, slots: Tensor) -> Any:
        slots = self._slots(slots, repeated=True)
        return ops.standing(self._cursors, slots, self.window, self._records)

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor of the cache by name, slot first."""
        named = {f"cursors.{name}": tensor for name, tensor in self._cursors.tensors().items()}
        for index, pool in enumerate(self._pools):
            named.update({f"{index}.{name}": tensor for name, tensor in pool.tensors().items()})
        return named

    def _slots(self, slots: Tensor, *, padded: bool = False, repeated: bool = False) -> Tensor:
        return checks.slots(slots, self.slots, padded=padded, repeated=repeated).to(self.device)

    def _layer(self, ticket: Ticket, layer: int) -> LayerSpec:
        self._require_open(ticket)
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be 0 to {self.layers - 1}, got {layer}")
        return self.specs[layer]

    def _require_open(self, ticket: Ticket) -> None:
        if ticket is None or ticket is not self._open:
            raise StepError(
                "this ticket's step is over: it was committed, or a later step has begun; every "
                "step has its own ticket, which commit consumes"
            )

    def _require_closed(self, verb: str) -> None:
        if self._open is not None:
            raise StepError(f"{verb} while a step is open: commit or discard its ticket first")


def _unpickled(
    specs: Sequence[LayerSpec], slots: int, options: dict[str, Any], held: dict[str, Tensor]
) -> StateCache:
    """What `StateCache.__reduce__` names."""
    cache = StateCache(specs, slots, **options)
    for name, tensor in cache._tensors().items():
        tensor.copy_(held[name])
    return cache
