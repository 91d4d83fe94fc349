"""Which engine decodes a model in an environment, by which methods, and why not another.

Of vLLM nothing is said but what `vllm/support.py` says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Literal

import torch

from lazystate.engines.vllm.guide import serve
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import VERSIONS, Setup, Version, refusals, version_of
from lazystate.ops.auto import auto
from lazystate.ops.tables import entries
from lazystate.presets import ModelShape

PACKAGES = ("lazystate", "torch", "triton", "transformers", "vllm")
OLDEST_TRANSFORMERS = (5, 17)  # pyproject.toml; older caches cannot be cropped by a count


@dataclass(frozen=True)
class Environment:
    """What is installed, and what it knows of a model's classes.

    Attributes:
        python: version. packages: versions of `PACKAGES`, None for one that is not installed.
        gpus: CUDA devices, as the driver names them.
        plugin: whether vLLM would find lazystate's entry point.
        mixers: by model class that transformers has: the class of its recurrent layers, None for
            one that lazystate does not patch.
    """

    python: str
    packages: Mapping[str, str | None]
    gpus: tuple[str, ...]
    plugin: bool
    mixers: Mapping[str, str | None]


@dataclass(frozen=True)
class Method:
    """A way of decoding. status: how to ask for it, or what is known of it; why it is refused."""

    name: str
    status: str


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        name: "vllm" or "transformers". version: installed, None for none.
        backend: what would compute the recurrence.
        reasons: why it cannot be used, a sentence each with what to do; none if it can.
        methods: for this model, none if its class is not supported. stated_for: their version,
            which is the newest supported one where none that is supported is installed.
        command: how it is started, None where there is nothing to start.
    """

    name: Literal["vllm", "transformers"]
    version: str | None
    backend: Literal["triton", "torch"]
    reasons: tuple[str, ...]
    methods: tuple[Method, ...]
    stated_for: str
    command: str | None


@dataclass(frozen=True)
class Diagnosis:
    """What would be used, and all that decides it; the keys of `lazystate doctor --json`.

    Attributes:
        engine: the one that would be used, None if none can be.
        launch: where the kernels' launch settings are from, None without a GPU.
        faster_from: the least batch at which measured steps of such a layer are faster by replay
            than conventional ones, None if there is none or nothing was measured on this GPU.
    """

    environment: Environment
    model: ModelShape
    engine: str | None
    engines: tuple[Engine, ...]
    launch: str | None
    faster_from: int | None


def look(architectures: Sequence[str]) -> Environment:
    """The environment of this process, and what it knows of these model classes."""
    packages = {name: _version(name) for name in PACKAGES} | {"torch": torch.__version__}
    points = metadata.entry_points(group="vllm.general_plugins")
    return Environment(
        python=sys.version.split()[0],
        packages=packages,
        gpus=tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        plugin=any(point.name == "lazystate" for point in points),
        mixers=_mixers(architectures) if packages["transformers"] else {},
    )


def diagnose(
    environment: Environment,
    model: ModelShape,
    options: Options,
    *,
    draft_tokens: int = 0,
    name: str | None = None,
    folder: str | None = None,
) -> Diagnosis:
    """Say what would decode a model.

    Args:
        options: of the vLLM plugin. draft_tokens: of a step in vLLM.
        name: what `lazystate generate` calls the model, None for a shape without weights.
        folder: what vLLM would load, if there is such a folder.
    """
    engines = (
        _vllm(environment, model, folder or "MODEL", options, draft_tokens),
        _transformers(environment, model, name),
    )
    launch = faster_from = None
    if environment.gpus:
        launch, faster_from = _measured(environment.gpus[0], model)
    used = next((each.name for each in engines if not each.reasons), None)
    return Diagnosis(environment, model, used, engines, launch, faster_from)


