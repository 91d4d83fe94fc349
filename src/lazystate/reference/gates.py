"""The gates in FP64, written from the equations (docs/maths.md, Eq. 4-7).

Independent of `lazystate.gates`, whose shapes they share. All arguments and results are FP64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), without overflow."""
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1 / (1 + small), small / (1 + small))


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) along the last dimension."""
    return x / ((x * x).sum(-1, keepdim=True) + eps).sqrt()


def mamba2(
    dt: Tensor, A_log: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """(log_decay, time step), both [..., HV], of raw dt (Eq. 4)."""
    step = softplus(dt if dt_bias is None else dt + dt_bias)
    step = torch.minimum(
        torch.maximum(step, step.new_tensor(dt_limit[0])), step.new_tensor(dt_limit[1])
    )
    return -torch.exp(A_log) * step, step


def gdn(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log_decay, beta), both [..., HV] (Eq. 5)."""
    return -torch.exp(A_log) * softplus(a + dt_bias), sigmoid(b)


def kda_softplus(gate: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """log_decay [..., H, K] of an unbounded gate (Eq. 6)."""
    return -torch.exp(A_log)[:, None] * softplus(_biased(gate, dt_bias))


def kda_bounded(gate: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """log_decay [..., H, K] of a bounded gate (Eq. 7)."""
    return lower_bound * sigmoid(torch.exp(A_log)[:, None] * _biased(gate, dt_bias))


def _biased(gate: Tensor, dt_bias: Tensor | None) -> Tensor:
    return gate if dt_bias is None else gate + dt_bias.reshape(gate.shape[-2:])
