"""Prologues: a model's raw inputs to (q, k, v, log_decay, beta), one function per layer kind.

A `Prologue` names such a function with a layer's weights and numbers, so that a kernel can do what
it does while it loads the raw inputs.

Gates leave here in FP32 (FP64 for FP64 activations) and are never narrowed again: a rounded beta
or decay compounds over a whole generation. A normalised key is rounded once, to the activation
dtype; the step, the ring and the fold all use that rounded key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """What one step of any layer takes (Eq. 1-3).

    Attributes:
        q: [B, T, H, K] queries, scaled, activation dtype.
        k: [B, T, H, K] keys, activation dtype.
        v: [B, T, HV, V] values, activation dtype.
        log_decay: [B, T, HV] or [B, T, HV, K], natural logarithm, <= 0, FP32.
        beta: [B, T, HV] write strength, FP32 (Mamba-2: the time step), or None for 1.
        skip: [HV] or [HV, V] weight of v added to the output (Mamba-2's D), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    skip: Tensor | None = None


Kind = Literal["mamba2", "gdn", "kda_softplus", "kda_bounded"]
KINDS: tuple[Kind, ...] = ("mamba2", "gdn", "kda_softplus", "kda_bounded")


@dataclass(frozen=True, eq=False)
class Prologue:
    """What turns a layer's raw inputs into those of a step: `StateCache.step(..., prologue=...)`.

    Attributes:
        kind: the function of this module that it stands for.
        A_log: [HV]. dt_bias: [HV], for KDA [HV * K]; None for no bias.
        scale: factor on q, K**-0.5 if None; eps: added to the squared norm of q and k. Not of
            Mamba-2, whose B and C are taken as they are.
        dt_limit: bounds of Mamba-2's time step.
        beta_scale: of GDN, 2 where negative eigenvalues are allowed.
        lower_bound: of a bounded KDA gate, below 0.

    Raises:
        ValueError: for an unknown kind, or a number that the kind does not have or allow.
    """

    kind: Kind
    A_log: Tensor
    dt_bias: Tensor | None = None
    scale: float | None = None
    eps: float = 1e-6
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    beta_scale: float = 1.0
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, kind, off in (
            ("dt_limit", "mamba2", (0.0, float("inf"))),
            ("beta_scale", "gdn", 1.0),
            ("lower_bound", "kda_bounded", 0.0),
        ):
            if self.kind != kind and getattr(self, name) != off:
                raise ValueError(f"{name} is for {kind} only, got it for {self.kind}: leave it out")
        if self.kind == "gdn" and self.dt_bias is None:
            raise ValueError("dt_bias must be a tensor for gdn, got None")
        if self.kind == "kda_bounded":
            _check_bound(self.lower_bound)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, b: Tensor | None) -> Inputs:
        """A step's inputs from raw ones: C, B, x, dt and None for Mamba-2; q, k, v, a, b for GDN;
        q, k, v, gate, b for KDA; shapes as in this module's functions.
        """
        if self.kind == "mamba2":
            own = {"A_log": self.A_log, "dt_bias": self.dt_bias}
            return mamba2(v, k, q, gate, **own, dt_limit=self.dt_limit)
        assert b is not None
        shared = {"A_log": self.A_log, "scale": self.scale, "eps": self.eps}
        if self.kind == "gdn":
            assert self.dt_bias is not None
            more = {"dt_bias": self.dt_bias, "beta_scale": self.beta_scale}
            return gdn(q, k, v, gate, b, **shared, **more)
        if self.kind == "kda_softplus":
            return kda_softplus(q, k, v, gate, b, **shared, dt_bias=self.dt_bias)
        more = {"dt_bias": self.dt_bias, "lower_bound": self.lower_bound}
        return kda_bounded(q, k, v, gate, b, **shared, **more)


