"""What is configured: `--additional-config '{"lazystate": {"window": 16, "view": "fp8"}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lazystate import checks
from lazystate.engines.vllm.sketches import sketches_of
from lazystate.formats import VIEWS, Rounding, named
from lazystate.ops import Fold, Storage
from lazystate.spec import LayerSpec

KEY = "lazystate"  # in vLLM's additional_config
CHECKPOINTS = ("fp32", "fp16", "bf16", "fp8", "nvfp4")
SKETCH = "sketch"


@dataclass(frozen=True)
class Options:
    """The methods of the package by configuration; names and defaults as of `StateCache`.

    Attributes:
        window: L, tokens between two folds of a state.
        checkpoint: format of the states after a fold, "fp32", "fp16", "bf16", "fp8" or "nvfp4";
            None for what vLLM's own `--mamba-ssm-cache-dtype` says. In another one, states are
            widened before and rounded after every chunk of a prefill.
        view: format of a smaller copy that most steps read, or "sketch"; None for no copy.
        calibration: of a sketch: the file, or a shipped model's name. mean_rank: of its heads.
        rounding, seed: into a checkpoint narrower than FP32. What is drawn depends on seed, layer,
            head, block of the cache, and how many tokens the state is of.
        fold: "raw" or "cached".

    Raises:
        ValueError: for a value out of range, or a sketch without a calibration or the other way
            round.
    """

    window: int = 16
    checkpoint: str | None = None
    view: str | None = None
    calibration: str | None = None
    mean_rank: float = 8
    rounding: Rounding = "stochastic"
    seed: int = 0
    fold: Fold = "raw"

    def __post_init__(self) -> None:
        checks.integer("window", self.window)
        if not 1 <= self.window <= 64:
            raise ValueError(f"window must be 1 to 64, got {self.window}")
        if self.checkpoint not in (None, *CHECKPOINTS):
            raise ValueError(
                f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {self.checkpoint!r}"
            )
        if self.view not in (None, SKETCH):
            named("view", self.view, (*VIEWS, SKETCH))
        if (self.view == SKETCH) != (self.calibration is not None):
            raise ValueError(
                f'view "sketch" and calibration go together, got view {self.view!r} and '
                f"calibration {self.calibration!r}: give both (the file is of "
                "`lazystate calibrate`), or neither"
            )

    @classmethod
    def of(cls, additional_config: object) -> Options | None:
        """The options in vLLM's additional_config; None where lazystate is not asked for.

        Raises:
            ValueError: for a name that is no option, or a value that is not allowed.
        """
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        given: Any = additional_config[KEY]
        if not isinstance(given, Mapping):
            raise ValueError(
                f'additional_config["{KEY}"] must be an object like {{"window": 16}}, got '
                f"{given!r}: write {{}} for exact replay with the defaults"
            )
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f'additional_config["{KEY}"] has no option {unknown[0]!r}: it takes '
                f"{', '.join(names)}"
            )
        return cls(**given)

    def storage(self, spec: LayerSpec, state_dtype: object, devices: int = 1) -> Storage:
        """How states of a layer are stored.

        Args:
            state_dtype: of vLLM's state, which prefill writes.
            devices: over which a layer's heads are divided; spec is of one device's.

        Raises:
            ValueError: for an option that `StateCache` would not take, or a calibration of another
                model. FileNotFoundError: for a calibration that is not there.
        """
        form = state_dtype if self.checkpoint is None else self.checkpoint
        view: object = self.view
        if self.calibration is not None:
            view = sketches_of(self.calibration, self.mean_rank, devices)
        return checks.storage((spec,), form, view, self.fold, self.rounding, self.seed)
