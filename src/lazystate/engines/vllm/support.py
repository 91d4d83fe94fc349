"""What is supported in which vLLM, as data: for the plugin, `lazystate doctor` and documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lazystate.engines.vllm.options import Options

Kind = Literal["mamba2", "gdn", "kda"]
KINDS: dict[Kind, str] = {
    "mamba2": "Mamba-2",
    "gdn": "Gated DeltaNet",
    "kda": "Kimi Delta Attention",
}

UNSEEN = "written, not run on a GPU"


@dataclass(frozen=True)
class Architecture:
    """A model class of vLLM for whose recurrent layers there is an adapter.

    Attributes:
        name: as in a config.json's "architectures". kind: of its recurrent layers.
        layers: vLLM's classes of these layers, of which a model has one.
    """

    name: str
    kind: Kind
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Feature:
    """One thing that an engine may be asked for.

    Attributes:
        name: what it is called in the documents. missing: why it is refused; "" if it is not.
        seen: where it was seen to work; "" for code that no GPU has run yet.
    """

    name: str
    missing: str = ""
    seen: str = ""

    @property
    def status(self) -> str:
        """One line for a table."""
        if self.missing:
            return f"refused: {self.missing}"
        return f"works: {self.seen}" if self.seen else UNSEEN


@dataclass(frozen=True)
class Version:
    """One minor version of vLLM.

    Attributes:
        minor: as "0.33". tested: the release that the adapters were written against.
        architectures, features: what there are adapters for, what is refused, and why.
    """

    minor: str
    tested: str
    architectures: tuple[Architecture, ...]
    features: tuple[Feature, ...]

    def architecture(self, name: str) -> Architecture | None:
        """The supported architecture of that name, or None."""
        return next((each for each in self.architectures if each.name == name), None)

    def missing(self, name: str) -> str:
        """Why a feature is refused; "" if it is not."""
        return next(feature.missing for feature in self.features if feature.name == name)


@dataclass(frozen=True)
class Setup:
    """What of an engine decides whether lazystate can run in it.

    Attributes:
        version: vLLM's. architectures: of the model's config.json.
        draft_tokens: of speculative decoding, 0 without.
        prefix_caching: whether states of recurrent layers are kept for later prompts.
        cache_mode: which of them, vLLM's `--mamba-cache-mode`.
        second_runner: whether the engine runs vLLM's Model Runner V2.
        kv_connector: the name of what moves pages out of the engine and back, "" for none.
        stock_replay: whether vLLM's own `--use-replayssm` is on.
        specialized: whether a decoder for one model takes the place of its layers.
        conv_dim_first: whether the convolution's state is kept with channels first.
    """

    version: str
    architectures: tuple[str, ...]
    draft_tokens: int = 0
    prefix_caching: bool = False
    cache_mode: str = "none"
    second_runner: bool = True
    kv_connector: str = ""
    stock_replay: bool = False
    specialized: bool = False
    conv_dim_first: bool = False


STANDARD = "standard decoding"
SPECULATIVE = "speculative decoding"
PREFIX = "prefix caching"
CONNECTOR = "KV connectors that move whole pages"
VIEWS = "low-precision states and views"
SKETCH = "sketches"
GRAPHS = "full and piecewise CUDA graphs"
PARALLEL = "tensor parallelism"

# Of vLLM's, those that copy a page's bytes without a look at the layer; others, NixlConnector for
# one, move the two states that a stock layer has.
WHOLE_PAGES = ("OffloadingConnector", "SimpleCPUOffloadConnector")

_MAMBA2 = tuple(
    Architecture(name, "mamba2", ("MambaMixer2",))
    for name in (
        "Mamba2ForCausalLM",
        "NemotronHForCausalLM",
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Zamba2ForCausalLM",
    )
)

_QWEN = tuple(
    Architecture(name, "gdn", ("QwenGatedDeltaNetAttention",))
    for name in (
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    )
)
_QWEN_TEXT = tuple(
    Architecture(name, "gdn", ("QwenGatedDeltaNetAttention",))
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
)
_KIMI = (Architecture("KimiLinearForCausalLM", "kda", ("KimiGatedDeltaNetAttention",)),)
# One class of models for both gates: full-rank ones have a layer of their own.
_KIMI_K3 = tuple(
    Architecture(name, "kda", ("KimiGatedDeltaNetAttention", "KimiK3DeltaAttention"))
    for name in ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")
)
_GLM = tuple(
    Architecture(name, "kda", ("Glm5NextLinearAttention",))
    for name in ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration")
)
_LING = tuple(
    Architecture(name, "kda", ("BailingMoeV3KimiDeltaAttention",))
    for name in ("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration")
)

_FEATURES = (
    Feature(STANDARD),
    Feature(GRAPHS),
    Feature(PARALLEL),
    Feature(SPECULATIVE),
    Feature(PREFIX),
    Feature(CONNECTOR),
    Feature(VIEWS),
    Feature(SKETCH),
)

VERSIONS = (
    Version("0.33", "0.33.0", (*_MAMBA2, *_QWEN, *_QWEN_TEXT, *_KIMI_K3, *_GLM, *_LING), _FEATURES),
    Version("0.26", "0.26.0", (*_MAMBA2, *_QWEN, *_KIMI), _FEATURES),
)


def version_of(version: str) -> Version | None:
    """The supported version that a version string belongs to, or None."""
    minor = ".".join(version.split("+")[0].split(".")[:2])
    return next((each for each in VERSIONS if each.minor == minor), None)


def refusals(setup: Setup, options: Options) -> list[str]:
    """Why lazystate cannot run in an engine, a sentence each with what to do; none if it can."""
    version = version_of(setup.version)
    if version is None:
        return [f"vLLM {setup.version} is not supported: install {_either(_releases())}"]
    reasons = []
    if not any(version.architecture(name) for name in setup.architectures):
        model = ", ".join(setup.architectures)
        reasons.append(f"{model} has no adapter in vLLM {version.minor}: {_instead(setup)}")
    asked = {
        SPECULATIVE: setup.draft_tokens > 0,
        PREFIX: setup.prefix_caching,
        CONNECTOR: bool(setup.kv_connector),
        VIEWS: options.view not in (None, "sketch") or options.checkpoint not in (None, "fp32"),
        SKETCH: options.view == "sketch",
    }
    for name, wanted in asked.items():
        if wanted and (missing := version.missing(name)):
            reasons.append(f"{name}: {missing}")
    if setup.draft_tokens >= options.window:
        reasons.append(
            f"window must be above the {setup.draft_tokens} drafts of a step, got "
            f"{options.window}: widen it or draft less"
        )
    if setup.draft_tokens > 15:
        reasons.append(f"drafts of a step must be at most 15, got {setup.draft_tokens}")
    if setup.kv_connector and setup.kv_connector not in WHOLE_PAGES:
        reasons.append(
            f"{setup.kv_connector} is not known to move whole pages, which say where their "
            f"sequence stands: use {_either(WHOLE_PAGES)}, or leave out --kv-transfer-config"
        )
    if setup.cache_mode == "all":
        reasons.append("states inside of a prefill are not kept: --mamba-cache-mode align")
    if setup.draft_tokens > 0 and setup.prefix_caching and not setup.second_runner:
        reasons.append(
            "drafts together with prefix caching need vLLM's Model Runner V2: "
            "VLLM_USE_V2_MODEL_RUNNER=1, or --no-enable-prefix-caching"
        )
    if setup.stock_replay:
        reasons.append("--use-replayssm is vLLM's own replay: leave out one of the two")
    if setup.specialized:
        reasons.append(
            '"decode_backend": "latency_specialized" decodes without layers: leave it out'
        )
    if setup.conv_dim_first:
        reasons.append("VLLM_SSM_CONV_STATE_LAYOUT=DS is not supported: leave it unset")
    return reasons


def _instead(setup: Setup) -> str:
    """What to do about a model without an adapter: another version, if one has it."""
    found = [
        version.tested
        for version in VERSIONS
        if any(version.architecture(name) for name in setup.architectures)
    ]
    if found:
        return f"install {_either(found)}, which has one"
    version = version_of(setup.version)
    assert version is not None
    return f"it takes {_either(each.name for each in version.architectures)}"


def _releases() -> Iterable[str]:
    return (version.tested for version in VERSIONS)


def _either(names: Iterable[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} or {last}" if rest else last
