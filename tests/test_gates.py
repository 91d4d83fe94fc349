"""Gates: the FP64 formulas to the last FP32 bits, and one rounding of a normalised key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import samples
import tolerance
from lazystate import gates
from lazystate.reference import gates as exact

B, T, H, HV, K, V = 2, 3, 2, 4, 16, 5
ACTIVATIONS = [torch.float32, torch.float16, torch.bfloat16]
EPS = torch.finfo(torch.float32).eps


def worst(actual: Tensor, expected: Tensor, argument: Tensor | None = None) -> float:
    """Largest error of any entry, as a part of what FP32 explains: at most 1 is right.

    A chain of elementary functions, each within two spacings, gives 8 of them. `argument` is what
    exp was applied to: FP32 holds it to a relative spacing, which exp makes an absolute one.
    """
    assert actual.dtype == torch.float32
    allowed = 8 * EPS if argument is None else EPS * (8 + 2 * argument.abs())
    scale = expected.abs().clamp(min=torch.finfo(torch.float32).tiny)
    return float(((actual.double() - expected).abs() / scale / allowed).max())


def raw(*shape: int, activation: torch.dtype) -> Tensor:
    """Raw gate inputs from small to far past where exp overflows in FP32."""
    scales = torch.tensor([0.1, 1.0, 10.0, 100.0])
    return (torch.randn(shape) * scales[torch.randint(4, shape)]).to(activation)


def qkv(activation: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k before the norm, and v."""
    q, k = torch.randn(B, T, H, K), torch.randn(B, T, H, K)
    return q.to(activation), k.to(activation), torch.randn(B, T, HV, V).to(activation)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.001, 0.1)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mamba2(activation: torch.dtype, limit: tuple[float, float]) -> None:
    """Time step and log-decay in FP32 from BF16 inputs on; x, B and C pass as they are."""
    dt = raw(B, T, HV, activation=activation)
    A_log, bias, D = torch.randn(HV), torch.randn(HV), torch.randn(HV)
    C, Bk, x = qkv(activation)
    out = gates.mamba2(x, Bk, C, dt, A_log=A_log, dt_bias=bias, D=D, dt_limit=limit)
    log_decay, step = exact.mamba2(dt.double(), A_log.double(), bias.double(), limit)
    assert out.beta is not None
    assert worst(out.beta, step, dt.double() + bias) <= 1
    assert worst(out.log_decay, log_decay, dt.double() + bias) <= 1
    assert out.q is C and out.k is Bk and out.v is x and out.skip is D


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gdn(activation: torch.dtype) -> None:
    """Log-decay and beta in FP32: no BF16 sigmoid."""
    a, b = raw(B, T, HV, activation=activation), raw(B, T, HV, activation=activation)
    A_log, bias = torch.randn(HV), torch.randn(HV)
    out = gates.gdn(*qkv(activation), a, b, A_log=A_log, dt_bias=bias)
    log_decay, beta = exact.gdn(a.double(), b.double(), A_log.double(), bias.double())
    assert out.beta is not None
    assert worst(out.log_decay, log_decay, a.double() + bias) <= 1
    assert worst(out.beta, beta) <= 1


def test_beta_scale() -> None:
    """beta_scale 2 doubles beta exactly."""
    q, k, v = qkv(torch.bfloat16)
    a = raw(B, T, HV, activation=torch.bfloat16)
    parameters = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    once = gates.gdn(q, k, v, a, a, **parameters)
    twice = gates.gdn(q, k, v, a, a, **parameters, beta_scale=2.0)
    assert once.beta is not None and twice.beta is not None
    assert torch.equal(twice.beta, 2 * once.beta)


