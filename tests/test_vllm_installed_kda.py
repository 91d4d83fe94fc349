"""Kimi Delta Attention of 0.33 against an installed vLLM: layers by model, and steps of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: these look at its classes")

from vllm import __version__
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.kv_cache_interface import MambaSpec

from lazystate import StateCache, gates
from lazystate.engines.vllm import models
from lazystate.engines.vllm.batch import divide, spans_of
from lazystate.engines.vllm.builder import Decided
from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import page_of
from lazystate.engines.vllm.support import version_of
from samples import slots
from serving_model import bound
from test_vllm_installed import common_of
from tolerance import error
from tolerance import outputs as output_bound

VERSION = version_of(__version__)
if VERSION is None or VERSION.minor != "0.33":
    pytest.skip("these are of vLLM 0.33", allow_module_level=True)

HEADS, K, WIDTH, BLOCKS = 2, 16, 4, 4
ADAPTERS = [
    ("kimi", "ReplayKimiDelta", None),
    ("kimi", "ReplayKimiDelta", -5.0),
    ("kimi_k3", "ReplayKimiK3Delta", -5.0),
    ("glm", "ReplayGlmDelta", -5.0),
    ("bailing", "ReplayBailingDelta", -5.0),
]


def adapter(module: str, name: str) -> Any:
    """A layer's class; those whose stock module cannot be imported here are skipped."""
    try:
        return getattr(import_module(f"lazystate.engines.vllm.{module}"), name)
    except ImportError as error:
        pytest.skip(f"vLLM's module of {name} needs what is not installed: {error}")


def stock_of(made: Any) -> Any:
    """vLLM's class that a layer takes the place of."""
    return next(each for each in made.__mro__ if each.__module__.startswith("vllm."))


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("KimiLinearForCausalLM", {"KimiGatedDeltaNetAttention", "KimiK3DeltaAttention"}),
        ("Glm5NextForCausalLM", {"Glm5NextLinearAttention"}),
        ("BailingMoeV3ForCausalLM", {"BailingMoeV3KimiDeltaAttention"}),
    ],
)
def test_a_model_brings_its_layers(model: str, layers: set[str]) -> None:
    """Its class, once looked up, states the page, and vLLM makes lazystate's layers for it."""
    try:
        made = getattr(models, model)
    except ImportError as error:
        pytest.skip(f"vLLM's {model} needs what is not installed: {error}")
    assert "get_mamba_state_shape_from_config" in vars(made)
    assert layers <= op_registry_oot.keys()


@pytest.mark.parametrize(("module", "name", "_"), ADAPTERS[1:])
def test_a_layer_overrides_what_vllm_calls_by_name(module: str, name: str, _: float) -> None:
    """vLLM gives `_forward` its arguments by keyword."""
    made = adapter(module, name)
    ours, theirs = (inspect.signature(each._forward).parameters for each in (made, stock_of(made)))
    assert list(ours) == list(theirs)


def layer_of(made: Any, lower_bound: float | None, **options: Any) -> Any:
    """A layer with random weights and pages of noise, not constructed by vLLM."""
    shapes = ((WIDTH - 1, 3 * HEADS * K), (HEADS, K, K))
    layer = made.__new__(made)
    torch.nn.Module.__init__(layer)
    given = Options(window=4, **options)
    layer.page = page_of("kda", shapes, (torch.float32,) * 2, torch.float32, given)
    layer.kv_cache, layer.prefix = bound(layer.page, BLOCKS, "cpu"), "model.layers.2.self_attn"
    weight = torch.randn(3 * HEADS * K, 1, WIDTH) / 2
    layer.conv1d = SimpleNamespace(weight=weight, bias=None)
    for x, part in zip("qkv", weight.chunk(3), strict=True):
        setattr(layer, f"{x}_conv1d", SimpleNamespace(weight=part, bias=None))
    layer.A_log, layer.dt_bias = torch.randn(HEADS), torch.randn(HEADS * K)
    layer.gate_lower_bound = layer.kda_lower_bound = lower_bound
    layer.o_norm = lambda x, gate: x * torch.sigmoid(gate)
    return layer


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The metadata of the step that runs, by layer."""
    metadata: dict[str, Any] = {}
    found = SimpleNamespace(attn_metadata=metadata)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: found)
    monkeypatch.setattr("lazystate.engines.vllm.paged.device_of", lambda: 0)
    return metadata


def decided(group: Group, computed: list[int], new: list[int]) -> Decided:
    """What a builder decides of a batch, vLLM's part of it a word."""
    common = common_of(computed, new, [count > 1 for count in new])
    short, long = divide(common.query_start_loc_cpu, 1, torch.device("cpu"))
    blocks = common.block_table_tensor[:, 0]
    made = Decided(short=short, long=long, prefill="prefill")
    if long is not None:
        made.filled = made.settling = group.prefill(spans_of(long, common, blocks))
    if short is not None:
        made.decoding = group.decode(spans_of(short, common, blocks), 1)
    return made


