"""vLLM's Triton decode kernels, from wherever the package is installed, without the rest of it.

Importing the whole package takes its compiled extensions and many dependencies, none of which the
kernels use. So its packages are entered without running their __init__, and the few modules that
the kernels import for logging and platform questions are replaced by small ones.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

OPS = "vllm.model_executor.layers.mamba.ops"
FLA = "vllm.third_party.flash_linear_attention.ops"
KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"


class Platform:
    """What the kernels ask of a platform; `blackwell` makes them take its launch settings."""

    blackwell = False

    def is_cuda(self) -> bool:
        """Yes: without a GPU the kernels are interpreted."""
        return True

    is_cuda_alike = is_cuda

    def is_xpu(self) -> bool:
        """No, as for all other platforms."""
        return False

    is_cpu = is_rocm = is_arch_support_pdl = is_xpu

    def is_device_capability_family(self, family: int, **_: Any) -> bool:
        """Whether the GPU is of a family, 100 being Blackwell."""
        return family == 100 and self.blackwell

    def get_device_name(self, *_: Any) -> str:
        """As the driver says."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"benchmarks/kernels/vllm.py: the platform stub lacks {name}")


class _Quiet:
    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


@lru_cache(maxsize=1)
def installed() -> str | None:
    """The version of the vLLM that can be found, or None."""
    if find_spec("vllm") is None:
        return None
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


@lru_cache(maxsize=1)
def load() -> SimpleNamespace:
    """Kernels by name, and `platform`.

    Raises:
        ImportError: where vLLM is not installed or a kernel is not in it.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ImportError("vllm is not installed: python benchmarks/fetch_peers.py")
    platform = Platform()
    _stub(Path(spec.origin).parent, platform)
    ssu = import_module(f"{OPS}.mamba_ssm")
    replay = import_module(f"{OPS}.selective_state_update_replayssm_output_only")
    gdn, kda = import_module(f"{FLA}.fused_recurrent"), import_module(f"{KDA}.fused_recurrent")
    return SimpleNamespace(
        platform=platform,
        mamba=ssu.selective_state_update,
        mamba_setting=ssu.override_ssm_config,
        mamba_replay=replay.selective_state_update_replayssm_output_only,
        gdn=gdn.fused_recurrent_gated_delta_rule_packed_decode,
        gdn_verify=import_module(
            f"{FLA}.fused_sigmoid_gating"
        ).fused_sigmoid_gating_delta_rule_update,
        kda=kda.fused_recurrent_kda_packed_decode,
        kda_recurrent=kda.fused_recurrent_kda,
    )


def _stub(folder: Path, platform: Platform) -> None:
    import triton
    import triton.language as tl
    import triton.language.extra.libdevice as tldevice

    for name in (OPS, FLA, KDA, "vllm.utils"):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__path__ = [str(folder.joinpath(*parts[1:end]))]
            sys.modules.setdefault(module.__name__, module)
    _module("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None)
    _module("vllm._custom_ops")
    _module("vllm.logger", init_logger=lambda _: _Quiet())
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.triton_utils", triton=triton, tl=tl, tldevice=tldevice, HAS_TRITON=True)
    _module(
        "vllm.utils.platform_utils",
        get_device_name_as_file_name=lambda *_: platform.get_device_name().replace(" ", "_"),
    )
    _module("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0)


def _module(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
