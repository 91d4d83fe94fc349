"""The recurrence, one token after the other, in FP64 (docs/maths.md, Eq. 1-3)."""

from __future__ import annotations

import torch
from torch import Tensor


def token(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    *,
    erase: bool,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of one request: decay the state, write to it, read it.

    Args:
        state: [HV, V, K]. q, k: [H, K]; key head i serves the i-th group of HV / H value heads.
        v: [HV, V]. log_decay: [HV] or [HV, K], natural logarithm. beta: [HV], None for 1.
        erase: whether the write first removes what the state returns for the key.
        skip: [HV] or [HV, V], weight of v added to the output.

    Returns:
        (output [HV, V], state after the token [HV, V, K]), FP64.
    """
    q, k, v, log_decay = q.double(), k.double(), v.double(), log_decay.double()
    heads, key_heads = v.shape[0], k.shape[0]
    q = q.repeat_interleave(heads // key_heads, dim=0).unsqueeze(1)  # [HV, 1, K]
    k = k.repeat_interleave(heads // key_heads, dim=0).unsqueeze(1)
    decay = log_decay.exp().reshape(heads, 1, -1)  # [HV, 1, 1 or K]

    state = state.double() * decay
    u = v
    if erase:
        u = u - (state * k).sum(-1)
    if beta is not None:
        u = u * beta.double().unsqueeze(1)
    state = state + u.unsqueeze(2) * k
    out = (state * q).sum(-1)
    if skip is not None:
        out = out + skip.double().reshape(heads, -1) * v
    return out, state


def recur(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    *,
    erase: bool,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """T tokens of one request.

    Args:
        state: [HV, V, K], before the first token.
        others: as in `token`, with a leading T where they belong to a token.

    Returns:
        (outputs [T, HV, V], the state after each token [T, HV, V, K]), FP64.
    """
    outputs, states = [], []
    for t in range(q.shape[0]):
        strength = None if beta is None else beta[t]
        out, state = token(state, q[t], k[t], v[t], log_decay[t], strength, erase=erase, skip=skip)
        outputs.append(out)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def convolve(
    history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = True
) -> Tensor:
    """Short causal depthwise convolution of T inputs that follow a history, in FP64 (Eq. 15).

    Args:
        history: [C, width - 1], oldest first. x: [T, C]. weight: [C, width]. bias: [C] or None.
        silu: apply y sigmoid(y) to the result.

    Returns:
        [T, C].
    """
    inputs = torch.cat([history.double().T, x.double()])  # [width - 1 + T, C]
    width = weight.shape[1]
    outputs = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(inputs[0]) if bias is None else bias.double()
        for i in range(width):
            y = y + weight[:, i].double() * inputs[t + i]
        outputs.append(y * torch.sigmoid(y) if silu else y)
    return torch.stack(outputs)