class Raw(NamedTuple):
    """What one step of a layer with a prologue takes, in the order of `StateCache.step`.

    Attributes:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. gate: [B, T, HV] or [B, T, HV, K].
        b: [B, T, HV], or None for Mamba-2. skip: as in `Inputs`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    b: Tensor | None
    skip: Tensor | None
    prologue: Prologue

    def prepared(self) -> Inputs:
        """The same as a step without a prologue takes it."""
        made = self.prologue.prepare(self.q, self.k, self.v, self.gate, self.b)
        return made._replace(skip=self.skip)


def mamba2(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Inputs:
    """Mamba-2: k = B, q = C, v = x, beta = dt, log_decay = -exp(A_log) dt (Eq. 4).

    Args:
        x: [B, T, HV, V]. B, C: [B, T, H, K]. dt: [B, T, HV], raw, before bias and softplus.
        A_log, dt_bias: [HV]. D: [HV] or [HV, V].
        dt_limit: bounds that the time step is clipped to, as the model's configuration states.
    """
    compute = _compute(x)
    step = dt.to(compute) if dt_bias is None else dt.to(compute) + dt_bias.to(compute)
    step = F.softplus(step)
    if dt_limit != (0.0, float("inf")):
        step = step.clamp(*dt_limit)
    return Inputs(C, B, x, step * -A_log.to(compute).exp(), step, D)


def gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None = None,
    beta_scale: float = 1.0,
    eps: float = 1e-6,
) -> Inputs:
    """Gated DeltaNet: log_decay = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b) (Eq. 5).

    Args:
        q, k: [B, T, H, K], before the L2 norm. v: [B, T, HV, V]. a, b: [B, T, HV], raw.
        A_log, dt_bias: [HV].
        scale: factor on q, K**-0.5 if None.
        beta_scale: 2 where the model allows negative eigenvalues, else 1.
        eps: added to the squared norm of q and k.
    """
    compute = _compute(v)
    log_decay = F.softplus(a.to(compute) + dt_bias.to(compute)) * -A_log.to(compute).exp()
    return Inputs(*normalised(q, k, scale, eps), v, log_decay, _beta(b, compute, beta_scale))


def kda_softplus(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Inputs:
    """KDA with an unbounded gate, per channel -exp(A_log) softplus(gate + dt_bias) (Eq. 6).

    Args:
        q, k: [B, T, H, K], before the L2 norm. v: [B, T, H, V].
        gate: [B, T, H, K], raw. b: [B, T, H], raw. A_log: [H]. dt_bias: [H * K].
        scale: factor on q, K**-0.5 if None. eps: added to the squared norm of q and k.
    """
    compute = _compute(v)
    log_decay = F.softplus(_biased(gate, dt_bias, compute)) * -_per_head(A_log, compute).exp()
    return Inputs(*normalised(q, k, scale, eps), v, log_decay, _beta(b, compute))


def kda_bounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    lower_bound: float,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Inputs:
    """KDA with a bounded gate, lower_bound sigmoid(exp(A_log) (gate + dt_bias)) (Eq. 7).

    Args:
        lower_bound: the most negative log-decay of one token, below 0 (Kimi-K3: -5).
        others: as in `kda_softplus`.

    Raises:
        ValueError: if `lower_bound` is not negative.
    """
    _check_bound(lower_bound)
    compute = _compute(v)
    gate = _per_head(A_log, compute).exp() * _biased(gate, dt_bias, compute)
    log_decay = lower_bound * torch.sigmoid(gate)
    return Inputs(*normalised(q, k, scale, eps), v, log_decay, _beta(b, compute))


def gla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, scale: float | None = None
) -> Inputs:
    """Gated linear attention: no erase, a given log-decay per channel [B, T, HV, K] or head.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. scale: factor on q, K**-0.5 if None.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return Inputs(q * factor, k, v, log_decay.to(_compute(v)), None)


def lightning(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Inputs:
    """Lightning attention / RetNet: no erase, one constant log-decay -slope per head.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. slope: [HV], positive.
    """
    log_decay = (-slope.to(_compute(v))).expand(*v.shape[:2], -1)
    return Inputs(q, k, v, log_decay, None)


def normalised(
    q: Tensor, k: Tensor, scale: float | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """L2-normalised (q * scale, k), each rounded once to its own dtype.

    Args:
        q, k: [..., K]. scale: K**-0.5 if None. eps: added to the squared norms.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return _unit(q, eps, factor), _unit(k, eps, 1.0)


def _check_bound(lower_bound: float) -> None:
    if not lower_bound < 0:
        raise ValueError(
            f"lower_bound must be negative (a log-decay), got {lower_bound}; for a gate without a "
            "bound use kda_softplus"
        )


def _compute(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _beta(b: Tensor, compute: torch.dtype, scale: float = 1.0) -> Tensor:
    beta = torch.sigmoid(b.to(compute))
    return beta if scale == 1.0 else beta * scale


def _per_head(A_log: Tensor, compute: torch.dtype) -> Tensor:
    return A_log.to(compute).reshape(-1, 1)


def _biased(gate: Tensor, dt_bias: Tensor | None, compute: torch.dtype) -> Tensor:
    gate = gate.to(compute)
    return gate if dt_bias is None else gate + dt_bias.to(compute).view(gate.shape[-2:])


def _unit(x: Tensor, eps: float, factor: float) -> Tensor:
    wide = x.to(_compute(x))
    inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * (inverse if factor == 1.0 else inverse * factor)).to(x.dtype)
