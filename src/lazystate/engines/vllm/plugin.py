"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import logging


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
    from lazystate.engines.vllm.gdn import ReplayDeltaNet
    from lazystate.engines.vllm.mamba2 import ReplayMixer2

    PluggableLayer.register_oot(ReplayMixer2, name="MambaMixer2")
    PluggableLayer.register_oot(ReplayDeltaNet, name="QwenGatedDeltaNetAttention")
    for each in version.architectures:
        ModelRegistry.register_model(each.name, f"lazystate.engines.vllm.models:{each.name}")
