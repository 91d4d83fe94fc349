"""Folding: the exact state from the checkpoint and the committed records (Eq. 8, 14)."""

from __future__ import annotations

from torch import Tensor

from lazystate.ops.pool import Pool
from lazystate.ops.torch.decay import suffix_sums
from lazystate.ops.torch.rows import Rows
from lazystate.ops.torch.step import gather, per_head, product, solve, within


def fold(pool: Pool, rows: Rows) -> None:
    """Replay the committed records of `rows.folding` into their checkpoints, and rebuild the view.

    Both are made of the same exact state: neither of the other's rounded numbers.
    The records stay where they are; `commit` moves the origin past them.
    """
    which = rows.folding
    state = replay(pool, rows, which)
    slots = rows.slots[which]
    pool.states.write(slots, state, rows.writes[which])
    pool.view.store(slots, state)


def replay(pool: Pool, rows: Rows, which: Tensor) -> Tensor:
    """The exact state after the committed records of the rows `which` [F] (Eq. 8).

    Reads the checkpoint, never the view. Where the layer erases and the pool keeps raw records, the
    corrections are derived again from (k, v, log_decay, beta), so that neither the rounding of a
    cached u nor an error of the view enters the recurrence (Eq. 14).

    Returns:
        [F, HV, V, K], compute dtype.
    """
    spec, group = pool.spec, pool.spec.group
    state = pool.states.read(rows.slots[which]).to(spec.compute)
    state = state.masked_fill(rows.empty[which].view(-1, 1, 1, 1), 0)
    newer = rows.newer[which]
    after, total = suffix_sums(*gather(pool, newer, "log_decay"))
    after = after.flip(1)
    oldest = newer[:, 1:].flip(1)
    raw = pool.ring.v is not None
    names = ("k", "v" if raw else "u", "log_decay")
    names += ("beta",) if spec.beta and raw else ()
    k, values, log_decay, *beta = gather(pool, oldest, *names)
    u = values.permute(0, 2, 3, 1)
    if spec.erase and raw:
        u = _corrections(spec.decay == "channel", group, state, k, u, log_decay, beta[0])
    elif beta:
        u = u * beta[0].transpose(1, 2).unsqueeze(2)
    keys = per_head(k, group, 2)
    if spec.decay == "channel":
        return state * total.exp().unsqueeze(2) + product(u, (keys * after.exp()).transpose(1, 2))
    weighted = u * after.exp().transpose(1, 2).unsqueeze(2)
    return state * total.exp()[..., None, None] + product(weighted, keys.transpose(1, 2))


def _corrections(
    channel: bool, group: int, state: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """u of every record of a window from the checkpoint, one n x n solve (Eq. 14).

    Args:
        state: [F, HV, V, K]. k: [F, n, H, K]. v: [F, HV, V, n]. log_decay: [F, n, HV] or
        [F, n, HV, K]. beta: [F, n, HV].
    """
    decay = log_decay.cumsum(1).exp()
    keys = per_head(k, group, 2).permute(0, 2, 3, 1)
    if channel:
        known = product(state, keys * decay.permute(0, 2, 3, 1))
    else:
        known = product(state, keys) * decay.transpose(1, 2).unsqueeze(2)
    return solve(v - known, within(k, k, log_decay, group), beta)
