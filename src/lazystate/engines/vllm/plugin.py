"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import logging
from importlib import import_module

# By the class of vLLM's that it takes the place of: module and name. Imported where supported.
LAYERS = {
    "MambaMixer2": ("mamba2", "ReplayMixer2"),
    "QwenGatedDeltaNetAttention": ("gdn", "ReplayDeltaNet"),
    "KimiGatedDeltaNetAttention": ("kda", "ReplayKimiDelta"),
}


def register() -> None:
    """Put lazystate's layers and model classes in the place of vLLM's.

    Where `additional_config` does not ask for lazystate, they do what vLLM's do. A version of vLLM
    that is not supported is left alone.
    """
    from vllm import ModelRegistry, __version__
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from lazystate.engines.vllm.support import version_of

    version = version_of(__version__)
    if version is None:
        logging.getLogger(__name__).warning("lazystate does not support vLLM %s", __version__)
        return
    if "MambaMixer2" in op_registry_oot:  # called before in this process
        return
    for layer in dict.fromkeys(each.layer for each in version.architectures):
        module, name = LAYERS[layer]
        ours = getattr(import_module(f"lazystate.engines.vllm.{module}"), name)
        PluggableLayer.register_oot(ours, name=layer)
    for each in version.architectures:
        ModelRegistry.register_model(each.name, f"lazystate.engines.vllm.models:{each.name}")
