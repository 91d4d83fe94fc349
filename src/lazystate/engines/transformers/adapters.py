"""What each supported mixer class calls its parts: one adapter a class, in three families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lazystate.gates import Prologue, Raw
from lazystate.spec import LayerSpec

# A stock mixer. Its attributes are the class's own, so no common type describes them.
Module = Any


class Projected(NamedTuple):
    """A mixer's linear projections of T tokens.

    Attributes:
        conv: [B, T, C], input of the short convolution.
        gate: what gates the output, as `Adapter.finish` takes it.
        raw: the raw gates, each [B, T, ...], as `Adapter.inputs` takes them.
    """

    conv: Tensor
    gate: Tensor
    raw: tuple[Tensor, ...]


@dataclass(frozen=True)
class Adapter:
    """One mixer class: where its parts are, and nothing of the algorithm.

    Attributes:
        spec: the recurrence of a module for an activation dtype.
        project: hidden states [B, T, D] to projections.
        inputs: the convolved [B, T, C] and the raw gates to what a step takes.
        finish: the recurrence's output [B, T, HV, V] and the gate to hidden states [B, T, D].
        key_first: the stock state is [B, HV, K, V] and not [B, HV, V, K].
        masks_conv: padding is zeroed behind the convolution too, as its bias makes it nonzero.
    """

    spec: Callable[[Module, torch.dtype], LayerSpec]
    project: Callable[[Module, Tensor], Projected]
    inputs: Callable[[Module, Tensor, tuple[Tensor, ...]], Raw]
    finish: Callable[[Module, Tensor, Tensor], Tensor]
    key_first: bool
    masks_conv: bool


def _mamba2_spec(module: Module, activation: torch.dtype) -> LayerSpec:
    return LayerSpec(
        heads=module.num_heads,
        key_heads=module.n_groups,
        key_dim=module.ssm_state_size,
        value_dim=module.head_dim,
        decay="scalar",
        erase=False,
        activation=activation,
        conv_channels=module.conv_dim,
        conv_width=module.conv_kernel_size,
    )


def _mamba2_split(module: Module, projected: Tensor) -> Projected:
    sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, conv, dt = projected.split(sizes, -1)
    return Projected(conv, gate, (dt,))


def _mamba2_project(module: Module, hidden: Tensor) -> Projected:
    return _mamba2_split(module, module.in_proj(hidden))


def _mamba2_inputs(module: Module, mixed: Tensor, raw: tuple[Tensor, ...]) -> Raw:
    """The time step is not clipped to `time_step_limit`: stock decoding does not clip it either."""
    keys = module.n_groups * module.ssm_state_size
    x, B, C = mixed.split([module.intermediate_size, keys, keys], -1)
    shape = (*mixed.shape[:2], module.n_groups, module.ssm_state_size)
    x = x.view(*mixed.shape[:2], module.num_heads, module.head_dim)
    prologue = Prologue("mamba2", module.A_log, module.dt_bias)
    return Raw(C.view(shape), B.view(shape), x, raw[0], None, module.D, prologue)


def _mamba2_finish(module: Module, out: Tensor, gate: Tensor) -> Tensor:
    return module.out_proj(module.norm(out.flatten(2), gate).to(out.dtype))


def _falcon_project(module: Module, hidden: Tensor) -> Projected:
    projected = module.in_proj(hidden * module.ssm_in_multiplier)
    return _mamba2_split(module, projected * module.mup_vector)


def _falcon_finish(module: Module, out: Tensor, gate: Tensor) -> Tensor:
    if module.mamba_rms_norm:
        return _mamba2_finish(module, out, gate)
    return module.out_proj(out.flatten(2) * F.silu(gate))


def _gdn_spec(module: Module, activation: torch.dtype) -> LayerSpec:
    return LayerSpec(
        heads=module.num_v_heads,
        key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        decay="scalar",
        erase=True,
        activation=activation,
        conv_channels=module.conv_dim,
        conv_width=module.conv_kernel_size,
    )


def _gdn_project(module: Module, hidden: Tensor) -> Projected:
    raw = module.in_proj_a(hidden), module.in_proj_b(hidden)
    return Projected(module.in_proj_qkv(hidden), module.in_proj_z(hidden), raw)


def _qwen3_next_project(module: Module, hidden: Tensor) -> Projected:
    """Here q, k, v, z and b, a lie interleaved by key head; the module has a method for it."""
    parts = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    )
    q, k, v, z, b, a = (part.flatten(2) for part in parts)
    return Projected(torch.cat([q, k, v], -1), z, (a, b))


def _separate_qkv(module: Module, hidden: Tensor) -> Tensor:
    return torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], -1)


def _olmo_project(module: Module, hidden: Tensor) -> Projected:
    raw = module.a_proj(hidden), module.b_proj(hidden)
    return Projected(_separate_qkv(module, hidden), module.g_proj(hidden), raw)


def _gdn_inputs(module: Module, mixed: Tensor, raw: tuple[Tensor, ...]) -> Raw:
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    shape = (*mixed.shape[:2], module.num_k_heads, module.head_k_dim)
    v = v.view(*mixed.shape[:2], module.num_v_heads, module.head_v_dim)
    beta_scale = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    prologue = Prologue("gdn", module.A_log, module.dt_bias, beta_scale=beta_scale)
    a, b = raw
    return Raw(q.view(shape), k.view(shape), v, a, b, None, prologue)


def _gdn_finish(module: Module, out: Tensor, gate: Tensor) -> Tensor:
    normed = module.norm(out.reshape(-1, out.shape[-1]), gate.reshape(-1, out.shape[-1]))
    return module.out_proj(normed.view(*out.shape[:2], -1))


def _olmo_finish(module: Module, out: Tensor, gate: Tensor) -> Tensor:
    normed = module.o_norm(out.reshape(-1, out.shape[-1]), gate.reshape(-1, out.shape[-1]))
    return module.o_proj(normed.view(*out.shape[:2], -1))


def _kda_spec(module: Module, activation: torch.dtype) -> LayerSpec:
    return LayerSpec(
        heads=module.num_heads,
        key_heads=module.num_heads,
        key_dim=module.head_dim,
        value_dim=module.head_dim,
        decay="channel",
        erase=True,
        activation=activation,
        conv_channels=module.conv_dim,
        conv_width=module.conv_kernel_size,
    )


def _kda_project(module: Module, hidden: Tensor) -> Projected:
    forget = module.forget_gate
    raw = forget.f_b_proj(forget.f_a_proj(hidden)), module.b_proj(hidden)
    return Projected(_separate_qkv(module, hidden), module.g_b_proj(module.g_a_proj(hidden)), raw)


def _kda_inputs(module: Module, mixed: Tensor, raw: tuple[Tensor, ...]) -> Raw:
    """Kimi Linear has the unbounded gate family."""
    shape = (*mixed.shape[:2], module.num_heads, module.head_dim)
    q, k, v = (part.view(shape) for part in mixed.split(module.qkv_dim, -1))
    forget = module.forget_gate
    prologue = Prologue("kda_softplus", forget.A_log.flatten(), forget.dt_bias.flatten())
    return Raw(q, k, v, raw[0].view(shape), raw[1], None, prologue)


def _kda_finish(module: Module, out: Tensor, gate: Tensor) -> Tensor:
    return module.o_proj(module.o_norm(out, gate.view(out.shape)).flatten(2))


MAMBA2 = Adapter(_mamba2_spec, _mamba2_project, _mamba2_inputs, _mamba2_finish, False, True)
GDN = Adapter(_gdn_spec, _gdn_project, _gdn_inputs, _gdn_finish, True, False)
KDA = Adapter(_kda_spec, _kda_project, _kda_inputs, _kda_finish, True, False)

# By class name, so that no modeling file is imported which nobody uses.
ADAPTERS: dict[str, Adapter] = {
    "Mamba2Mixer": MAMBA2,
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": replace(MAMBA2, project=_falcon_project, finish=_falcon_finish),
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "NemotronHMamba2Mixer": MAMBA2,
    "Zamba2MambaMixer": MAMBA2,
    "Qwen3NextGatedDeltaNet": replace(GDN, project=_qwen3_next_project),
    "Qwen3_5GatedDeltaNet": GDN,
    "Qwen3_5MoeGatedDeltaNet": GDN,
    "OlmoHybridGatedDeltaNet": replace(GDN, project=_olmo_project, finish=_olmo_finish),
    "KimiLinearDeltaAttention": KDA,
}
