"""One step over T tokens: outputs from the view and the ring, without a state (Eq. 10-13)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lazystate.ops.pool import Pool
from lazystate.ops.torch.decay import segment_sums, suffix_sums
from lazystate.ops.torch.rows import Rows


def gather(pool: Pool, index: Tensor, *names: str) -> list[Tensor]:
    """The named record parts [B, n, ...] at flat ring positions int64 [B, n], compute dtype."""
    out, compute, flat = [], pool.spec.compute, index.flatten()
    for name in names:
        part = pool.ring.flat[name].index_select(0, flat)
        part = part if part.dtype == compute else part.to(compute)
        out.append(part.view(*index.shape, *part.shape[1:]))
    return out


def step(
    pool: Pool,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
) -> Tensor:
    """Outputs of T new tokens, whose records are appended behind the committed ones.

    Args:
        rows: the active rows of this model step.
        q, k: [B, T, H, K]. v: [B, T, HV, V]. log_decay: [B, T, HV] or [B, T, HV, K].
        beta: [B, T, HV] or None.

    Returns:
        [B, T, HV, V], compute dtype.
    """
    spec = pool.spec
    compute = spec.compute
    wide_k, wide_v = k.to(compute), v.to(compute)
    vectors = torch.cat([q.to(compute), wide_k], 1) if spec.erase else q.to(compute)
    tokens, prefix = k.shape[1], log_decay
    if tokens > 1:
        prefix = log_decay.cumsum(1)
        prefix = torch.cat([prefix, prefix], 1) if spec.erase else prefix
    known = from_history(pool, rows, vectors, prefix)
    scores = within(wide_k, vectors, log_decay, spec.group)
    u = wide_v.transpose(1, 2)
    if spec.erase:
        assert beta is not None
        u = solve((u - known[:, :, tokens:]).mT, scores[..., tokens:], beta).mT
        known, scores = known[:, :, :tokens], scores[..., :tokens]
    elif beta is not None:
        u = u * beta.transpose(1, 2).unsqueeze(3)
    append(pool, rows, k, v, u, log_decay, beta)
    out = known + (u * scores if tokens == 1 else causal(scores.mT, u))
    return out.transpose(1, 2)


def from_history(pool: Pool, rows: Rows, vectors: Tensor, prefix: Tensor) -> Tensor:
    """The state before the step, times decayed vectors: view and committed records (Eq. 10).

    Args:
        vectors: [B, n, H, K]. prefix: [B, n or 1, HV] or [B, n or 1, HV, K], log-decay up to each.

    Returns:
        [B, HV, n, V].
    """
    spec, wanted = pool.spec, vectors.shape[1]
    if wanted == spec.key_heads == 1:
        # BLAS sums a lone matrix-vector product otherwise than many: one row, and any, takes two.
        vectors = vectors.expand(-1, 2, -1, -1)
    names = ("k", "u") if spec.erase else ("k", "v", "beta") if spec.beta else ("k", "v")
    keys, values, *strength = gather(pool, rows.recent, *names)
    after, total = suffix_sums(*gather(pool, rows.newer, "log_decay"))
    x, decay = vectors.transpose(1, 2), prefix.exp().transpose(1, 2)
    if spec.decay == "channel":
        x = per_head(x, spec.group, 1) * decay
        keys = per_head(keys, spec.group, 2) * after.exp()
        scores = inner(x, keys.transpose(1, 2))
        read = _read(pool, rows, x * total.exp().unsqueeze(2))
    else:
        decay = decay.unsqueeze(3)
        scores = per_head(inner(x, keys.transpose(1, 2)), spec.group, 1)
        scores = scores * (after.exp().transpose(1, 2).unsqueeze(2) * decay)
        read = _read(pool, rows, x) * (total.exp()[..., None, None] * decay)
    if strength:
        scores = scores * strength[0].transpose(1, 2).unsqueeze(2)
    return (read + product(scores, values.transpose(1, 2)))[:, :, :wanted]


def within(keys: Tensor, vectors: Tensor, log_decay: Tensor, group: int) -> Tensor:
    """Decayed inner products of the step's own keys with its own vectors (Eq. 11).

    The first T vectors are queries and see keys up to their own; the next T, if there, are the keys
    themselves and see only earlier ones.

    Args:
        keys: [B, T, H, K]. vectors: [B, T or 2T, H, K]. log_decay: [B, T, HV] or [B, T, HV, K].

    Returns:
        [B, HV, T, T or 2T]; of a single token its query's part alone, as no key is earlier.
    """
    tokens, parts = keys.shape[1], vectors.shape[1] // keys.shape[1]
    if tokens == 1:
        scores = (keys * vectors[:, :1]).sum(-1)
        return per_head(scores.transpose(1, 2), group, 1).unsqueeze(2)
    weights = segment_sums(log_decay).exp().repeat(1, 1, parts, *[1] * (log_decay.dim() - 2))
    if log_decay.dim() == 4:
        wide = per_head(keys, group, 2).unsqueeze(2), per_head(vectors, group, 2).unsqueeze(1)
        scores = (wide[0] * weights * wide[1]).sum(-1).permute(0, 3, 1, 2)
    else:
        scores = product(keys.transpose(1, 2), vectors.permute(0, 2, 3, 1))
        scores = per_head(scores, group, 1) * weights.permute(0, 3, 1, 2)
    ones = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device)
    seen = torch.cat([ones.triu(i) for i in range(parts)], 1)
    return scores.masked_fill(~seen, 0)


def solve(residual: Tensor, scores: Tensor, beta: Tensor) -> Tensor:
    """Corrections of T tokens from one unit upper triangular solve, U (I + A B) = R B (Eq. 12).

    Args:
        residual: R [B, HV, V, T]. scores: A [B, HV, T, T], read above its diagonal only.
        beta: [B, T, HV].
    """
    strength = beta.transpose(1, 2).unsqueeze(2)
    right = residual * strength
    if right.shape[-1] == 1:
        return right
    system = scores * strength
    return torch.linalg.solve_triangular(system, right, upper=True, left=False, unitriangular=True)


def causal(scores: Tensor, u: Tensor) -> Tensor:
    """The product of lower triangular scores [.., T, T] with u [.., T, V].

    What is not finite in one token would reach earlier ones, as nothing times NaN is NaN: it is
    left out, and shows from its token on.
    """
    broken = ~u.isfinite()
    out = product(scores, u.masked_fill(broken, 0))
    return out.masked_fill(broken.cumsum(2) > 0, math.nan)


def append(
    pool: Pool, rows: Rows, k: Tensor, v: Tensor, u: Tensor, log_decay: Tensor, beta: Tensor | None
) -> None:
    """Write the step's records; u is [B, HV, T, V], the rest as in `step`."""
    parts = {"k": k, "v": v, "u": u.transpose(1, 2), "log_decay": log_decay, "beta": beta}
    for name, ring in pool.ring.flat.items():
        part = parts[name]
        assert part is not None
        ring.index_copy_(0, rows.fresh, part.to(ring.dtype).flatten(0, 1))


