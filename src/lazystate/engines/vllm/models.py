"""Classes of models that state lazystate's pages: subclasses of vLLM's, made on first use.

vLLM sizes pages by asking a model's class, before there are layers. A model's class is looked up
before its layers are made, so that they are replaced then.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm import __version__
from vllm.model_executor.models.registry import _VLLM_MODELS

from lazystate.engines.vllm.asked import page_asked
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
