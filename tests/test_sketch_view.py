"""The sketch as a read view, against SketchSSM's own formulas written down from its equations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lazystate import LayerSpec, StateCache
from lazystate.gates import Inputs
from lazystate.sketch import maps
from lazystate.sketch.prefix import completed, orthonormal
from lazystate.sketch.view import SketchView
from samples import draw, layer

DOUBLE = torch.float64
RANKS = (1, 3, 6, 9)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def basis(*shape: int) -> Tensor:
    return torch.linalg.qr(random(*shape)).Q


def states(*lead: int, values: int = 12, keys: int = 16) -> Tensor:
    """States [..., V, K] with a decaying spectrum, as real ones have."""
    scale = 2.0 ** -torch.arange(keys, dtype=DOUBLE)
    return random(*lead, values, keys) * scale @ basis(*lead, keys, keys).mT


def small(kind: str) -> LayerSpec:
    return layer(kind, key_dim=16, value_dim=12)


def rotated(state: Tensor, omega: Tensor, query: Tensor, pivots: int, ridge: float) -> Tensor:
    """Coefficients of one head as SketchSSM's A.2.2 has them; state K x V, omega K x G."""
    keys, rank = omega.shape
    rest = torch.linalg.svd(omega.T).Vh[rank:]
    frame = torch.cat([omega.T, rest])
    turned, x = frame @ state, frame @ query
    mu = turned.square().sum() / keys
    metric = turned @ turned.T / mu
    q = torch.linalg.qr(turned.T[:, : min(rank, pivots)]).Q
    low = turned @ q / mu.sqrt()
    d = (metric.diagonal() - low.square().sum(1)).clamp_min(0)
    near = (low @ low.T + d.diag())[:rank]
    return torch.linalg.solve(near[:, :rank] + ridge * torch.eye(rank, dtype=DOUBLE), near @ x)


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 9, 16])
@pytest.mark.parametrize("pivots", [1, 4])
def test_pivot_map_is_the_papers(rank: int, pivots: int) -> None:
    """Factors in the state's own coordinates give what the rotated frame and its solve give."""
    state, omega, query = states(3, 2), basis(3, 2, 16, rank), random(3, 2, 16, 1)
    factors = maps.pivot_map(state, omega, pivots=pivots)
    got = factors.coefficients(omega.mT @ query, query)
    dense = factors.dense(omega) @ query
    for i in range(3):
        for j in range(2):
            args = state[i, j].T, omega[i, j], query[i, j, :, 0], pivots, 0.003
            expected = rotated(*args)
            assert torch.allclose(got[i, j, :, 0], expected, rtol=1e-12, atol=1e-12)
            assert torch.allclose(dense[i, j, :, 0], expected, rtol=1e-12, atol=1e-12)


def test_pivot_map_is_exact_for_as_many_pivots_as_ranks() -> None:
    """With P = G nothing is approximated: the map is the regularised least-squares one."""
    state, omega = states(5), basis(5, 16, 4)
    got = maps.pivot_map(state, omega, pivots=4).dense(omega)
    assert torch.allclose(got, maps.exact_map(state, omega, ridge=0.003), rtol=1e-10, atol=1e-10)


def test_pivot_map_in_float32() -> None:
    """The factored form keeps FP32's digits: no difference of large terms."""
    state, omega, query = states(64), basis(64, 16, 9), random(64, 16, 1)
    factors = maps.pivot_map(state, omega)
    expected = state @ (omega @ factors.coefficients(omega.mT @ query, query))
    narrow = [x.float() for x in (state, omega, query)]
    factors = maps.pivot_map(*narrow[:2])
    got = narrow[0] @ (narrow[1] @ factors.coefficients(narrow[1].mT @ narrow[2], narrow[2]))
    # Singular vectors of pivots that are nearly dependent move by eps over their share.
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4


