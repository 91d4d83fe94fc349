"""patch, unpatch, patched: replay in a transformers model, and out of it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from lazystate import checks
from lazystate.engines.transformers.adapters import ADAPTERS
from lazystate.engines.transformers.mixer import Mixer, Patch
from lazystate.formats import Rounding
from lazystate.ops import BackendName, Fold, Views
from lazystate.ops import backend as find_backend

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    window: int = 16,
    max_tokens: int = 8,
    checkpoint: str | torch.dtype = torch.float32,
    view: str | torch.dtype | Views | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    fold: Fold = "raw",
    backend: BackendName = "auto",
) -> Model:
    """Let a model decode without rewriting its recurrent state for every token.

    `generate` and `forward` are called as before, with or without a cache; a cache passed in must
    be a `DynamicCache` or `StaticCache` of the model's config. Assisted generation and prompt
    lookup work too. The stock forwards still run for prefill, for more than `max_tokens` new tokens
    at once, without a cache and where gradients are wanted (so call `forward` under
    `torch.no_grad()`).

    Args:
        model: loaded, with at least one supported recurrent layer; it is changed in place.
        window: L, tokens between two folds of a state.
        max_tokens: most tokens of one step, the longest draft plus 1; up to `window`. Longer drafts
            work, but cost a pass over the state.
        checkpoint: format of the states. view: format of a smaller copy, which most steps read, or
            a sketch: `open_calibration(FILE).sketch(mean_rank=8)`.
        rounding, seed: into a checkpoint narrower than FP32.
        fold: "raw", or "cached" for fewer bytes and a small drift. backend: "torch" or "triton",
            "auto" for Triton on a CUDA device. All six as in `StateCache`.

    Returns:
        The model.

    Raises:
        ValueError: if no layer is supported, the model is patched already, its layers are spread
            over devices by accelerate, or an option is out of range or not done on its device.
    """
    storage = {
        "checkpoint": checkpoint,
        "view": view,
        "rounding": rounding,
        "seed": seed,
        "fold": fold,
    }
    done = Patch(window, max_tokens, {**storage, "backend": backend})
    for module in _recurrent(model):
        adapter = ADAPTERS[type(module).__name__]
        done.mixers.append(Mixer(module, adapter, len(done.mixers), module.forward, done))
    specs = done.specs(torch.float32)
    checks.sizes(specs, 1, window, max_tokens)
    device = next(model.parameters()).device
    find_backend(backend, device, checks.storage(specs, **storage), window, max_tokens)
    for mixer in done.mixers:
        mixer.module.forward = mixer.forward  # pyright: ignore (a decorated method)
    for module in model.modules():
        if getattr(module, "_is_stateful", False):
            module._is_stateful = False  # pyright: ignore
            done.stateful.append(module)
    return model


def unpatch(model: Model) -> Model:
    """Undo `patch`: every module has its own forward again. Caches filled meanwhile are lost.

    Raises:
        ValueError: if the model is not patched.
    """
    mixers = patched_mixers(model)
    if not mixers:
        raise ValueError("model is not patched: there is nothing to undo")
    for mixer in mixers:
        del mixer.module.forward
        # A forward that was set on the instance before, and not by its class, is set again.
        if mixer.module.forward != mixer.stock:
            mixer.module.forward = mixer.stock
    for module in mixers[0].patch.stateful:
        del module._is_stateful
    return model


@contextmanager
def patched(
    model: nn.Module | None = None,
    *,
    window: int = 16,
    max_tokens: int = 8,
    checkpoint: str | torch.dtype = torch.float32,
    view: str | torch.dtype | Views | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    fold: Fold = "raw",
    backend: BackendName = "auto",
) -> Iterator[None]:
    """A `with` block in which a model is patched, or in which loaded models come out patched.

    Args:
        model: patched on entry, unpatched on exit. None: instead, every model that a
            `from_pretrained` returns inside the block is patched, and stays so.
        others: as in `patch`.

    Raises:
        ValueError: as `patch`, here or at the load.
    """
    options: dict[str, Any] = {
        "window": window,
        "max_tokens": max_tokens,
        "checkpoint": checkpoint,
        "view": view,
        "rounding": rounding,
        "seed": seed,
        "fold": fold,
        "backend": backend,
    }
    if model is not None:
        patch(model, **options)
        try:
            yield
        finally:
            unpatch(model)
        return
    stock = PreTrainedModel.__dict__["from_pretrained"]
    loading = 0

    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        nonlocal loading
        loading += 1  # a model may load its parts: the whole is patched, once
        try:
            loaded = stock.__get__(None, cls)(*args, **kwargs)
        finally:
            loading -= 1
        if not loading:
            patch(loaded[0] if isinstance(loaded, tuple) else loaded, **options)
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # pyright: ignore
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = stock


def patched_mixers(model: nn.Module) -> list[Mixer]:
    """The mixers of a patched model, none if it is not patched."""
    owners = [getattr(vars(m).get("forward"), "__self__", None) for m in model.modules()]
    return [owner for owner in owners if isinstance(owner, Mixer)]


def _recurrent(model: nn.Module) -> list[Any]:
    """The supported recurrent modules in layer order.

    Raises:
        ValueError: if there are none, or they cannot be patched.
    """
    found: list[Any] = [m for m in model.modules() if type(m).__name__ in ADAPTERS]
    if not found:
        raise ValueError(
            f"model must have a recurrent layer of a supported class, got "
            f"{type(model).__name__} without one; supported: {', '.join(ADAPTERS)}"
        )
    if patched_mixers(model):
        raise ValueError("model is patched already: call unpatch first, to change options")
    indices = [module.layer_idx for module in found]
    if len(set(indices)) < len(indices):
        raise ValueError(
            "model must be one language model, got recurrent layers with the same layer_idx: "
            "patch its parts one by one"
        )
    for module in found:
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                "model must be on one device, got one that accelerate has spread or offloaded: "
                "load it with device_map={'': device}"
            )
        if module.activation not in ("silu", "swish"):
            raise ValueError(
                f"model must have SiLU after its short convolution, got {module.activation!r}"
            )
    return sorted(found, key=lambda module: module.layer_idx)
