"""Which operators the stock classes run, in training and in the measurements.

The saved weights do not depend on this choice: `recurrence.py` computes the same as the stock
classes, only faster. `use_reference` runs the stock PyTorch operators themselves.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

import recurrence

MODULES: tuple[ModuleType, ...] = (modeling_kimi_linear, modeling_nemotron_h, modeling_qwen3_5)
PARTS = ("ForgetGate", "MLP", "RMSNorm", "RMSNormGated")  # ends of class names
Tensor = torch.Tensor


def use_reference() -> None:
    """Undo the classes' own choice of fused operators: they do not run without a GPU."""
    for module in MODULES:
        for name, value in list(vars(module).items()):
            original = getattr(value, "__wrapped__", None)
            is_own = getattr(original, "__module__", "") == module.__name__
            if is_own and not isinstance(value, type):
                setattr(module, name, original)


def shifted_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **_: object
) -> Tensor:
    """Depthwise causal convolution as a sum of shifted products; the activation is SiLU."""
    if activation != "silu":
        raise ValueError(f"activation {activation!r} is not supported")
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    out = padded[..., :length] * weight[:, :1]
    for tap in range(1, width):
        out = out + padded[..., tap : tap + length] * weight[:, tap : tap + 1]
    if bias is not None:
        out = out + bias[:, None]
    return F.silu(out).to(hidden_states.dtype)


def no_mask(*_: object, **__: object) -> None:
    """No mask: attention is causal without one, and rows are never padded on the left.

    The stock function looks at values on the device, which a recorded step cannot.
    """


def use_chunked(compiled: bool) -> None:
    """Run the recurrences in the chunked form; optionally compile them and the small parts."""
    use_reference()
    stock_scan = modeling_nemotron_h.mamba2_chunk_scan

    def compile_(function: object) -> object:
        return torch.compile(function, dynamic=False) if compiled else function

    fast_scan, conv = compile_(recurrence.mamba2_scan), compile_(shifted_conv)

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: object) -> Tensor:
        """The Mamba-2 scan, kept out of autocast; the stock one where a row has a part chunk."""
        with torch.autocast(x.device.type, enabled=False):
            if x.shape[1] % recurrence.SCAN_CHUNK:
                return stock_scan(x, dt, A, B, C, **options).to(x.dtype)
            bias, floor = options["dt_bias"], options["dt_limit"][0]
            return fast_scan(x, dt, A, B, C, options["D"], bias, floor).to(x.dtype)

    recurrence.PIECES["prepare"] = compile_(recurrence.prepare)
    recurrence.PIECES["finish"] = compile_(recurrence.finish)
    modeling_nemotron_h.mamba2_chunk_scan = scan
    modeling_qwen3_5.torch_chunk_gated_delta_rule = recurrence.delta_rule
    modeling_kimi_linear.chunk_kimi_delta_attention = recurrence.delta_rule
    for module in MODULES:
        module.causal_conv1d_fn = conv
        module.create_causal_mask = no_mask
        for name, value in list(vars(module).items()):
            own = getattr(value, "__module__", "") == module.__name__
            if compiled and own and isinstance(value, type) and name.endswith(PARTS):
                value.forward = torch.compile(value.forward, dynamic=False)
