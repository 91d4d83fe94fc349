"""What the vLLM engine is configured with, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import UNSEEN, VERSIONS, Feature, Setup, refusals, version_of

SETUP = Setup("0.33.0", ("NemotronHForCausalLM",))


def test_without_the_switch_nothing_is_configured() -> None:
    """No additional_config, or one without lazystate, leaves vLLM alone."""
    assert Options.of({}) is None
    assert Options.of(None) is None
    assert Options.of({"lazystate": {}}) == Options()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (True, "must be an object"),
        ({"windw": 8}, "no option 'windw'"),
        ({"window": 0}, "window must be 1 to 64, got 0"),
        ({"window": "16"}, "window must be an int"),
        (
            {"checkpoint": "int4"},
            "fp32, fp16, bf16, fp8, nvfp4, got 'int4'",
        ),
    ],
)
def test_wrong_options_are_named(given: object, says: str) -> None:
    """One clear error names the option, what was given and what is accepted."""
    with pytest.raises(ValueError, match=says):
        Options.of({"lazystate": given})


@pytest.mark.parametrize("release", ["0.33.0", "0.33.1", "0.26.0", "0.33.0+cu130"])
def test_patch_releases_belong_to_their_minor_version(release: str) -> None:
    """A patch release takes the adapter of its minor version."""
    found = version_of(release)
    assert found is not None
    assert release.startswith(found.minor)


def test_unknown_versions_and_models_are_refused_with_what_to_do() -> None:
    """The reason says what would work."""
    (reason,) = refusals(Setup("0.30.0", ("NemotronHForCausalLM",)), Options())
    assert all(version.tested in reason for version in VERSIONS)
    (reason,) = refusals(Setup("0.33.0", ("LlamaForCausalLM",)), Options())
    assert "NemotronHForCausalLM" in reason


def test_a_model_of_another_version_is_sent_there() -> None:
    """The reason names the releases that have an adapter."""
    for version in VERSIONS:
        for other in VERSIONS:
            for each in other.architectures:
                if version.architecture(each.name) is None:
                    (reason,) = refusals(Setup(version.tested, (each.name,)), Options())
                    assert f"install {other.tested}, which has one" in reason


def test_a_feature_works_only_where_it_was_seen_to() -> None:
    """Code that is not refused and that no GPU has run is called that."""
    assert Feature("a").status == UNSEEN
    assert Feature("a", seen="one H200").status == "works: one H200"
    assert Feature("a", missing="leave it out").status == "refused: leave it out"


def test_a_supported_engine_has_no_refusal() -> None:
    """Standard decoding of a Mamba-2 model."""
    assert refusals(SETUP, Options()) == []


def test_more_drafts_than_a_window_holds_are_refused() -> None:
    """A step's tokens must fit a window."""
    setup = Setup("0.33.0", ("NemotronHForCausalLM",), draft_tokens=4)
    assert any("window must be above the 4 drafts" in r for r in refusals(setup, Options(window=4)))


def test_pages_move_as_a_whole_or_not_at_all() -> None:
    """Connectors that copy bytes are taken; others would leave behind where a sequence stands."""
    for name in ("OffloadingConnector", "SimpleCPUOffloadConnector", ""):
        assert refusals(replace(SETUP, kv_connector=name), Options()) == []
    (reason,) = refusals(replace(SETUP, kv_connector="NixlConnector"), Options())
    assert reason.startswith("NixlConnector is not known to move whole pages")


def test_drafts_and_prefixes_go_together_in_the_second_runner_alone() -> None:
    """Each alone is taken by both; states inside of a prefill are kept by none."""
    both = replace(SETUP, draft_tokens=4, prefix_caching=True, cache_mode="align")
    assert refusals(both, Options()) == []
    first = replace(both, second_runner=False)
    (reason,) = refusals(first, Options())
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in reason
    assert refusals(replace(first, draft_tokens=0), Options()) == []
    assert refusals(replace(first, prefix_caching=False), Options()) == []
    (reason,) = refusals(replace(SETUP, prefix_caching=True, cache_mode="all"), Options())
    assert "--mamba-cache-mode align" in reason