def _vllm(
    environment: Environment, model: ModelShape, folder: str, options: Options, draft_tokens: int
) -> Engine:
    installed = environment.packages["vllm"]
    version = _matching(installed, model)
    setup = Setup(installed or version.tested, model.architectures, draft_tokens=draft_tokens)
    reasons = []
    if installed is None:
        reasons.append(f"vLLM is not installed: pip install vllm=={version.tested}")
    elif not environment.plugin:
        reasons.append(
            "vLLM does not find the plugin: install lazystate with pip into vLLM's environment"
        )
    if not environment.gpus:
        reasons.append("there is no CUDA device: run it on a machine that has one")
    if model.architectures:
        reasons += refusals(setup, options)
    else:
        reasons.append(_UNSTATED)
    try:
        options.storage(model.layer, "fp32")
    except (ValueError, OSError) as error:  # formats that do not fit, another model's calibration
        reasons.append(str(error))
    takes = any(version.architecture(each) for each in model.architectures)
    methods = [Method(each.name, each.status) for each in version.features if takes]
    command = serve(version, folder, options)
    return Engine(
        "vllm", installed, "triton", tuple(reasons), tuple(methods), version.minor, command
    )


_UNSTATED = "the model's class is not known here: give the folder with its config.json"


def _matching(installed: str | None, model: ModelShape) -> Version:
    """The version that is installed; where none is that is supported, the newest for the model."""
    if installed is not None and (found := version_of(installed)):
        return found
    takes = [v for v in VERSIONS if any(v.architecture(name) for name in model.architectures)]
    return next(iter(takes), VERSIONS[0])


def _transformers(environment: Environment, model: ModelShape, name: str | None) -> Engine:
    installed = environment.packages["transformers"]
    least = ".".join(map(str, OLDEST_TRANSFORMERS))
    backend: Literal["triton", "torch"] = "triton" if environment.gpus else "torch"
    known = [each for each in model.architectures if each in environment.mixers]
    reasons = []
    if installed is None or _numbers(installed) < OLDEST_TRANSFORMERS:
        found = "not installed" if installed is None else f"{installed}, which is too old"
        reasons.append(f"transformers is {found}: pip install 'transformers>={least}'")
    elif not model.architectures:
        reasons.append(_UNSTATED)
    elif not known:
        reasons.append(
            f"transformers {installed} has no {', '.join(model.architectures)}: take a newer one, "
            "or a model whose class it has"
        )
    elif not any(environment.mixers[each] for each in known):
        reasons.append(
            f"no recurrent layer of {', '.join(known)} has an adapter: take a model whose layers "
            "are in the README's table"
        )
    if backend == "triton" and environment.packages["triton"] is None:
        reasons.append("Triton is not installed, which decodes on a GPU: pip install triton")
    command = f'lazystate generate {name} --prompt "Once upon a time"' if name else None
    if command and environment.gpus:
        command += " --device cuda"
    methods = _PATCHES if any(environment.mixers[each] for each in known) else ()
    return Engine(
        "transformers", installed, backend, tuple(reasons), methods, installed or least, command
    )


# How `patch` and `generate` of the transformers engine are asked for each.
_PATCHES = (
    Method("standard decoding", "with patched(model): model.generate(...)"),
    Method("speculative decoding", "generate(prompt_lookup_num_tokens=4), or assistant_model"),
    Method("low-precision states and views", 'patched(model, checkpoint="fp16", view="nvfp4")'),
    Method("sketches", "patched(model, view=...), from a file of lazystate calibrate"),
)


def _measured(gpu: str, model: ModelShape) -> tuple[str, int | None]:
    """Where launch settings are from, and from which batch on replay was measured to be faster."""
    table = entries(gpu)
    if not table:
        return f"defaults: none are tuned for {gpu}, which benchmarks/tune.py would do", None
    choices = {2**power: auto(model.layer, 2**power, table=table) for power in range(10)}
    faster = (b for b, one in choices.items() if one.measured and one.method == "replay")
    return f"tuned for {gpu}", next(faster, None)


def _mixers(architectures: Sequence[str]) -> dict[str, str | None]:
    import transformers

    from lazystate.engines.transformers.adapters import ADAPTERS

    found = {}
    for name in architectures:
        if (model := getattr(transformers, name, None)) is not None:
            parts = vars(import_module(model.__module__))
            found[name] = next((part for part in parts if part in ADAPTERS), None)
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in version.split(".")[:2])
