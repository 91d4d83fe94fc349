"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazystate.engines.vllm.support import Version

# By the class of vLLM's that it takes the place of: module and name.
LAYERS = {
    "MambaMixer2": ("mamba2", "ReplayMixer2"),
    "QwenGatedDeltaNetAttention": ("gdn", "ReplayDeltaNet"),
    "KimiGatedDeltaNetAttention": ("kimi", "ReplayKimiDelta"),
    "KimiK3DeltaAttention": ("kimi_k3", "ReplayKimiK3Delta"),
    "Glm5NextLinearAttention": ("glm", "ReplayGlmDelta"),
    "BailingMoeV3KimiDeltaAttention": ("bailing", "ReplayBailingDelta"),
}
# Where a class of that name is another one in a version.
OTHERS = {("0.26", "KimiGatedDeltaNetAttention"): ("kda", "ReplayKimiDelta")}


def register() -> None:
    """Put lazystate's model classes in the place of vLLM's, and with them, on their first use, its
    layers: modules of other models are not imported.

    Where `additional_config` does not ask for lazystate, they do what vLLM's do. A version of vLLM
    that is not supported is left alone.
    """
    from vllm import ModelRegistry, __version__

    from lazystate.engines.vllm.support import version_of

    version = version_of(__version__)
    if version is None:
        logging.getLogger(__name__).warning("lazystate does not support vLLM %s", __version__)
        return
    for each in version.architectures:
        ModelRegistry.register_model(each.name, f"lazystate.engines.vllm.models:{each.name}")


def replace_layers(version: Version, names: Iterable[str]) -> None:
    """Have vLLM make lazystate's layers where it is asked for its own classes of these names."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    for layer in names:
        if layer not in op_registry_oot:
            module, name = OTHERS.get((version.minor, layer), LAYERS[layer])
            ours = getattr(import_module(f"lazystate.engines.vllm.{module}"), name)
            PluggableLayer.register_oot(ours, name=layer)
