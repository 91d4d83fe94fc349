"""Decay weights: exp of a sum of log-decays between two tokens (docs/maths.md, Eq. 9).

A weight is always the exponential of a *sum* of log-decays, never a ratio of two cumulative
products: sums of non-positive numbers cannot overflow, and a reset (log-decay -inf) gives weight 0
across it and exact weights on either side, where a difference of cumulatives would give NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def suffix_sums(newer: Tensor) -> tuple[Tensor, Tensor]:
    """Log-decay after each committed record, and since the checkpoint.

    Args:
        newer: [B, 1 + n, ...] zero, and then log-decays, newest first, 0 where there is no record.

    Returns:
        ([B, n, ...] sum over the records newer than j, [B, ...] sum over all of them).
    """
    sums = newer.cumsum(1)
    return sums[:, :-1], sums[:, -1]


def segment_sums(log_decay: Tensor) -> Tensor:
    """Log-decay from token j to token s.

    Args:
        log_decay: [B, T, ...].

    Returns:
        [B, T (j), T (s), ...]: the sum over j < l <= s; 0 for s <= j, to be masked by the caller.
    """
    tokens = log_decay.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=log_decay.device).triu(1)
    later = later.view(1, tokens, tokens, *[1] * (log_decay.dim() - 2))
    return log_decay.unsqueeze(1).masked_fill(~later, 0).cumsum(2)
