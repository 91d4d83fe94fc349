"""Looking into the recurrent layers of a model while it reads whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazystate.engines.transformers.adapters import ADAPTERS, Adapter
from lazystate.sketch.calibration_file import gates_fingerprint
from lazystate.sketch.windows import Run, run
from lazystate.spec import LayerSpec

# Called with a layer's place among the recurrent ones and its run; may return another output.
Observer = Callable[[int, Run], Tensor | None]


@dataclass(frozen=True)
class Observed:
    """One recurrent module whose forward is replaced while it is looked into."""

    module: Any
    adapter: Adapter
    index: int
    window: int
    first: int
    observer: Observer

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """The module's forward over whole texts, in PyTorch, window by window.

        Raises:
            ValueError: for a cache, or a batch with padding.
        """
        if cache is not None or cache_params is not None:
            raise ValueError("an observed model reads whole texts: call it with use_cache=False")
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise ValueError("texts must be of one length, without padding")
        module, adapter = self.module, self.adapter
        projected = adapter.project(module, hidden_states)
        conv, past = module.conv1d, module.conv_kernel_size - 1
        x = F.pad(projected.conv.mT, (past, 0))
        mixed = F.silu(F.conv1d(x, conv.weight, conv.bias, groups=x.shape[1])).mT
        inputs = adapter.inputs(module, mixed, projected.raw).prepared()
        spec = adapter.spec(module, inputs.v.dtype)
        found = run(spec, inputs, self.window, first=self.first)
        other = self.observer(self.index, found)
        return adapter.finish(module, found.out if other is None else other, projected.gate)


def recurrent_modules(model: nn.Module) -> list[Any]:
    """The supported recurrent modules, in layer order.

    Raises:
        ValueError: if there are none, or the model is patched.
    """
    found: list[Any] = [m for m in model.modules() if type(m).__name__ in ADAPTERS]
    if not found:
        raise ValueError(f"model must have a supported recurrent layer, got {type(model).__name__}")
    if any("forward" in vars(module) for module in found):
        raise ValueError("model must not be patched: call unpatch first")
    return sorted(found, key=lambda module: module.layer_idx)


def layer_spec(model: nn.Module, activation: torch.dtype = torch.float32) -> LayerSpec:
    """The recurrence that all recurrent layers of a model share.

    Raises:
        ValueError: if they differ, or there are none.
    """
    modules = recurrent_modules(model)
    specs = {ADAPTERS[type(m).__name__].spec(m, activation) for m in modules}
    if len(specs) > 1:
        raise ValueError(f"model must have recurrent layers of one shape, got {len(specs)}")
    return specs.pop()


def fingerprint(model: nn.Module) -> str:
    """`gates_fingerprint` of a model."""
    return gates_fingerprint(x for name, x in model.named_parameters() if name.endswith("A_log"))


@contextmanager
def observed(
    model: nn.Module, observer: Observer, *, window: int, first: int = 0
) -> Iterator[None]:
    """A `with` block in which calls without a cache show every recurrent layer's run.

    Args:
        model: not patched; call it with `use_cache=False` and texts of one length.
        window, first: as of `lazystate.sketch.windows.run`.
    """
    modules = recurrent_modules(model)
    try:
        for index, module in enumerate(modules):
            adapter = ADAPTERS[type(module).__name__]
            look = Observed(module, adapter, index, window, first, observer)
            module.forward = look.forward
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)