@pytest.mark.parametrize("shape", [(H,), (1, 1, H, 1)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kda_softplus(activation: torch.dtype, shape: tuple[int, ...]) -> None:
    """The unbounded gate, with A_log as either model family stores it."""
    gate, b = raw(B, T, H, K, activation=activation), raw(B, T, H, activation=activation)
    A_log, bias = torch.randn(H), torch.randn(H * K)
    q, k, v = qkv(activation)
    out = gates.kda_softplus(q, k, v[:, :, :H], gate, b, A_log=A_log.view(shape), dt_bias=bias)
    expected = exact.kda_softplus(gate.double(), A_log.double(), bias.double())
    assert worst(out.log_decay, expected, gate.double() + bias.view(H, K)) <= 1
    assert out.beta is not None
    assert worst(out.beta, exact.sigmoid(b.double())) <= 1


@pytest.mark.parametrize("bound", [-5.0, -0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kda_bounded(activation: torch.dtype, bound: float) -> None:
    """The bounded gate stays in [lower_bound, 0] and follows its formula."""
    gate = torch.randn(B, T, H, K).to(activation) * 3
    b, A_log, bias = raw(B, T, H, activation=activation), torch.randn(H) / 2, torch.randn(H * K)
    q, k, v = qkv(activation)
    out = gates.kda_bounded(
        q, k, v[:, :, :H], gate, b, A_log=A_log, lower_bound=bound, dt_bias=bias
    )
    expected = exact.kda_bounded(gate.double(), A_log.double(), bias.double(), bound)
    exponent = A_log.double().exp()[:, None] * (gate.double() + bias.double().view(H, K))
    assert worst(out.log_decay, expected, 4 * exponent) <= 1
    assert bound <= float(out.log_decay.min()) and float(out.log_decay.max()) <= 0


def test_a_bound_is_negative() -> None:
    """A lower bound of 0 or more is refused by name, and the other gate is named."""
    q, k, v = qkv(torch.float32)
    with pytest.raises(ValueError, match=r"lower_bound must be negative.*kda_softplus"):
        gates.kda_bounded(q, k, v, q, q[..., 0], A_log=torch.zeros(H), lower_bound=5.0)


def test_extreme_raw_inputs_stay_finite() -> None:
    """Raw values of +-1000 give no NaN and no positive log-decay in any gate."""
    for value in (-1000.0, 0.0, 1000.0):
        q, k, v = qkv(torch.bfloat16)
        a = torch.full((B, T, HV), value, dtype=torch.bfloat16)
        gate = torch.full((B, T, H, K), value, dtype=torch.bfloat16)
        one = torch.zeros(HV)
        outs = [
            gates.mamba2(v, k, q, a, A_log=one),
            gates.gdn(q, k, v, a, a, A_log=one, dt_bias=one),
            gates.kda_softplus(q, k, v[:, :, :H], gate, a[..., :H], A_log=one[:H]),
            gates.kda_bounded(q, k, v[:, :, :H], gate, a[..., :H], A_log=one[:H], lower_bound=-5.0),
        ]
        for out in outs:
            assert out.log_decay.isfinite().all() and (out.log_decay <= 0).all()
            assert out.beta is not None and out.beta.isfinite().all()


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_key_is_rounded_once(activation: torch.dtype, scale: float | None) -> None:
    """q and k are the FP64 norm, off by a single rounding to the activation dtype."""
    q, k, v = qkv(activation)
    a = torch.zeros(B, T, HV)
    parameters = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    out = gates.gdn(q, k, v, a, a, **parameters, scale=scale)
    factor = K**-0.5 if scale is None else scale
    once = torch.finfo(activation).eps / 2 + 8 * EPS
    for actual, x, f in ((out.q, q, factor), (out.k, k, 1.0)):
        expected = exact.normalised(x.double()) * f
        assert actual.dtype == activation
        assert ((actual.double() - expected).abs() <= once * expected.abs() + 1e-7).all()


@pytest.mark.parametrize("activation", [torch.float64, torch.float32, torch.bfloat16])
def test_constant_and_given_decays(activation: torch.dtype) -> None:
    """GLA takes a log-decay, lightning attention a slope; both in compute dtype."""
    q, k, v = qkv(activation)
    compute = torch.float64 if activation == torch.float64 else torch.float32
    given = -torch.rand(B, T, HV, K)
    assert torch.equal(gates.gla(q, k, v, given).log_decay, given.to(compute))
    assert torch.equal(gates.gla(q, k, v, given, scale=1.0).q, q)
    slope = torch.rand(HV)
    log_decay = gates.lightning(q, k, v, slope).log_decay
    assert log_decay.dtype == compute and log_decay.shape == (B, T, HV)
    assert torch.equal(log_decay[1, 2], -slope.to(compute))


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_a_step_takes_what_gates_give(kind: str) -> None:
    """Any gate's result is unpacked into StateCache.step as it is."""
    spec = samples.layer(kind, torch.bfloat16)
    q = torch.randn(1, 1, spec.key_heads, spec.key_dim).bfloat16()
    v = torch.randn(1, 1, spec.heads, spec.value_dim).bfloat16()
    a = torch.randn(1, 1, spec.heads).bfloat16()
    parameters = {"A_log": torch.zeros(spec.heads), "dt_bias": torch.zeros(spec.heads)}
    if kind == "mamba2":
        inputs = gates.mamba2(v, q, q, a, **parameters, D=torch.ones(spec.heads))
    elif kind == "gdn":
        inputs = gates.gdn(q, q, v, a, a, **parameters)
    else:
        inputs = gates.kda_softplus(q, q, v, q, a, A_log=parameters["A_log"])
    (cache, _) = samples.pair(spec, 1)
    out = samples.advance(cache, samples.slots(0), inputs)
    assert out.isfinite().all() and tolerance.error(out, out) == 0
