"""The engine against an installed vLLM: what it overrides is there, and batches are divided."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: these look at its classes")

from vllm import __version__
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from lazystate.engines.vllm import gdn, mamba2, models
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import page_of
from lazystate.engines.vllm.plugin import LAYERS, OTHERS, register, replace_layers
from lazystate.engines.vllm.support import VERSIONS, version_of
from serving_model import Layer

VERSION = version_of(__version__)
SHAPES = ((3, 4 * 16 + 2 * 2 * 16), (4, 16, 16))


def test_registering_again_changes_nothing() -> None:
    """vLLM calls plugins more than once in a process, and looks up a model's class more often."""
    register()
    assert VERSION is not None
    layers = VERSION.architectures[0].layers
    replace_layers(VERSION, layers)
    known = dict(op_registry_oot)
    register()
    replace_layers(VERSION, layers)
    assert known == op_registry_oot and set(layers) <= known.keys()


def test_every_layer_has_an_adapter() -> None:
    """In each version; modules of what is not installed here are not imported."""
    for version in VERSIONS:
        for layer in {name for each in version.architectures for name in each.layers}:
            module, _ = OTHERS.get((version.minor, layer), LAYERS[layer])
            assert find_spec(f"lazystate.engines.vllm.{module}")


@pytest.mark.parametrize("name", ["NemotronHForCausalLM", "Qwen3NextForCausalLM"])
def test_an_architecture_has_a_class_that_states_its_page(name: str) -> None:
    """vLLM's own class, with lazystate's page where it is asked for."""
    assert VERSION is not None and VERSION.architecture(name)
    made = getattr(models, name)
    assert "get_mamba_state_shape_from_config" in vars(made)
    assert made.__name__ == made.__mro__[1].__name__ == name


@pytest.mark.parametrize("layer", [mamba2.ReplayMixer2, gdn.ReplayDeltaNet])
def test_what_a_layer_overrides_is_in_vllm(layer: type) -> None:
    """A method that vLLM has renamed would never be called."""
    stock = layer.__mro__[2]
    own = {name for name, x in vars(layer).items() if callable(x) and name != "backend"}
    called_by_vllm = own - {"_decode", "_gates"}
    assert called_by_vllm
    assert all(hasattr(stock, name) for name in called_by_vllm)


def common_of(computed: list[int], new: list[int], prompt: list[bool]) -> CommonAttentionMetadata:
    """Requests with tokens computed before and new ones, those that decode first."""
    lengths = torch.tensor(computed) + torch.tensor(new)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths.int(),
        num_reqs=len(new),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(1, len(new) + 1).int().unsqueeze(1),
        slot_mapping=torch.arange(sum(new)),
        is_prefilling=torch.tensor(prompt),
        seq_lens_cpu_upper_bound=lengths.int(),
    )


def builder_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> gdn.ReplayBuilder:
    """A builder of a layer with 8 blocks on the CPU; vLLM's part of it does not need an engine."""
    page = page_of("gdn", SHAPES, (torch.float32,) * 2, torch.float32, Options(**options))
    layer = Layer(page, 8, "cpu")

    def stock(self: Any, spec: Any, names: Any, config: Any, device: Any) -> None:
        self.kv_cache_spec, self.vllm_config, self.decode_cudagraph_max_bs = spec, config, 4
        self.use_spec_decode = self.use_full_cuda_graph = self.plan_flashinfer_checkpoints = False
        self.gdn_prefill_backend = "triton"
        self.checkpoint_builder = SimpleNamespace(build=lambda *_: None)

    monkeypatch.setattr(GDNAttentionMetadataBuilder, "__init__", stock)
    for module in ("vllm.utils.torch_utils", "vllm.v1.attention.backends.utils"):
        monkeypatch.setattr(f"{module}.PIN_MEMORY", False)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
    )
    spec = MambaSpec(block_size=64, shapes=SHAPES, dtypes=(torch.float32,) * 2)
    return gdn.ReplayBuilder(spec, ["a"], config, torch.device("cpu"))


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> gdn.ReplayBuilder:
    """Of exact replay."""
    return builder_of(monkeypatch)


def test_prefill_of_narrow_checkpoints_is_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's part numbers them from 1; which pages they are of is beside it."""
    narrow = builder_of(monkeypatch, checkpoint="fp8")
    made = narrow.build(0, common_of([9, 4, 0], [1, 3, 2], [False, True, True]))
    assert made.prefill.prefill_state_indices.tolist() == [1, 2]
    assert made.filled is not None and made.filled.meta[:, 0].tolist() == [2, 3]
    assert made.decoding is not None and made.decoding.meta[:, 0].tolist() == [1]


def test_prefill_is_vllms_of_the_rows_behind_those_that_decode(builder: gdn.ReplayBuilder) -> None:
    """Two rows decode, one goes on with its prompt and one begins."""
    made = builder.build(0, common_of([9, 5, 4, 0], [1, 1, 3, 2], [False, False, True, True]))
    assert made.decoding is not None and made.decoding.meta[:, 0].tolist() == [1, 2]
    assert made.settling is not None and made.settling.meta[:, 0].tolist() == [3, 4]
    assert made.short is not None and made.short.tokens == slice(0, 2)
    assert made.long is not None and made.long.tokens == slice(2, None)
    assert made.prefill is not None and made.prefill.num_decodes == 0
    assert made.prefill.num_actual_tokens == made.prefill.num_prefill_tokens == 5
    assert made.prefill.prefill_state_indices.tolist() == [3, 4]
    assert made.prefill.prefill_query_start_loc.tolist() == [0, 3, 5]
    assert made.prefill.has_initial_state.tolist() == [True, False]


def test_records_are_counted_from_prefill_on(builder: gdn.ReplayBuilder) -> None:
    """Decoding appends, and a prompt that goes on finds the ring to be settled."""
    begun = builder.build(0, common_of([0], [4], [True]))
    assert begun.settling is None
    for step in range(3):
        made = builder.build(0, common_of([4 + step], [1], [False]))
        assert made.prefill is None and made.decoding is not None
        assert made.decoding.meta[0, 1] == step
    again = builder.build(0, common_of([7], [2], [True]))
    assert again.settling is not None
    assert again.settling.meta[0, [1, 4]].tolist() == [3, 1]
