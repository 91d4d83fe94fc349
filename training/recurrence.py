"""Chunked forms of the recurrences for training, in plain PyTorch, float32 throughout.

A chunk of the delta rule is an affine map of the state, S <- M S + N, whose M and N come from
batched products over all chunks at once; only the chain of maps is sequential. Inside a chunk the
corrected values solve (I + A) X = Y with A strictly lower triangular; a chunk has 16 tokens, so
the inverse is the product (I - A)(I + A^2)(I + A^4)(I + A^8).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 16
SCAN_CHUNK = 64  # of Mamba-2
Tensor = torch.Tensor


class Scan(torch.autograd.Function):
    """States before every chunk, from the maps M and N of shape [chunks, heads, K, K or V]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, maps: Tensor, adds: Tensor) -> Tensor:
        """The state before the first chunk is zero."""
        states = torch.zeros_like(adds)
        for c in range(1, len(adds)):
            torch.baddbmm(adds[c - 1], maps[c - 1], states[c - 1], out=states[c])
        ctx.save_for_backward(maps, states)
        return states

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The same chain, backwards, with transposed maps."""
        maps, states = ctx.saved_tensors
        grad = grad.contiguous()
        after = torch.zeros_like(grad)  # gradient of the state behind every chunk
        for c in range(len(grad) - 2, -1, -1):
            torch.baddbmm(grad[c + 1], maps[c + 1].mT, after[c + 1], out=after[c])
        return after @ states.mT, after


def unit(x: Tensor) -> Tensor:
    """Vectors of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def chunked(x: Tensor) -> Tensor:
    """[B, T, H, D] to [chunks, B * H, 16, D]."""
    batch, length, heads, size = x.shape
    x = x.view(batch, length // CHUNK, CHUNK, heads, size).permute(1, 0, 3, 2, 4)
    return x.reshape(length // CHUNK, batch * heads, CHUNK, size)


def products(query: Tensor, key: Tensor, erase: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products of queries with keys, and of erase vectors with keys, masked to i >= j."""
    size = total.shape[-2]
    future = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    if total.shape[-1] == 1:
        gap = (total - total.mT).masked_fill(future, float("-inf"))
        decay = gap.exp()
        return (query @ key.mT) * decay, (erase @ key.mT) * decay
    gap = total.unsqueeze(-2) - total.unsqueeze(-3)
    decayed = gap.masked_fill(future[..., None], float("-inf")).exp() * key.unsqueeze(-3)
    both = decayed @ torch.stack((query, erase), dim=-1)
    return both[..., 0], both[..., 1]


def prepare(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, ...]:
    """Everything that does not depend on the state, for all chunks at once."""
    repeat = value.shape[2] // key.shape[2]
    query, key = unit(query.float()) * query.shape[-1] ** -0.5, unit(key.float())
    query, key = (x.repeat_interleave(repeat, dim=2) for x in (query, key))
    decay = decay.float() if decay.ndim == 4 else decay.float().unsqueeze(-1)
    query, key, value, decay, beta = (
        chunked(x) for x in (query, key, value.float(), decay, beta.float().unsqueeze(-1))
    )
    total = decay.cumsum(-2)
    inside, lower = products(query, key, key * beta, total)
    lower = lower.tril(-1)
    inverse = torch.eye(CHUNK, device=lower.device) - lower
    power = lower
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    wanted = inverse @ (value * beta)
    seen = inverse @ (key * beta * total.exp())
    last = total[..., -1:, :]
    kept = (key * (last - total).exp()).mT
    size = key.shape[-1]
    maps = last.exp().mT * torch.eye(size, device=key.device) - kept @ seen
    return maps, kept @ wanted, query * total.exp(), inside, wanted, seen


def finish(states: Tensor, query: Tensor, inside: Tensor, wanted: Tensor, seen: Tensor) -> Tensor:
    """Outputs of all chunks, from the states before them."""
    return query @ states + inside @ (wanted - seen @ states)


PIECES = {"prepare": prepare, "finish": finish}  # replaced by compiled forms where asked for


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Gated delta rule over whole rows from a zero state; the decay is per head or per channel."""
    batch, true_length, heads, size = value.shape
    pad = -true_length % CHUNK
    if pad:
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (query, key, value))
        g, beta = (F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) for x in (g, beta))
    with torch.autocast(value.device.type, enabled=False):
        maps, adds, *rest = PIECES["prepare"](query, key, value, g, beta)
        out = PIECES["finish"](Scan.apply(maps, adds), *rest)
    length = true_length + pad
    out = out.view(length // CHUNK, batch, heads, CHUNK, size).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, length, heads, size)[:, :true_length].to(value.dtype), None


def mamba2_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, floor: float
) -> Tensor:
    """Mamba-2 over whole rows from a zero state: products of matrices, chunks of 64 tokens.

    Shapes as in the stock operator: x [B, T, H, P], dt [B, T, H], B and C [B, T, G, N].
    """
    batch, length, heads, size = x.shape
    each, chunks = heads // B.shape[2], length // SCAN_CHUNK
    step = F.softplus(dt.float() + dt_bias).clamp(min=floor)

    def split(y: Tensor) -> Tensor:
        return y.float().view(batch, chunks, SCAN_CHUNK, *y.shape[2:]).transpose(2, 3)

    x, step = x.float(), step.unsqueeze(-1)
    inputs, total = split(x * step), split(A[:, None] * step).cumsum(-2)
    key, query = (split(y).repeat_interleave(each, dim=2) for y in (B, C))
    future = torch.ones(SCAN_CHUNK, SCAN_CHUNK, dtype=torch.bool, device=x.device).triu(1)
    inside = (total - total.mT).masked_fill(future, float("-inf")).exp() * (query @ key.mT)
    last = total[..., -1:, :]
    adds = (key * (last - total).exp()).mT @ inputs
    whole = F.pad(last[..., 0, 0].transpose(1, 2).cumsum(-1), (1, 0))
    gap = whole[..., :-1, None] - whole[..., None, 1:]  # from the end of a chunk to the start
    late = torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).triu()
    carry = gap.masked_fill(late, float("-inf")).exp()
    states = carry @ adds.transpose(1, 2).flatten(3)
    states = states.view(batch, heads, chunks, -1, size).transpose(1, 2)
    out = inside @ inputs + (query * total.exp()) @ states
    return out.transpose(2, 3).reshape(batch, length, heads, size) + D[:, None] * x