def test_exact_map_projects() -> None:
    """The exact map reads the closest point of the sketch's range, dependent columns or not."""
    state, omega, query = states(4), basis(4, 16, 6), random(4, 16, 1)
    state[0] = state[0, :, :1] * random(16)  # rank 1
    u = maps.sketch(state, omega)
    got = u @ (maps.exact_map(state, omega) @ query)
    expected = torch.stack(
        [
            a @ torch.linalg.lstsq(a, b, driver="gelsd").solution
            for a, b in zip(u, state @ query, strict=True)
        ]
    )
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_offline_map_is_exact_for_the_mean_state() -> None:
    """Were every state the calibrated one, the offline map would be the exact one."""
    state, omega = states(4), basis(4, 16, 6)
    got = maps.offline_map(state.mT @ state, omega)
    assert torch.allclose(got, maps.exact_map(state, omega), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["pivot", "exact", "exact without ridge"])
def test_zero_state_reads_zero(kind: str) -> None:
    """A state of zeros has a sketch of zeros, and nothing divides by its size."""
    state, omega, query = torch.zeros(2, 12, 16, dtype=DOUBLE), basis(2, 16, 6), random(2, 16, 1)
    if kind == "pivot":
        factors = maps.pivot_map(state, omega)
        coefficients = factors.coefficients(omega.mT @ query, query)
    else:
        ridge = 0.003 if kind == "exact" else 0.0
        coefficients = maps.exact_map(state, omega, ridge=ridge) @ query
    assert torch.equal(maps.sketch(state, omega) @ coefficients, torch.zeros(2, 12, 1).double())


@pytest.mark.parametrize("map", ["pivot", "exact", "offline"])
def test_padding_is_as_if_it_were_not(map: str) -> None:
    """Heads of different ranks in one tensor read what each reads alone at its own width."""
    state, omega = states(2, 4), basis(4, 16, 9)
    metric = (state.mT @ state).mean(0)
    slots, vectors = torch.tensor([2, 0]), random(2, 4, 16, 3)
    ranks = torch.tensor(RANKS)
    options = {"map": map, "metric": metric, "dtype": DOUBLE}
    view = SketchView.allocate(omega, ranks, 3, 12, **options)
    view.store(slots, state)
    got = view.read(slots, vectors)
    for h, rank in enumerate(RANKS):
        options["metric"] = metric[h : h + 1]
        alone = SketchView.allocate(omega[h : h + 1, :, :rank], ranks[h : h + 1], 3, 12, **options)
        alone.store(slots, state[:, h : h + 1])
        expected = alone.read(slots, vectors[:, h : h + 1])
        assert torch.allclose(got[:, h : h + 1], expected, rtol=1e-9, atol=1e-9)


def test_dense_heads_read_their_state() -> None:
    """Rank 0 is a head that keeps a copy; the others keep their sketch."""
    state, omega, vectors = states(2, 4), basis(4, 16, 9), random(2, 2, 16, 3)
    ranks = torch.tensor([0, 3, 0, 9])
    view = SketchView.allocate(omega, ranks, 2, 12, dtype=DOUBLE)
    view.store(torch.arange(2), state)
    got = view.read(None, vectors).view(2, 4, 12, 3)
    expected = state @ vectors.repeat_interleave(2, 1)
    assert torch.allclose(got[:, ::2], expected[:, ::2])
    assert not torch.allclose(got[:, 1], expected[:, 1])


def test_full_rank_reads_the_state() -> None:
    """A basis of all of the space and no ridge leave nothing out."""
    state, vectors = states(2, 4), random(2, 4, 16, 3)
    full = torch.full((4,), 16)
    view = SketchView.allocate(basis(4, 16, 16), full, 2, 12, map="exact", ridge=0.0, dtype=DOUBLE)
    view.store(torch.arange(2), state)
    assert torch.allclose(view.read(None, vectors), state @ vectors, rtol=1e-8, atol=1e-8)


