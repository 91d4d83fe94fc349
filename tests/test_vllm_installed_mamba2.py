"""Mamba-2's metadata against an installed vLLM: which rows decode, which are settled before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: these look at its builder")

from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from lazystate.engines.vllm.mamba2 import ReplayBuilder
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import page_of
from serving_model import Layer
from test_vllm_installed import SHAPES, common_of

WINDOW = 4


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ReplayBuilder:
    """A builder of a layer with 8 blocks on the CPU; vLLM's part of it does not need an engine."""
    page = page_of("mamba2", SHAPES, (torch.float32,) * 2, torch.float32, Options(window=WINDOW))
    layer = Layer(page, 8, "cpu")

    def stock(self: Any, spec: Any, names: Any, config: Any, device: Any) -> None:
        self.kv_cache_spec, self.vllm_config, self.decode_cudagraph_max_bs = spec, config, 4
        self.compilation_config = config.compilation_config
        self.device, self.chunk_size = device, 64
        self.num_spec_tokens, self.reorder_batch_threshold = 0, 1
        self.use_spec_decode = self.use_replayssm = self.use_flashinfer_replayssm = False
        self.needs_causal_conv1d_metadata = True
        self.decode_bc_pre_scratch = None
        self.plan_flashinfer_checkpoints = False
        self.checkpoint_builder = SimpleNamespace(build=lambda *_, **__: None)
        self.state_indices_tensor_d = torch.zeros(4, 1, dtype=torch.int32)

    monkeypatch.setattr(Mamba2AttentionMetadataBuilder, "__init__", stock)
    for module in ("vllm.utils.torch_utils", "vllm.v1.attention.backends.utils"):
        monkeypatch.setattr(f"{module}.PIN_MEMORY", False)
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"a": layer}, cudagraph_mode=mode
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
    )
    spec = MambaSpec(block_size=64, shapes=SHAPES, dtypes=(torch.float32,) * 2)
    return ReplayBuilder(spec, ["a"], config, torch.device("cpu"))


def test_a_mixed_batch_decodes_its_first_rows_and_settles_the_others(
    builder: ReplayBuilder,
) -> None:
    """A row decodes, a prompt's last token does as well, one prompt goes on and one begins."""
    made = builder.build(0, common_of([9, 5, 4, 0], [1, 1, 3, 2], [False, True, True, True]))
    assert made.prefill is not None
    assert (made.prefill.num_decodes, made.prefill.num_prefills) == (0, 2)
    assert made.decoding is not None and made.decoding.meta[:, 0].tolist() == [1, 2]
    assert made.settling is not None and made.settling.meta[:, 0].tolist() == [3, 4]


def test_a_window_of_steps_fills_and_folds_and_prefill_empties_it(builder: ReplayBuilder) -> None:
    """Rows are read at one address in every step, as a graph does; records count up to a fold."""
    builder.build(0, common_of([0], [3], [True]))
    addresses = set()
    for step in range(2 * WINDOW):
        made = builder.build(0, common_of([3 + step], [1], [False]))
        assert made.decoding is not None and made.settling is None
        addresses.add(made.decoding.meta.data_ptr())
        due = step == WINDOW
        held = step if step <= WINDOW else step - WINDOW
        assert made.decoding.meta[0, [1, 4]].tolist() == [held, int(due)]
    assert len(addresses) == 1
    again = builder.build(0, common_of([3 + 2 * WINDOW], [2], [True]))
    assert again.settling is not None
    assert again.settling.meta[0, [1, 4]].tolist() == [WINDOW, 1]
    made = builder.build(0, common_of([5 + 2 * WINDOW], [1], [False]))
    assert made.decoding is not None and made.decoding.meta[0, 1] == 0
