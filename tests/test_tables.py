"""Tuned settings are found by shape, batch and tokens; `auto` is never slower than conventional."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import pytest
import torch

from lazystate.ops import tables
from lazystate.ops.auto import auto
from lazystate.ops.tables import Entry, nearest, read, shape_of
from lazystate.presets import PRESETS, preset
from samples import layer
from test_house import SOURCE

SPEC = preset("Nemotron-3-Super-120B").layer


def entry(method: str, batch: int, us: float, tokens: int = 1, **setting: int) -> Entry:
    """A measurement of the layer."""
    return Entry(method, shape_of(SPEC), batch, tokens, 16, setting, us)


def test_the_nearest_entry_is_of_the_same_kind_of_layer():
    """Tokens first, then the work; another V or erase never fits; other head counts do."""
    table = (
        entry("replay", 1, 4.0, warps=1),
        entry("replay", 64, 90.0, warps=2),
        entry("replay", 64, 300.0, 8, warps=4),
        entry("plain", 64, 150.0, warps=8),
    )

    def warps(spec, batch, tokens=1):
        found = nearest(table, "replay", spec, batch, tokens, 16)
        return found and found.setting["warps"]

    assert [warps(SPEC, batch) for batch in (1, 7, 9, 512)] == [1, 1, 2, 2]
    assert warps(SPEC, 1, 6) == 4
    wide = replace(SPEC, heads=2 * SPEC.heads, key_heads=2 * SPEC.key_heads)
    assert warps(wide, 4) == 1 and warps(wide, 5) == 2
    assert warps(replace(SPEC, value_dim=80), 64) is None
    assert warps(replace(SPEC, erase=True), 64) is None
    assert warps(replace(SPEC, key_heads=16), 64) is None
    assert nearest(table, "snapshot", SPEC, 64, 4, 16) is None


def test_a_device_without_a_table_keeps_the_default():
    """On a CPU nothing is looked up, and nothing is replaced."""

    @dataclass(frozen=True)
    class Setting:
        warps: int

    default, cpu = Setting(3), torch.device("cpu")
    assert tables.tuned(default, "replay", SPEC, 8, 1, 16, cpu) is default
    assert tables.setting("plain", SPEC, 8, device="cpu") is None
    assert tables.entries("Nothing 9000") == ()
    assert tables.slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


@pytest.mark.parametrize("path", sorted((SOURCE / "ops" / "tuned").glob("*.json")), ids=str)
def test_shipped_tables_are_whole(path):
    """Every shipped entry is a setting with a time, once, of a GPU that the file is named after."""
    table = json.loads(path.read_text("utf8"))
    assert tables.slug(table["gpu"]) == path.stem
    found = read(table)
    keys = {(e.method, str(e.shape), e.batch, e.tokens, e.window) for e in found}
    assert len(keys) == len(found) > 0
    assert all(e.us > 0 and e.setting for e in found)


def test_auto_is_never_slower_than_conventional():
    """Replay only where it is ahead at both measured neighbours; times lie between theirs."""
    times = {1: (5.0, 4.0), 8: (20.0, 21.0), 64: (90.0, 150.0)}
    table = [entry("replay", batch, us[0]) for batch, us in times.items()]
    table += [entry("plain", batch, us[1]) for batch, us in times.items()]
    for batch, method in ((1, "plain"), (4, "plain"), (8, "replay"), (64, "replay")):
        choice = auto(SPEC, batch, table=table)
        assert choice.measured and choice.method == method, choice
    between = auto(SPEC, 36, table=table)
    assert (between.replay_us, between.conventional_us) == pytest.approx((55.0, 85.5))
    assert auto(SPEC, 512, table=table).method == "replay"
    assert "from measurements" in str(between) and str(between).startswith("replay")


@pytest.mark.parametrize("name", PRESETS)
def test_auto_without_a_table_goes_by_bytes(name):
    """Unknown shapes: conventional for one request, replay for many, snapshots never for many."""
    spec = preset(name).layer
    assert auto(spec, 1).method == "plain"
    assert auto(spec, 256).method == "replay"
    verify = auto(spec, 256, 4)
    assert verify.method == "replay" and not verify.measured
    assert "by the bytes" in str(verify)


def test_auto_keeps_tiny_states_conventional():
    """Where there is nothing to save, nothing changes."""
    assert auto(layer("mamba2"), 8).method == "plain"


def test_entries_are_what_the_tuner_writes():
    """An entry and its JSON are the same."""
    one = entry("replay", 8, 20.0, warps=2)
    assert read({"entries": [asdict(one)]}) == (one,)
