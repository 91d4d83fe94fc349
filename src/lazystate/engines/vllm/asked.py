"""What a vLLM configuration asks of lazystate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import Page, page_of
from lazystate.engines.vllm.sketches import Sketches
from lazystate.engines.vllm.support import Setup, refusals, version_of


def setup_of(vllm_config: Any) -> Setup:
    """What of an engine's configuration decides whether lazystate can run in it."""
    from vllm import __version__
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    cache, drafts = vllm_config.cache_config, vllm_config.speculative_config
    moved, additional = vllm_config.kv_transfer_config, vllm_config.additional_config
    return Setup(
        version=__version__,
        architectures=tuple(vllm_config.model_config.architectures),
        draft_tokens=0 if drafts is None else drafts.num_speculative_tokens,
        prefix_caching=bool(cache.enable_prefix_caching),
        cache_mode=cache.mamba_cache_mode,
        second_runner=vllm_config.use_v2_model_runner,
        kv_connector="" if moved is None else str(moved.kv_connector),
        stock_replay=getattr(cache, "use_replayssm", False),
        specialized=additional.get("decode_backend") == "latency_specialized",
        conv_dim_first=is_conv_state_dim_first(),
    )


def page_asked(
    vllm_config: Any, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> Page | None:
    """The page of a recurrent layer; None where lazystate is not asked for.

    Args:
        shapes, dtypes: of what vLLM's own layer keeps.

    Raises:
        ValueError: for what lazystate cannot do, with the reasons.
    """
    options = Options.of(vllm_config.additional_config)
    if options is None:
        return None
    setup = setup_of(vllm_config)
    if reasons := refusals(setup, options):
        raise ValueError("lazystate: " + "; ".join(reasons))
    version = version_of(setup.version)
    assert version is not None
    (kind,) = {each.kind for name in setup.architectures if (each := version.architecture(name))}
    (inputs, channels), state = shapes
    if kind == "kda" and version.minor == "0.26":  # whose layer has no room for drafts
        inputs += setup.draft_tokens
    shapes = ((inputs, channels), state)
    tokens = 1 + setup.draft_tokens
    devices = vllm_config.parallel_config.tensor_parallel_size
    return page_of(kind, shapes, dtypes, vllm_config.model_config.dtype, options, devices, tokens)


def layer_page(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], number: int
) -> Page | None:
    """`page_asked` for the layer of that number, while vLLM constructs it.

    Raises:
        ValueError: as `page_asked`, or for a layer that the calibration of a sketch lacks.
    """
    from vllm.config import get_current_vllm_config

    page = page_asked(get_current_vllm_config(), shapes, dtypes)
    if page is not None and isinstance(page.storage.view, Sketches):
        page.storage.view.row(number)
    return page


def device_of() -> int:
    """Which of the devices that share a layer's heads this process has."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def step_metadata() -> Any:
    """vLLM's metadata of the step that runs, by layer; None where there is none."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata
