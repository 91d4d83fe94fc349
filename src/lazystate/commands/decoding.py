"""Loading a model and decoding with it, measured: what `generate` and `compare` share."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.streamers import TextStreamer

from lazystate import planner, shipped
from lazystate.commands.recorder import Recorder
from lazystate.engines.transformers import count_plain_state_bytes, patched
from lazystate.engines.transformers.adapters import ADAPTERS
from lazystate.engines.transformers.observing import fingerprint, recurrent_modules
from lazystate.formats import Rounding
from lazystate.ops import Traffic, count_traffic
from lazystate.sketch.files import open_calibration
from lazystate.sketch.view import Sketch
from lazystate.spec import LayerSpec

DTypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        window: L of replay, or None for plain: stock transformers, which rewrites the state with
            every token.
        draft_tokens: most tokens that prompt lookup proposes a step, 0 for no drafts.
        checkpoint: format of replay's states. view: of the copy that most steps read, or "sketch";
            None: none.
        mean_rank: of a sketch. calibration: its file, None for the shipped model's own.
        rounding: into the checkpoint.

    Raises:
        ValueError: for drafts or formats without replay, or more drafts than a window holds.
    """

    window: int | None = None
    draft_tokens: int = 0
    checkpoint: str = "fp32"
    view: str | None = None
    mean_rank: float = 8
    calibration: Path | None = None
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        if self.window is None and not self.exact:
            raise ValueError(
                f"checkpoint and view need replay, got {self.checkpoint} and {self.view} for "
                "plain: stock transformers keeps its states as they are; decode with 'replay'"
            )
        if self.draft_tokens and self.window is None:
            raise ValueError(
                "drafts need replay: when a draft is rejected the state must go back, and stock "
                "transformers cannot crop a recurrent state; decode with method 'replay', or "
                "without drafts"
            )
        if self.window is not None and self.draft_tokens + 1 > self.window:
            raise ValueError(
                f"window must be at least draft_tokens + 1 ({self.draft_tokens + 1}), got "
                f"{self.window}: a step's tokens must fit a window; widen it or draft less"
            )

    @property
    def name(self) -> Literal["plain", "replay"]:
        """Plain or replay."""
        return "plain" if self.window is None else "replay"

    @property
    def exact(self) -> bool:
        """Whether states are FP32, so that only the order of additions differs from plain."""
        return self.checkpoint == "fp32" and self.view in (None, "fp32")

    @property
    def draft(self) -> str:
        """Where drafts come from."""
        return "prompt-lookup" if self.draft_tokens else "none"


@dataclass(frozen=True)
class Loaded:
    """A model in memory, by the name it was asked for."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    _sketches: dict[Method, Sketch] = field(default_factory=dict)

    def view(self, method: Method) -> str | Sketch | None:
        """What `StateCache` takes as its view.

        Raises:
            ValueError: if there is no calibration of this model, or not of that rank.
        """
        if method.view != "sketch":
            return method.view
        if method not in self._sketches:
            self._sketches[method] = self._sketch(method)
        return self._sketches[method]

    def _sketch(self, method: Method) -> Sketch:
        file = method.calibration or self.name
        if method.calibration is None and self.name not in shipped.models():
            raise ValueError(
                f"view sketch needs --calibration, got none for {self.name}: make it with "
                "lazystate calibrate"
            )
        calibration = open_calibration(file)
        layers = [module.layer_idx for module in recurrent_modules(self.model)]
        calibration.check(layers, self.specs[0], fingerprint(self.model))
        return calibration.sketch(method.mean_rank)

    @property
    def specs(self) -> list[LayerSpec]:
        """The recurrent layers, in order; none in a model without."""
        return [
            ADAPTERS[type(module).__name__].spec(module, self.model.dtype)
            for module in self.model.modules()
            if type(module).__name__ in ADAPTERS
        ]

    @property
    def layer(self) -> str:
        """Kind of the recurrent layers."""
        first = next(iter(self.specs), None)
        if first is None:
            return "none"
        return ("kda" if first.decay == "channel" else "gdn") if first.erase else "mamba2"

    def predicted_bytes(self, method: Method, given: float, kept: float) -> float:
        """The planner's state bytes for a token, all layers.

        Args:
            given: mean tokens of a step; a step between two whole numbers is put between theirs.
            kept: mean tokens of a step that stayed.
        """
        below = math.floor(given)
        part = given - below
        moved = (1 - part) * self._step_bytes(method, below, kept)
        if part:
            moved += part * self._step_bytes(method, below + 1, kept)
        return moved / kept

    def _step_bytes(self, method: Method, tokens: int, kept: float) -> float:
        kept, window, view = min(kept, tokens), method.window or 1, self.view(method)
        return kept * sum(
            planner.traffic(
                spec,
                method.name,
                window=window,
                tokens=tokens,
                kept=kept,
                checkpoint=method.checkpoint,
                view=view.planned(layer, spec) if isinstance(view, Sketch) else view,
            ).total
            for layer, spec in enumerate(self.specs)
        )

    def printer(self) -> TextStreamer:
        """Writes new text to standard output as it is made."""
        return TextStreamer(self.tokenizer, skip_prompt=True)

    def encode(self, text: str) -> Tensor:
        """Token numbers of a text: int64 [1, n]."""
        return self.tokenizer(text, return_tensors="pt").input_ids.to(self.model.device)


def counting(loaded: Loaded, method: Method) -> AbstractContextManager[Traffic]:
    """Count the bytes of recurrent state that decoding moves, where they are moved."""
    return count_plain_state_bytes(loaded.model) if method.window is None else count_traffic()


def load(name: str, dtype: DTypeName = "float32", device: DeviceName = "cpu") -> Loaded:
    """Load a shipped model, or one from a folder, without touching the network.

    Raises:
        ValueError: if there is no such model, or no such device.
    """
    folder = shipped.model_folder(name)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu here, got cuda: torch sees no CUDA device")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Loaded(name, model.to(device).eval(), tokenizer)


@dataclass(frozen=True)
class Decoded:
    """New tokens int64 [n], and the logits float32 [n, vocabulary] they were chosen from."""

    tokens: Tensor
    logits: Tensor | None


def decode(
    loaded: Loaded,
    prompt: Tensor,
    method: Method,
    tokens: int,
    recorder: Recorder,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    keep_logits: bool = False,
) -> Decoded:
    """Continue a prompt.

    Args:
        prompt: int64 [1, n].
        tokens: most tokens to add; fewer if the model ends its text.
        temperature: of sampling; 0 takes the most probable token each time (greedy).
        seed: of sampling.
        keep_logits: return the logits too.

    Raises:
        ValueError: if the model's class is not one that replay supports.
    """
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    drafts = {"prompt_lookup_num_tokens": method.draft_tokens} if method.draft_tokens else {}
    model: Any = loaded.model  # `generate` comes from a mixin that the base class does not show
    with _engine(loaded, method), recorder.watching(model), torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            streamer=recorder,
            output_logits=keep_logits,
            return_dict_in_generate=True,
            **({"do_sample": False} | sampling | drafts),
        )
    logits = torch.stack(out.logits).squeeze(1).float() if keep_logits else None
    return Decoded(out.sequences[0, prompt.shape[1] :], logits)


def _engine(loaded: Loaded, method: Method) -> AbstractContextManager:
    """Replay patched in for the length of a `with` block, or nothing for plain."""
    if method.window is None:
        return nullcontext()
    return patched(
        loaded.model,
        window=method.window,
        max_tokens=method.draft_tokens + 1,
        checkpoint=method.checkpoint,
        view=loaded.view(method),
        rounding=method.rounding,
    )
