"""vLLM's kernels called as its layers call them, on raw inputs, over layers for a cold L2.

Slot 0 is vLLM's padding, so a row's slots begin at 1. Verification keeps a state for every token of
a step: the first is read from where the last step's accepted token left it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels import vllm
from kernels.cases import Case
from lazystate import gates
from timing import DEVICE

LOWER_BOUND = -5.0  # of the log-decay of a KDA layer, as the model of K1 has it
TILES = ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2))  # (rows, warps) of the Mamba-2 kernel
Settings = dict[str, Callable[[], AbstractContextManager[Any]]]


def kind_of(case: Case) -> str:
    """mamba2, gdn or kda."""
    if not case.spec.erase:
        return "mamba2"
    return "kda" if case.spec.decay == "channel" else "gdn"


class Peer:
    """A layer's states and raw inputs, several times over.

    Attributes:
        states: [1 + B T, HV, V, K] of each layer. index: int32 [B, T], a row's slots.
        raw: input sets. shared: the layer's weights.
    """

    def __init__(self, case: Case, layers: int) -> None:
        self.case, self.kernels, self.kind = case, vllm.load(), kind_of(case)
        spec, rows = case.spec, case.batch * case.tokens
        shape = (1 + rows, *spec.state_shape)
        self.states = [torch.randn(shape, device=DEVICE).mul_(0.1) for _ in range(layers)]
        first = 1 + torch.randperm(case.batch, device=DEVICE) * case.tokens
        token = torch.arange(case.tokens, device=DEVICE)
        self.index = (first[:, None] + token).int()
        self.starts = torch.arange(0, rows + 1, case.tokens, device=DEVICE).int()
        self.accepted = torch.full((case.batch,), case.tokens, device=DEVICE).int()
        self.shared = self._weights()
        self.raw = [self._inputs(rows) for _ in range(min(layers, 8))]

    def _weights(self) -> SimpleNamespace:
        spec = self.case.spec
        A_log = torch.rand(spec.heads, device=DEVICE)
        bias = torch.randn(spec.decay_shape, device=DEVICE) - 3
        D = torch.ones(spec.heads, device=DEVICE, dtype=spec.activation)
        return SimpleNamespace(A_log=A_log, bias=bias, D=D, A=-A_log.exp())

    def _inputs(self, rows: int) -> SimpleNamespace:
        spec = self.case.spec
        widths = [spec.key_heads * spec.key_dim] * 2 + [spec.heads * spec.value_dim]
        if self.kind == "mamba2":
            widths.reverse()

        def normal(*shape: int) -> Tensor:
            return torch.randn(rows, *shape, device=DEVICE).to(spec.activation)

        mixed = normal(sum(widths))
        parts = mixed.split(widths, 1)
        if self.kind == "gdn" and self.case.tokens > 1:
            parts = [part.contiguous() for part in parts]  # or the kernel's wrapper copies them
        v, k, q = parts if self.kind == "mamba2" else reversed(parts)
        return SimpleNamespace(
            mixed=mixed,
            q=q.view(rows, spec.key_heads, spec.key_dim),
            k=k.view(rows, spec.key_heads, spec.key_dim),
            v=v.view(rows, spec.heads, spec.value_dim),
            gate=normal(*spec.decay_shape),
            b=normal(spec.heads),
            out=torch.empty(rows, spec.heads, spec.value_dim, device=DEVICE, dtype=v.dtype),
        )

    def prepared(self) -> gates.Inputs:
        """The first input set as the reference takes it: [B, T, ...]."""
        raw, shared = self.raw[0], self.shared
        q, k, v, gate, b = (
            x.unflatten(0, (self.case.batch, self.case.tokens))
            for x in (raw.q, raw.k, raw.v, raw.gate, raw.b)
        )
        if self.kind == "mamba2":
            return gates.mamba2(v, k, q, gate, A_log=shared.A_log, dt_bias=shared.bias, D=shared.D)
        if self.kind == "gdn":
            return gates.gdn(q, k, v, gate, b, A_log=shared.A_log, dt_bias=shared.bias)
        bias = shared.bias.flatten()
        return gates.kda_bounded(
            q, k, v, gate, b, A_log=shared.A_log, dt_bias=bias, lower_bound=LOWER_BOUND
        )

    def settings(self) -> Settings:
        """Names of the launch settings that are tried, each a context to call in."""
        found: Settings = {"default": nullcontext}
        if self.kind == "mamba2":
            for tile in TILES:
                found[f"{tile[0]}/{tile[1]}"] = lambda tile=tile: self.kernels.mamba_setting(tile)
        elif self.kind == "gdn" and self.case.tokens == 1:
            found["as on Blackwell"] = self._blackwell
        elif self.kind == "kda" and self.case.tokens == 1:
            found["fused_recurrent_kda"] = self._recurrent
        return found

    @contextmanager
    def _blackwell(self):
        self.kernels.platform.blackwell = True
        try:
            yield
        finally:
            self.kernels.platform.blackwell = False

    @contextmanager
    def _recurrent(self):
        self.packed = False
        try:
            yield
        finally:
            self.packed = True

    packed = True

    def step(self) -> Tensor:
        """One step of every layer; the first layer's outputs [B, T, HV, V]."""
        one = {"mamba2": self._mamba2, "gdn": self._gdn, "kda": self._kda}[self.kind]
        outs = [one(s, self.raw[i % len(self.raw)]) for i, s in enumerate(self.states)]
        return outs[0].view(self.case.batch, self.case.tokens, *outs[0].shape[-2:])

    def mamba_arguments(self, raw: SimpleNamespace) -> tuple[Tensor, ...]:
        """(x, dt, A, B, C, D, dt_bias), head scalars expanded without memory."""
        spec = self.case.spec
        wide = (spec.heads, spec.value_dim)
        A = self.shared.A[:, None, None].expand(*wide, spec.key_dim)
        dt = raw.gate[..., None].expand(-1, *wide)
        D, bias = (x[:, None].expand(wide) for x in (self.shared.D, self.shared.bias))
        return raw.v, dt, A, raw.k, raw.q, D, bias

    def _mamba2(self, state: Tensor, raw: SimpleNamespace) -> Tensor:
        drafts = self.case.tokens > 1
        self.kernels.mamba(
            state,
            *self.mamba_arguments(raw),
            dt_softplus=True,
            state_batch_indices=self.index if drafts else self.index[:, 0],
            out=raw.out,
            num_accepted_tokens=self.accepted if drafts else None,
            cu_seqlens=self.starts if drafts else None,
        )
        return raw.out

    def _gdn(self, state: Tensor, raw: SimpleNamespace) -> Tensor:
        shared = self.shared
        if self.case.tokens == 1:
            scale = self.case.spec.key_dim**-0.5
            out, slots = raw.out.unsqueeze(1), self.index[:, 0].contiguous()
            weights = shared.A_log, shared.bias, scale
            self.kernels.gdn(raw.mixed, raw.gate, raw.b, *weights, state, out, slots, True)
            return out
        q, k, v = raw.q[None], raw.k[None], raw.v[None]
        out, _ = self.kernels.gdn_verify(
            shared.A_log,
            raw.gate[None],
            raw.b[None],
            shared.bias,
            q,
            k,
            v,
            initial_state=state,
            cu_seqlens=self.starts,
            ssm_state_indices=self.index,
            num_accepted_tokens=self.accepted,
            use_qk_l2norm_in_kernel=True,
        )
        return out

    def _kda(self, state: Tensor, raw: SimpleNamespace) -> Tensor:
        drafts = self.case.tokens > 1
        gate, b = raw.gate[None], raw.b[None]
        shared, bias = self.shared, self.shared.bias.flatten()
        slots = self.index if drafts else self.index[:, 0].contiguous()
        weights = shared.A_log, bias, LOWER_BOUND, state
        if self.packed and not drafts:
            self.kernels.kda(raw.mixed, gate, b, *weights, slots, out=raw.out[None])
            return raw.out
        out, _ = self.kernels.kda_recurrent(
            raw.q[None],
            raw.k[None],
            raw.v[None],
            gate,
            b,
            *weights,
            self.starts,
            slots,
            self.accepted if drafts else None,
            raw.out[None],
        )
        return out


