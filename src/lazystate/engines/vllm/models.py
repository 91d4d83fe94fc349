"""Classes of models that state lazystate's pages: subclasses of vLLM's, made on first use.

vLLM sizes pages by asking a model's class, before there are layers. A model's class is looked up
before its layers are made, so that they are replaced then.
"""

from __future__ import annotations

from functools import cache, wraps
from importlib import import_module
from typing import Any

from vllm import __version__
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.registry import _VLLM_MODELS

from lazystate.engines.vllm.asked import page_asked
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.plugin import replace_layers
from lazystate.engines.vllm.support import version_of


def __getattr__(name: str) -> type:
    if name not in _VLLM_MODELS:
        raise AttributeError(name)
    version = version_of(__version__)
    known = None if version is None else version.architecture(name)
    if version is not None and known is not None:
        replace_layers(version, known.layers)
    module, stock_name = _VLLM_MODELS[name][:2]
    path = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    made = _paged(getattr(import_module(path), stock_name))
    globals()[name] = made
    return made


def _paged(stock: Any) -> type:
    class Paged(stock):
        @wraps(stock.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            vllm_config = get_current_vllm_config()
            if Options.of(vllm_config.additional_config) is not None:
                _copied_whole(self, vllm_config)

        @classmethod
        def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Any:
            shapes = super().get_mamba_state_shape_from_config(vllm_config)
            dtypes = super().get_mamba_state_dtype_from_config(vllm_config)
            page = page_asked(vllm_config, shapes, dtypes)
            return shapes if page is None else page.shapes

        @classmethod
        def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> Any:
            shapes = super().get_mamba_state_shape_from_config(vllm_config)
            dtypes = super().get_mamba_state_dtype_from_config(vllm_config)
            page = page_asked(vllm_config, shapes, dtypes)
            return dtypes if page is None else page.dtypes

    Paged.__name__ = stock.__name__
    Paged.__qualname__ = stock.__qualname__
    return Paged


def _copied_whole(model: Any, vllm_config: Any) -> None:
    """Have vLLM copy all parts of a page as they are, and leave drafts to the pages.

    It asks the model itself, not its class: without lazystate these stay vLLM's. It asks the
    outermost one: what is inside of a multimodal model cannot read its configuration.
    """
    stock = getattr(model, "get_model_state_cls", None)

    @cache  # vLLM's first runner asks in every step
    def funcs() -> tuple[Any, ...]:
        parts = model.get_mamba_state_shape_from_config(vllm_config)
        return (get_temporal_copy_spec,) * len(parts)

    def state() -> type:
        from lazystate.engines.vllm.model_state import replaying  # imports the runner

        return replaying(None if stock is None else stock())

    model.get_mamba_state_copy_func = funcs
    model.get_mamba_state_copy_funcs = lambda types: dict.fromkeys(types, funcs())
    model.get_model_state_cls = state