def test_bytes_are_those_of_the_ranks() -> None:
    """A read counts each head's own rank, the copy of a dense head whole, and no padding."""
    view = SketchView.allocate(basis(4, 16, 9), torch.tensor([0, 2, 4, 9]), 1, 12)
    sketches = sum(g * 12 + min(g, 4) * 16 + g * (min(g, 4) + 1) for g in (2, 4, 9))
    assert view.bytes_read() == view.bytes_stored() == 2 * (16 * 12 + sketches)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"map": "best"}, "map must be one of pivot, exact, offline"),
        ({"map": "offline"}, "needs metric"),
        ({"ranks": torch.tensor([1, 2])}, r"ranks must be \[4\]"),
        ({"ranks": torch.tensor([1, 2, 3, 10])}, "ranks must be 0 to 9"),
    ],
)
def test_allocate_says_what_is_wrong(changes: dict, reason: str) -> None:
    """Arguments that do not fit are refused with the reason."""
    arguments = {"omega": basis(4, 16, 9), "ranks": torch.tensor(RANKS), "slots": 1}
    with pytest.raises(ValueError, match=reason):
        SketchView.allocate(**arguments | changes, value_dim=12)


def test_ridge_must_be_positive() -> None:
    """The pivots' own diagonal is zero, so a pivot map without ridge does not exist."""
    with pytest.raises(ValueError, match="ridge positive"):
        maps.pivot_map(states(1), basis(1, 16, 6), ridge=0.0)


def per_token(spec: LayerSpec, inputs: Inputs, head: int) -> list[tuple[Tensor, ...]]:
    """(q, k, v, decay [K], beta) of every token of one head of the first row."""
    key = head // spec.group
    tokens = []
    for t in range(inputs.q.shape[1]):
        decay = inputs.log_decay[0, t, head].exp().expand(spec.key_dim)
        beta = torch.ones((), dtype=DOUBLE) if inputs.beta is None else inputs.beta[0, t, head]
        tokens.append((inputs.q[0, t, key], inputs.k[0, t, key], inputs.v[0, t, head], decay, beta))
    return tokens


def paper_window(state: Tensor, u: Tensor, c: Tensor, tokens: list, erase: bool) -> Tensor:
    """Outputs of a window, SketchSSM Eq. 4 with Eq. 38-46; state K x V, u V x G, c G x K."""
    eye = torch.eye(state.shape[0], dtype=DOUBLE)
    transition = [
        (eye - beta * erase * torch.outer(k, k)) @ decay.diag() for _, k, _, decay, beta in tokens
    ]
    pi, f, outputs = [], [], []
    for t, (q, k, _, _, beta) in enumerate(tokens):
        total = torch.stack([token[3] for token in tokens[: t + 1]]).prod(0)
        left = []  # l_s(t)
        for s in range(t + 1):
            after = [token[3] for token in tokens[s + 1 : t + 1]]
            left.append(torch.stack(after).prod(0) * tokens[s][1] if after else tokens[s][1])
        new_pi, new_f = total * k, c @ (total * k)
        for j in range(t):
            new_pi = new_pi - (left[j] @ k) * pi[j]
            new_f = new_f - (left[j] @ k) * f[j]
        pi.append(beta * erase * new_pi)
        f.append(beta * erase * new_f)
        effective = total * q - sum(pi[s] * (left[s] @ q) for s in range(t + 1))
        coefficients = c @ (total * q) - sum(f[s] * (left[s] @ q) for s in range(t + 1))
        product = eye
        for m in transition[: t + 1]:
            product = m @ product
        assert torch.allclose(effective, product.T @ q, rtol=1e-12, atol=1e-12)
        assert torch.allclose(coefficients, c @ effective, rtol=1e-11, atol=1e-11)
        out = u @ coefficients
        for s in range(t + 1):
            written = tokens[s][1]
            for m in transition[s + 1 : t + 1]:
                written = m @ written
            out = out + tokens[s][4] * (written @ q) * tokens[s][2]
        outputs.append(out)
    return torch.stack(outputs)


@pytest.mark.parametrize("map", ["pivot", "exact"])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda", "gla"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_window_is_the_papers(kind: str, map: str, tokens: int) -> None:
    """The ordinary step on a sketch view equals effective queries through WY factors."""
    spec, window = small(kind), 12
    state, omega = states(1, 4), basis(4, 16, 9)
    cache = StateCache(spec, slots=3, window=window, max_tokens=tokens)
    view = SketchView.allocate(omega, torch.tensor(RANKS), 3, 12, map=map, dtype=DOUBLE)
    cache._pools[0].view = view
    slot = torch.tensor([1])
    cache.load(slot, [state])
    inputs = draw(spec, 1, window)
    outputs = []
    for start in range(0, window, tokens):
        ticket = cache.begin(slot, tokens=tokens)
        part = (x if x is None else x[:, start : start + tokens] for x in inputs)
        outputs.append(cache.step(ticket, 0, *part))
        cache.commit(ticket, kept=torch.tensor([tokens]))
    got = torch.cat(outputs, 1)[0]
    for h, rank in enumerate(RANKS):
        own = omega[h, :, :rank]
        if map == "pivot":
            eye = torch.eye(16, dtype=DOUBLE)
            c = torch.stack([rotated(state[0, h].T, own, e, 4, 0.003) for e in eye], 1)
        else:
            u = state[0, h] @ own
            gram, mu = u.T @ u, state[0, h].square().sum() / 16
            c = torch.linalg.solve(gram + 0.003 * mu * torch.eye(rank).double(), u.T @ state[0, h])
        u = state[0, h] @ own
        expected = paper_window(state[0, h].T, u, c, per_token(spec, inputs, h), spec.erase)
        assert torch.allclose(got[:, h], expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(got[:, 0], got[:, 3])


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_folds_never_see_the_sketch(kind: str) -> None:
    """After any number of windows the state is the recurrence's, however coarse the sketch."""
    spec, slot = small(kind), torch.tensor([0])
    exact = StateCache(spec, slots=1, window=4)
    coarse = StateCache(spec, slots=1, window=4)
    ranks = torch.ones(4, dtype=torch.int64)
    coarse._pools[0].view = SketchView.allocate(basis(4, 16, 2), ranks, 1, 12, dtype=DOUBLE)
    state, inputs = states(1, 4), draw(spec, 1, 13)
    for cache in (exact, coarse):
        cache.load(slot, [state])
        for t in range(13):
            ticket = cache.begin(slot)
            cache.step(ticket, 0, *(x if x is None else x[:, t : t + 1] for x in inputs))
            cache.commit(ticket)
    (expected,), (got,) = exact.materialize(slot), coarse.materialize(slot)
    assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11)


def test_orthonormal_keeps_prefixes_and_drops_dependent_columns() -> None:
    """Every prefix spans what it spanned; a column that adds nothing becomes zero."""
    columns = random(3, 8, 5)
    columns[:, :, 2] = columns[:, :, 0] - 2 * columns[:, :, 1]
    columns[1, :, 4] = 0
    q = orthonormal(columns)
    alive = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]).double()
    assert torch.allclose(q.mT @ q, torch.diag_embed(alive), atol=1e-14)
    for i in range(1, 6):
        part = q[..., :i]
        assert torch.allclose(part @ (part.mT @ columns[..., :i]), columns[..., :i], atol=1e-13)


def test_completed_is_orthogonal_and_keeps_what_there_is() -> None:
    """Missing directions are filled in, in any place; given ones stay."""
    given = basis(2, 8, 5)
    given[0, :, 1] = 0
    full = completed(given)
    assert torch.allclose(full.mT @ full, torch.eye(8, dtype=DOUBLE).expand(2, 8, 8), atol=1e-13)
    assert torch.equal(full[1, :, :5], given[1])
    assert torch.equal(full[0, :, [0, 2, 3, 4]], given[0, :, [0, 2, 3, 4]])