def inputs_of(layer: Any, tokens: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Arguments of `_forward` by name, and qkv, gate, beta and what is given to the norm."""
    mixed, gate = torch.randn(tokens, 3 * HEADS * K), torch.randn(1, tokens, HEADS, K)
    beta, norm = torch.randn(1, tokens, HEADS), torch.randn(tokens, HEADS, K)
    out = torch.full((1, tokens, HEADS, K), float("nan"))
    if "Bailing" in type(layer).__name__:  # its gates are outside, too
        q, k, v = mixed.chunk(3, -1)
        names = {"q_proj_states": q, "k_proj_states": k, "v_proj_states": v}
        done = prologue_of(layer).prepare(*torch.zeros(3, 1, tokens, HEADS, K), gate, beta)
        names |= {"g1": done.log_decay, "beta": torch.sigmoid(beta), "core_attn_out": out}
        return names, [mixed, gate, beta, torch.full_like(norm, float("inf"))]
    if hasattr(type(layer), "_flashkda_prefill"):  # GLM's: its norm is outside
        names = {"qkv_proj_states": mixed, "g1": gate, "beta": beta, "core_attn_out": out}
        return names, [mixed, gate, beta, torch.full_like(norm, float("inf"))]
    names = {"mixed_qkv": mixed, "g1": gate, "g2": norm, "beta": beta, "core_attn_out": out}
    return names, [mixed, gate, beta, norm]


def prologue_of(layer: Any) -> gates.Prologue:
    """The gates of a layer, as the project has them."""
    if layer.gate_lower_bound is None:
        return gates.Prologue("kda_softplus", layer.A_log, layer.dt_bias)
    bounded = {"lower_bound": layer.gate_lower_bound}
    return gates.Prologue("kda_bounded", layer.A_log, layer.dt_bias, **bounded)


def reference(layer: Any, states: Tensor, history: Tensor) -> Callable[..., Tensor]:
    """The layer's decoding by convolution and cache, of rows that begin so."""
    cache = StateCache(layer.page.spec, 2, window=4, backend="torch")
    cache.load(slots(0, 1), [states])
    prologue = prologue_of(layer)
    inputs = list(history.unbind(1))  # [rows, C] a token

    def decode(mixed: Tensor, gate: Tensor, beta: Tensor, norm: Tensor) -> Tensor:
        inputs.append(mixed)
        seen = torch.stack(inputs[-WIDTH:], -1)
        x = F.silu((seen * layer.conv1d.weight[:, 0]).sum(-1)).unflatten(-1, (3, 1, HEADS, K))
        ticket = cache.begin(slots(0, 1))
        rows = (*x.unbind(1), gate[0].unsqueeze(1), beta[0].unsqueeze(1))
        out = cache.step(ticket, 0, *rows, prologue=prologue)
        cache.commit(ticket)
        return (out[:, 0] * torch.sigmoid(norm)).unsqueeze(0)

    return decode


@pytest.mark.parametrize(("module", "name", "lower_bound"), ADAPTERS)
def test_a_layer_decodes_as_a_cache_and_leaves_prefill_to_vllm(
    module: str,
    name: str,
    lower_bound: float | None,
    context: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefill of vLLM's, steps over a window, and a prompt that goes on beside a row's step."""
    made = adapter(module, name)
    layer = layer_of(made, lower_bound)
    group = Group([layer], 4, torch.device("cpu"))
    states, history = torch.randn(2, HEADS, K, K), torch.randn(2, WIDTH - 1, 3 * HEADS * K)
    seen: list[Any] = []

    def stock(self: Any, *given: Tensor, **_: Any) -> None:
        conv, state = self.kv_cache
        at = [1, 2] if not seen else [2]
        seen.append(context[layer.prefix])
        conv[at], state[at] = history[: len(at)], states[: len(at)]
        given[-1].fill_(7.0)

    monkeypatch.setattr(stock_of(made), "_forward", stock)
    context[layer.prefix] = decided(group, [0, 0], [5, 3])
    names, _ = inputs_of(layer, 8)
    layer._forward(**names)
    assert seen == ["prefill"] and bool((names["core_attn_out"] == 7).all())
    decode = reference(layer, states, history)
    bound_of_steps = output_bound(layer.page.spec, 4, torch.float32, 2)
    for number in range(6):
        context[layer.prefix] = decided(group, [5 + number, 3 + number], [1, 1])
        names, given = inputs_of(layer, 2)
        layer._forward(**names)
        assert error(names["core_attn_out"], decode(*given)) <= bound_of_steps
    context[layer.prefix] = decided(group, [11, 9], [1, 2])
    names, (mixed, gate, beta, norm) = inputs_of(layer, 3)
    layer._forward(**names)
    want = decode(mixed[:2], gate[:, :2], beta[:, :2], norm[:2])
    assert len(seen) == 2 and isinstance(context[layer.prefix], Decided)
    assert error(names["core_attn_out"][:, :1], want[:, :1]) <= bound_of_steps
    assert bool((names["core_attn_out"][:, 1:] == 7).all())


def test_prefill_of_a_narrow_checkpoint_is_of_wide_copies(
    context: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's layer sees dense states numbered from 1; pages have them in the format's bytes."""
    made = adapter("kimi", "ReplayKimiDelta")
    layer = layer_of(made, None, checkpoint="fp8", rounding="nearest")
    group = Group([layer], 4, torch.device("cpu"))
    states = torch.randn(2, HEADS, K, K)

    def stock(self: Any, *given: Tensor, **_: Any) -> None:
        conv, state = self.kv_cache
        assert conv.shape[0] == 3 and state.dtype == torch.float32
        conv[1:], state[1:] = 5.0, states

    monkeypatch.setattr(stock_of(made), "_forward", stock)
    context[layer.prefix] = decided(group, [0, 0], [5, 3])
    layer._forward(**inputs_of(layer, 8)[0])
    pool = layer.pool()
    for name, part in pool.states.form.encode(states).items():
        assert torch.equal(pool.states.parts[name][[1, 2]], part)
    assert bool((layer.parts()["conv"][[1, 2]] == 5).all())
    assert len(layer.kv_cache) == len(layer.page.shapes)


def test_kimi_k3s_builder_divides_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that decode are decided; vLLM's own metadata is of the prompts behind them."""
    from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadata
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    from lazystate.engines.vllm import kimi_k3

    layer = layer_of(kimi_k3.ReplayKimiK3Delta, -5.0)

    def stock(self: Any, spec: Any, names: Any, config: Any, device: Any) -> None:
        self.kv_cache_spec, self.vllm_config, self.decode_cudagraph_max_bs = spec, config, 4
        self.use_spec_decode = self.use_full_cuda_graph = False
        self.num_spec, self.checkpoint_builder = 0, SimpleNamespace(build=lambda *_: None)

    monkeypatch.setattr(GDNAttentionMetadataBuilder, "__init__", stock)
    for module in ("vllm.utils.torch_utils", "vllm.v1.attention.backends.utils"):
        monkeypatch.setattr(f"{module}.PIN_MEMORY", False)
    config = SimpleNamespace(
        additional_config={},
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(mamba_cache_mode="none", use_kda_recoverssm=False),
    )
    spec = MambaSpec(block_size=64, shapes=layer.page.shapes, dtypes=layer.page.dtypes)
    builder = kimi_k3.ReplayBuilder(spec, ["a"], config, torch.device("cpu"))
    made = builder.build(0, common_of([9, 5, 0], [1, 3, 2], [False, True, True]))
    assert isinstance(made, KimiK3KDAMetadata) and type(made.prefill) is KimiK3KDAMetadata
    assert made.short is not None and made.decoding is not None
    assert made.decoding.meta[:, 0].tolist() == [1]
    assert made.prefill.num_prefills == 2 and made.prefill.num_actual_tokens == 5
    assert made.prefill.non_spec_state_indices_tensor.tolist() == [2, 3]
    assert kimi_k3.ReplayBackend.get_builder_cls() is kimi_k3.ReplayBuilder
