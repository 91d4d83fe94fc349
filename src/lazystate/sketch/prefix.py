"""Orthonormal bases whose leading columns span what the leading columns of a matrix span."""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt, twice for each column, that answers a dependent column with zeros.

    A QR decomposition would answer it with some unit vector instead, which then counts as part of
    the span, and of which later columns lose their share.

    Args:
        columns: [..., n, G], FP32 or FP64; a column of zeros (padding) is dependent.

    Returns:
        Q [..., n, G]: for every G' <= G its first G' columns span those of `columns`, and are
        orthonormal but for zeros.
    """
    rows, count = columns.shape[-2:]
    tolerance = 4 * max(rows, count) * torch.finfo(columns.dtype).eps
    basis = torch.zeros_like(columns)
    for i in range(count):
        column = columns[..., i : i + 1]
        known, rest = basis[..., :i], column
        for _ in range(2):
            rest = rest - known @ (known.mT @ rest)
        length = rest.norm(dim=-2, keepdim=True)
        new = length > tolerance * column.norm(dim=-2, keepdim=True)
        basis[..., i : i + 1] = torch.where(new, rest / length.where(new, 1), 0)
    return basis


def completed(basis: Tensor) -> Tensor:
    """All of the space: an orthonormal basis with the zero columns replaced, those behind included.

    Args:
        basis: [..., K, G], orthonormal columns or zeros, as from `orthonormal`.

    Returns:
        [..., K, K], orthogonal; columns of `basis` that are not zero stay what and where they are.
    """
    size = basis.shape[-2]
    unit = torch.eye(size, dtype=basis.dtype, device=basis.device).expand(*basis.shape[:-2], -1, -1)
    full = torch.cat([basis, torch.zeros_like(unit)[..., basis.shape[-1] :]], -1)
    for i in range(size):
        # The unit vector that the basis holds least of: at least 1 - i / K of it is new.
        held = full.square().sum(-1)
        rest = unit.gather(-1, held.argmin(-1)[..., None, None].expand(*held.shape, 1))
        for _ in range(2):
            rest = rest - full @ (full.mT @ rest)
        missing = full[..., i : i + 1].abs().amax(-2, keepdim=True) == 0
        rest = rest / rest.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(full.dtype).tiny)
        full[..., i : i + 1] = torch.where(missing, rest, full[..., i : i + 1])
    return full
