"""What is timed: replay at mixed phases, and the conventional kernel, over layers for a cold L2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from kernels.cases import Case, sketch
from lazystate import StateCache
from lazystate.formats import FORMATS
from lazystate.gates import Prologue
from lazystate.ops import BackendName
from lazystate.ops.triton.launch import Launch, step
from lazystate.ops.triton.plain import plain_step
from timing import DEVICE

INPUT_SETS = 8  # layers take turns with them
# What `StateCache.step` takes behind the layer, skip and prologue included.
Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Prologue | None]


def inputs(case: Case) -> Step:
    """Random inputs of a step, raw or prepared; unit keys, mild decays."""
    spec = case.spec

    def normal(*shape: int) -> Tensor:
        return torch.randn(case.batch, case.tokens, *shape, device=DEVICE)

    q, k = normal(spec.key_heads, spec.key_dim), normal(spec.key_heads, spec.key_dim)
    k = normalize(k, dim=-1)
    v, gate, b = normal(spec.heads, spec.value_dim), normal(*spec.decay_shape), normal(spec.heads)
    q, k, v = (x.to(spec.activation) for x in (q, k, v))
    if case.prologue is None:
        beta = torch.sigmoid(b) if spec.beta else None
        return q, k, v, -softplus(gate - 3), beta, None, None
    bound = -5.0 if case.prologue == "kda_bounded" else 0.0
    rate = torch.zeros(spec.heads, device=DEVICE)
    bias = torch.full((gate[0, 0].numel(),), -3.0, device=DEVICE)
    raw = None if case.prologue == "mamba2" else b.to(spec.activation)
    gate = gate.to(spec.activation)
    return q, k, v, gate, raw, None, Prologue(case.prologue, rate, bias, lower_bound=bound)


def rows_of(step: Step, rows: Tensor) -> Step:
    """The inputs of some batch rows."""
    q, k, v, gate, b, skip, prologue = step
    return q[rows], k[rows], v[rows], gate[rows], None if b is None else b[rows], skip, prologue


class Replay:
    """Replay decoding with rows spread evenly over the steps between two folds.

    They start from loaded states with a first cycle that is shorter by their phase, so after one
    `cycle` of steps all records are real ones and every later cycle ends where it began.

    Attributes:
        cache: `layers` equal layers, of which each has states and records of its own.
        rows: int64 [B], slots in no order. steps: input sets of a step.
    """

    def __init__(self, case: Case, layers: int, backend: BackendName = "triton") -> None:
        self.case, self.layers = case, layers
        self.cache = StateCache(
            [case.spec] * layers,
            case.batch,
            window=case.window,
            max_tokens=case.tokens,
            checkpoint=case.checkpoint,
            view=sketch(case, layers) if case.rank else case.view,
            device=DEVICE,
            backend=backend,
        )
        self.rows = torch.randperm(case.batch, device=DEVICE)
        state = torch.randn(case.batch, *case.spec.state_shape, device=DEVICE) * 0.1
        phase = torch.arange(case.batch, device=DEVICE) % case.period * case.kept
        self.cache.load(self.rows, [state] * layers, phase=phase)
        sets = min(layers, INPUT_SETS)
        self.steps = [inputs(case) for _ in range(sets)]
        self.kept = None
        if case.kept < case.tokens:
            self.kept = torch.full((case.batch,), case.kept, device=DEVICE)

    def together(self, held: int) -> None:
        """Put all rows at one phase: `held` committed records."""
        self.cache._cursors.filled.fill_(held)

    def step(self, launch: Launch | None = None) -> Tensor:
        """One model step, of a given launch setting; the first layer's outputs [B, T, HV, V]."""
        self.cache._open = None  # a setting that did not run has left its step open
        ticket = self.cache.begin(self.rows, self.case.tokens)

        def one(layer: int, x: Step) -> Tensor:
            if launch is None:
                return self.cache.step(ticket, layer, *x)
            ticket._stepped.add(layer)
            return step(self.cache._pools[layer], ticket._rows, *x, launch=launch)

        out = self._layers(one)
        self.cache.commit(ticket, self.kept)
        return out

    def cycle(self, launch: Launch | None = None, steps: int | None = None) -> None:
        """As many steps as lie between two folds, or a given number."""
        for _ in range(steps or self.case.period):
            self.step(launch)

    def stand(self, launch: Launch | None = None) -> None:
        """One model step that is not committed, so that it can be repeated."""
        cache, backend = self.cache, self.cache._backend
        tokens, records = self.case.tokens, cache._records
        rows = backend.begin(cache._cursors, self.rows, None, tokens, cache.window, records)
        self._layers(lambda layer, x: step(cache._pools[layer], rows, *x, launch=launch))

    def _layers(self, one: Callable[[int, Step], Tensor]) -> Tensor:
        outs = [one(i, self.steps[i % len(self.steps)]) for i in range(self.layers)]
        return outs[0]


class Plain:
    """Conventional decoding of T tokens, with `snapshots` a state after each of them.

    Attributes:
        pools: states [slots, HV, V, K] of each layer; a row's slots lie one after the other.
    """

    def __init__(self, case: Case, layers: int, *, snapshots: bool = False) -> None:
        self.case = case
        each = 1 + case.tokens if snapshots else 1
        shape = (case.batch * each, *case.spec.state_shape)
        self.pools = [
            torch.randn(shape, device=DEVICE).mul_(0.1).to(FORMATS[case.checkpoint].dtype)
            for _ in range(layers)
        ]
        self.source = torch.randperm(case.batch, device=DEVICE) * each
        self.target = self.source
        if snapshots:
            self.target = self.source[:, None] + 1 + torch.arange(case.tokens, device=DEVICE)
        sets = min(layers, INPUT_SETS)
        self.steps = [inputs(case) for _ in range(sets)]

    def step(self, tile: dict[str, Any]) -> Tensor:
        """One step of every layer; the first layer's outputs [B, T, HV, V]."""
        outs = [
            plain_step(
                self.case.spec,
                pool,
                self.source,
                self.target,
                *self.steps[i % len(self.steps)],
                **tile,
            )
            for i, pool in enumerate(self.pools)
        ]
        return outs[0]
