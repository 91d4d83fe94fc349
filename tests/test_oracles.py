"""Second opinion: the per-token formulas that transformers ships agree with gates and cache."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearForgetGate,
    recurrent_kimi_delta_attention,
)
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

import samples
import tolerance
from lazystate import LayerSpec, StateCache, gates
from lazystate.gates import Inputs
from lazystate.reference import recurrence

TOKENS, WINDOW = 20, 6
# The plain PyTorch form, whatever kernel package may be installed.
delta_rule = unwrap(torch_recurrent_gated_delta_rule)
kimi_delta_rule = unwrap(recurrent_kimi_delta_attention)
selective_state_update = unwrap(mamba2_selective_state_update)


def decoded(spec: LayerSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs [1, T, HV, V] and the last state [HV, V, K] of a cache that decodes one by one."""
    cache = StateCache(spec, 1, window=WINDOW)
    outs = []
    for t in range(inputs.q.shape[1]):
        parts = [None if x is None else x[:, t : t + 1] for x in inputs[:5]]
        outs.append(samples.advance(cache, samples.slots(0), Inputs(*parts, inputs.skip)))
    return torch.cat(outs, 1), cache.materialize(samples.slots(0))[0][0]


def agree(spec: LayerSpec, inputs: Inputs, out: Tensor, state: Tensor) -> None:
    """Cache and reference both agree with a stock result, to FP32 arithmetic over all windows."""
    bound = 4 * TOKENS / WINDOW * tolerance.arithmetic(spec, WINDOW)
    mine, last = decoded(spec, inputs)
    assert tolerance.error(mine, out) <= bound and tolerance.error(last, state) <= bound
    parts = [None if x is None else x[0] for x in inputs[:5]]
    zero = torch.zeros(spec.state_shape)
    exact, states = recurrence.recur(zero, *parts, erase=spec.erase, skip=inputs.skip)
    assert tolerance.error(out[0], exact) <= bound and tolerance.error(state, states[-1]) <= bound


def qkv(spec: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Raw q, k and v of one request."""
    q, k = (torch.randn(1, TOKENS, spec.key_heads, spec.key_dim) for _ in range(2))
    return q, k, torch.randn(1, TOKENS, spec.heads, spec.value_dim)


def test_mamba2_is_transformers_selective_state_update() -> None:
    """Nemotron-H's single-token update, softplus and D included."""
    spec = samples.layer("mamba2", torch.float32)
    C, B, x = qkv(spec)
    dt, A_log, bias, D = torch.randn(1, TOKENS, 4), *torch.randn(3, 4)
    state, outs = torch.zeros(1, *spec.state_shape), []
    wide = (spec.heads, spec.value_dim)
    for t in range(TOKENS):
        out = selective_state_update(
            state,
            x[:, t],
            dt[:, t, :, None].expand(1, *wide),
            -A_log.exp()[:, None, None].expand(spec.state_shape),
            B[:, t],
            C[:, t],
            D[:, None].expand(wide),
            dt_bias=bias[:, None].expand(wide),
            dt_softplus=True,
        )
        outs.append(out)
    inputs = gates.mamba2(x, B, C, dt, A_log=A_log, dt_bias=bias, D=D)
    agree(spec, inputs, torch.stack(outs, 1), state[0])


def test_gdn_is_transformers_recurrent_delta_rule() -> None:
    """Qwen3-Next's recurrence with its gates, L2 norm and scale."""
    spec = samples.layer("gdn", torch.float32)
    q, k, v = qkv(spec)
    a, b = torch.randn(2, 1, TOKENS, spec.heads)
    A_log, bias = torch.randn(2, spec.heads)
    log_decay = -A_log.exp() * F.softplus(a + bias)
    out, state = delta_rule(
        q,
        k,
        v,
        log_decay,
        b.sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    inputs = gates.gdn(q, k, v, a, b, A_log=A_log, dt_bias=bias)
    agree(spec, inputs, out, state[0].transpose(1, 2))


class _Config:
    """The fields that the forget gates read."""

    hidden_size, linear_head_dim, linear_num_heads = 12, 8, 4
    linear_lower_bound: float | None = None


@pytest.mark.parametrize(
    ("gate_class", "lower_bound"),
    [(KimiLinearForgetGate, None), (Glm5NextTextForgetGate, None), (Glm5NextTextForgetGate, -5.0)],
)
def test_kda_is_transformers_recurrence_and_gate(
    gate_class: Callable, lower_bound: float | None
) -> None:
    """Kimi Linear's recurrence, under Kimi Linear's gate and both gates of GLM-5."""
    spec = samples.layer("kda", torch.float32)
    q, k, v = qkv(spec)
    config = _Config()
    config.linear_lower_bound = lower_bound
    forget = gate_class(config)
    with torch.no_grad():
        for parameter in forget.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
        hidden = torch.randn(1, TOKENS, config.hidden_size)
        log_decay = forget(hidden)
        raw = forget.f_b_proj(forget.f_a_proj(hidden)).view(1, TOKENS, 4, 8)
    b = torch.randn(1, TOKENS, 4)
    out, state = kimi_delta_rule(
        q, k, v, log_decay, b.sigmoid(), None, True, use_qk_l2norm_in_kernel=True
    )
    parameters = {"A_log": forget.A_log.detach(), "dt_bias": forget.dt_bias.detach()}
    if lower_bound is None:
        inputs = gates.kda_softplus(q, k, v, raw, b, **parameters)
    else:
        inputs = gates.kda_bounded(q, k, v, raw, b, **parameters, lower_bound=lower_bound)
    agree(spec, inputs, out, state[0].transpose(1, 2))