def _read(pool: Pool, rows: Rows, vectors: Tensor) -> Tensor:
    """Products [B, HV, n, V] of the view with [B, H or HV, n, K]; folding rows': the checkpoint."""
    slots = None if rows.all_slots else rows.slots
    vectors = vectors.contiguous().mT
    read = pool.view.read(slots, vectors)
    if rows.folding.numel() and pool.view is not pool.exact:
        due = rows.folding
        read[due] = pool.exact.read(rows.slots[due], vectors[due])
    read = read.mT
    if (sharing := pool.spec.heads // read.shape[1]) > 1:  # heads in a row
        read = read.unflatten(3, (sharing, -1)).transpose(2, 3).flatten(1, 2)
    if rows.any_empty:
        read = read.masked_fill(rows.empty.view(-1, 1, 1, 1), 0)
    return read


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a @ b, the same for a row whatever the batch.

    BLAS adds in another order for a transposed operand, and of a strided one PyTorch transposes a
    single row in place but copies many.
    """
    out = torch.bmm(a.contiguous().view(-1, *a.shape[-2:]), b.contiguous().view(-1, *b.shape[-2:]))
    return out.view(*a.shape[:-1], b.shape[-1])


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Products of the rows of a [..., n, K] with those of b [..., m, K]: a @ b.mT, as `product`."""
    left, right = (x.contiguous().view(-1, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(left, right.mT).view(*a.shape[:-1], b.shape[-2])


def per_head(x: Tensor, group: int, dim: int) -> Tensor:
    """Repeat a key head's entries for the value heads that share it."""
    return x if group == 1 else x.repeat_interleave(group, dim)
