"""Calibration: streamed sums, the basis and the scores, against all samples at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lazystate.sketch.scores import Scores, prefix_products
from lazystate.sketch.statistics import Statistics, effective_queries
from samples import EXTREME, draw, layer
from test_sketch_view import basis, random, states

HEADS, VALUES, KEYS, TOKENS = 3, 5, 8, 4


def windows(count: int = 40) -> tuple[Tensor, Tensor]:
    """States [count, HV, V, K] and queries [count, T, HV, K] with structure to find."""
    shape = basis(HEADS, KEYS, KEYS)
    state = states(count, HEADS, values=VALUES, keys=KEYS)
    scale = 1.5 ** -torch.arange(KEYS, dtype=torch.float64)
    queries = torch.einsum("hkj,nthj->nthk", shape, random(count, TOKENS, HEADS, KEYS) * scale)
    return state, queries


def gathered(state: Tensor, queries: Tensor) -> Statistics:
    """Statistics of all windows in one go."""
    found = Statistics.empty(HEADS, KEYS)
    found.add(state, queries)
    return found


def root(metric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(metric)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT


def projector(columns: Tensor) -> Tensor:
    return columns @ torch.linalg.pinv(columns)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda", "gla"])
@pytest.mark.parametrize("decays", [None, EXTREME])
def test_effective_queries_are_transposed_transitions(kind: str, decays: tuple | None) -> None:
    """q~ is the query times all transposed transitions back to the window's start, resets too."""
    spec = layer(kind)
    q, k, _, log_decay, beta, _ = draw(spec, 2, 6, decays=decays)
    got = effective_queries(q, k, log_decay, beta, erase=spec.erase)
    for b in range(2):
        for h in range(spec.heads):
            product = torch.eye(spec.key_dim, dtype=torch.float64)
            for t in range(6):
                decay = log_decay[b, t, h].exp().expand(spec.key_dim).diag()
                key = k[b, t, h // spec.group]
                if spec.erase:
                    assert beta is not None
                    decay = decay - beta[b, t, h] * torch.outer(key, key @ decay)
                product = decay @ product
                expected = product.T @ q[b, t, h // spec.group]
                assert torch.allclose(got[b, t, h], expected, rtol=1e-12, atol=1e-12)


def test_basis_is_the_principal_subspace_of_weighted_queries() -> None:
    """One pass finds what forming E0, its root and all z, and a PCA of them, finds."""
    state, queries = windows()
    got = gathered(state, queries).basis(KEYS - 2)
    for h in range(HEADS):
        metric = (state[:, h].mT @ state[:, h]).mean(0)
        z = queries[:, :, h].reshape(-1, KEYS) @ root(metric)
        _, singular, directions = torch.linalg.svd(z)
        energy = singular.square() / len(z)
        assert torch.allclose(got.energy[h], energy, rtol=1e-9, atol=1e-9 * float(energy[0]))
        for rank in range(1, KEYS - 1):
            weighted = root(metric) @ got.omega[h, :, :rank]
            expected = directions[:rank].T @ directions[:rank]
            assert torch.allclose(projector(weighted), expected, atol=1e-7)


def test_energies_behind_a_rank_are_its_loss() -> None:
    """Eq. 8's loss of each prefix, by least squares of every sample, is the sum left behind."""
    state, queries = windows()
    got = gathered(state, queries).basis(5)
    half = root((state[:, 1].mT @ state[:, 1]).mean(0))
    z = (queries[:, :, 1].reshape(-1, KEYS) @ half).T
    for rank in range(1, 6):
        left = z - projector(half @ got.omega[1, :, :rank]) @ z
        loss = left.square().sum(0).mean()
        assert torch.allclose(loss, got.energy[1, rank:].sum(), rtol=1e-6)
        other = z - projector(half @ basis(KEYS, rank)) @ z
        assert loss <= other.square().sum(0).mean()


def test_smaller_ranks_are_prefixes() -> None:
    """A basis of rank 3 is the first three columns of one of rank 7, and all are orthonormal."""
    found = gathered(*windows())
    large, small = found.basis(7).omega, found.basis(3).omega
    assert torch.equal(large[..., :3], small)
    assert torch.allclose(large.mT @ large, torch.eye(7).double(), atol=1e-12)


def test_order_and_parts_do_not_matter() -> None:
    """Windows added one by one, or by two processes that merge, give the sums of all at once."""
    state, queries = windows(10)
    whole, parts = gathered(state, queries), [Statistics.empty(HEADS, KEYS) for _ in range(2)]
    for i in torch.randperm(10).tolist():
        parts[i % 2].add(state[i : i + 1], queries[i : i + 1])
    parts[0].merge(parts[1])
    for name, tensor in whole.tensors().items():
        assert torch.allclose(parts[0].tensors()[name], tensor)
    assert (int(parts[0].windows), int(parts[0].tokens)) == (10, 40)


def test_basis_is_invariant() -> None:
    """Scales and the value space's coordinates do not matter; the key space's turn the basis."""
    state, queries = windows()
    expected = gathered(state, queries).basis(4)
    scaled = gathered(3e-4 * state @ torch.eye(KEYS).double(), 7e5 * queries).basis(4)
    assert torch.allclose(scaled.omega, expected.omega, atol=1e-6)
    turned = gathered(basis(VALUES, VALUES) @ state, queries).basis(4)
    assert torch.allclose(turned.omega, expected.omega, atol=1e-6)
    turn = basis(KEYS, KEYS)
    moved = gathered(state @ turn.T, queries @ turn.T).basis(4)
    assert torch.allclose(projector(moved.omega), projector(turn @ expected.omega), atol=1e-6)
    assert torch.allclose(moved.energy, expected.energy, rtol=1e-6, atol=1e-9)


def test_directions_without_state_or_queries_come_last() -> None:
    """On a support of three channels three columns lose nothing; the rest completes it."""
    state, queries = windows()
    state[..., 3:] = 0
    found = gathered(state, queries).basis(6)
    assert torch.allclose(found.omega.mT @ found.omega, torch.eye(6).double(), atol=1e-12)
    assert torch.allclose(found.energy[:, 3:], torch.zeros(HEADS, KEYS - 3).double(), atol=1e-12)
    missed, _ = prefix_products(state, found.omega, queries)
    assert float(missed[..., 3:].max()) < 1e-20 < float(missed[..., 2].max())
    queries[:] = 0
    nothing = gathered(state, queries).basis(6)
    assert torch.allclose(nothing.omega.mT @ nothing.omega, torch.eye(6).double(), atol=1e-12)


def test_ridge_blends_towards_the_queries_own_directions() -> None:
    """A huge ridge makes E0 the identity: the basis is the queries' own PCA."""
    state, queries = windows()
    got = gathered(state, queries).basis(3, ridge=1e9).omega
    flat = queries[:, :, 2].reshape(-1, KEYS)
    directions = torch.linalg.svd(flat).Vh[:3].T
    assert torch.allclose(projector(got[2]), projector(directions), atol=1e-6)


def test_groups_share_a_basis() -> None:
    """One basis for a group is that of its heads' samples together."""
    state, queries = windows()
    found = gathered(state, queries).grouped(1).basis(4).omega
    together = Statistics.empty(1, KEYS)
    for h in range(HEADS):
        together.add(state[:, h : h + 1], queries[:, :, h : h + 1])
    assert torch.allclose(found, together.basis(4).omega, atol=1e-9)


def test_statistics_say_what_is_wrong() -> None:
    """Shapes that do not fit, numbers that are not finite and empty sums have their reasons."""
    found = Statistics.empty(HEADS, KEYS)
    state, queries = windows(2)
    with pytest.raises(ValueError, match="no windows were added"):
        found.basis(2)
    with pytest.raises(ValueError, match=r"state must be \[B, 3, V, 8\]"):
        found.add(state[:, :2], queries)
    with pytest.raises(ValueError, match="must be finite"):
        found.add(state * torch.inf, queries)
    assert int(found.windows) == 0 and not found.states.any()
    found.add(state, queries)
    with pytest.raises(ValueError, match="rank must be 1 to 8"):
        found.basis(9)
    with pytest.raises(ValueError, match="groups must divide the 3 heads"):
        found.grouped(2)
    with pytest.raises(ValueError, match="do not merge"):
        found.merge(Statistics.empty(2, KEYS))


def test_scores_of_all_prefixes_are_least_squares_residuals() -> None:
    """Eq. 48 and 11 at once give what a least-squares problem for every rank gives."""
    state, queries = windows(6)
    omega, gradients = basis(HEADS, KEYS, 4), random(6, TOKENS, HEADS, VALUES)
    missed, paired = prefix_products(state, omega, queries, gradients)
    assert paired is not None
    out = torch.einsum("nhvk,nthk->nhvt", state, queries)
    for rank in range(5):
        delta = out - projector(state @ omega[..., :rank]) @ out
        expected = delta.square().sum(-2).transpose(1, 2)
        assert torch.allclose(missed[..., rank], expected, rtol=1e-9, atol=1e-12)
        expected = torch.einsum("nhvt,nthv->nth", delta, gradients)
        assert torch.allclose(paired[..., rank], expected, rtol=1e-7, atol=1e-10)


def test_columns_that_add_nothing_do_not_score() -> None:
    """A state of rank one is read by one column that meets it; the others change nothing."""
    state, queries = windows(3)
    state = state[..., :1] * torch.arange(1.0, KEYS + 1).double()
    missed, _ = prefix_products(state, torch.eye(KEYS).double().expand(HEADS, -1, -1), queries)
    assert float(missed[..., 1:].max()) < 1e-20 * float(missed[..., 0].max())
    omega = torch.eye(KEYS).double().expand(HEADS, -1, -1).clone()
    state[..., 0] = 0  # the first column now meets nothing
    missed, _ = prefix_products(state, omega, queries)
    assert torch.equal(missed[..., 1], missed[..., 0])
    assert float(missed[..., 2:].max()) < 1e-20 * float(missed[..., 0].max())


def test_scores_add_up_and_merge() -> None:
    """Sums over windows are those of single windows, whoever saw them."""
    state, queries = windows(6)
    omega, gradients = basis(HEADS, KEYS, 4), random(6, TOKENS, HEADS, VALUES)
    whole, parts = Scores.empty(HEADS, 4), [Scores.empty(HEADS, 4) for _ in range(2)]
    whole.add(state, omega, queries, gradients)
    for i in range(6):
        one = slice(i, i + 1)
        parts[i % 2].add(state[one], omega, queries[one], gradients[one])
    parts[1].merge(parts[0])
    for name, tensor in whole.tensors().items():
        assert torch.allclose(parts[1].tensors()[name], tensor)
    missed, paired = prefix_products(state, omega, queries, gradients)
    assert paired is not None
    assert torch.allclose(whole.paired, paired.square().sum((0, 1)))
    assert torch.allclose(whole.missed, missed.sum((0, 1)))
    assert int(whole.tokens) == 24
    with pytest.raises(ValueError, match="must be finite"):
        whole.add(state, omega, queries, gradients * torch.nan)
    with pytest.raises(ValueError, match="do not merge"):
        whole.merge(Scores.empty(HEADS, 5))