class MambaReplay(Peer):
    """vLLM's replay of Mamba-2 layers, its two launches; rows at positions of a window."""

    def __init__(self, case: Case, layers: int) -> None:
        super().__init__(case, layers)
        spec, slots, length = case.spec, 1 + case.batch, case.window
        heads, groups = (slots, spec.heads, length), (slots, spec.key_heads, length)
        self.rings = [
            (
                torch.zeros(*heads, spec.value_dim, device=DEVICE, dtype=spec.activation),
                torch.zeros(heads, device=DEVICE),
                torch.zeros(*groups, spec.key_dim, device=DEVICE, dtype=spec.activation),
                torch.empty(case.batch, spec.key_heads, length, device=DEVICE),
            )
            for _ in range(layers)
        ]
        self.start(0)

    def start(self, spread: int) -> None:
        """Rows at position 0, or with spread=1 evenly over the window."""
        row = torch.arange(self.case.batch, device=DEVICE) * spread
        every = [(row + t) % self.case.window for t in range(self.case.window)]
        self.positions = [
            (position.int(), (position == self.case.window - 1).to(torch.int8))
            for position in every
        ]

    def step(self, number: int = 0) -> Tensor:
        """Step `number` of a window in every layer."""
        position, folds = self.positions[number]
        for i, state in enumerate(self.states):
            raw = self.raw[i % len(self.raw)]
            x, dt, B, scratch = self.rings[i]
            self.kernels.mamba_replay(
                state,
                *self.mamba_arguments(raw),
                dt_softplus=True,
                x_cache=x,
                dt_cache=dt,
                B_cache=B,
                bc_pre=scratch,
                write_pos=position,
                is_flush=folds,
                max_cache_len=self.case.window,
                state_batch_indices=self.index[:, 0],
                out=raw.out,
            )
        return self.raw[0].out.unsqueeze(1)

    def cycle(self) -> None:
        """All steps of a window."""
        for number in range(self.case.window):
            self.step(number)
