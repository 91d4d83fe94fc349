"""The calibration file: what comes back, what is refused and why, and files of sketchssm."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lazystate.sketch import calibration_file
from lazystate.sketch.allocation import paper_actions
from lazystate.sketch.calibration_file import Calibration, Origin, load, text_fingerprint
from lazystate.sketch.public_file import load_public
from lazystate.sketch.scores import Scores
from lazystate.sketch.statistics import Statistics
from lazystate.sketch.traffic import PaperBytes
from samples import layer
from test_sketch_view import basis

DATA = Path(__file__).parent / "data"
PUBLIC = DATA / "sketchssm-calibration.pt"
SPEC = layer("gdn", key_dim=16, value_dim=12)


def sample(groups: int = 4) -> Calibration:
    """Two layers of four heads, every tensor there is."""
    origin = Origin(
        model="tiny",
        layers=(0, 2),
        value_dim=12,
        window=16,
        erase=True,
        text=text_fingerprint(["a page"]),
        versions={"torch": "2"},
        notes={"prompts": 3},
    )
    decay = 0.7 ** torch.arange(6.0)
    return Calibration(
        origin,
        omega=basis(2, groups, 16, 5).float(),
        paired=torch.rand(2, 4, 1) * decay,
        missed=torch.rand(2, 4, 1) * decay,
        slopes=torch.rand(2, 4),
        metric=torch.rand(2, groups, 16, 16),
    )


def same(one: Calibration, other: Calibration) -> bool:
    tensors, others = one.tensors(), other.tensors()
    return (
        one.origin == other.origin
        and set(tensors) == set(others)
        and all(torch.equal(tensors[name], others[name]) for name in tensors)
    )


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """Every tensor and every word of the origin, and no half file is left behind."""
    whole = sample()
    least = replace(whole, missed=None, slopes=None, metric=None)
    for calibration in (whole, least):
        calibration.save(tmp_path / "c.safetensors")
        assert same(load(tmp_path / "c.safetensors"), calibration)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


def test_opening_a_file_executes_nothing(tmp_path: Path) -> None:
    """A pickle that would run is refused by both readers, and does not run."""
    bombs = {"c.safetensors": load, "c.pt": load_public}
    for name, read in bombs.items():
        for dump in (pickle.dumps, None):
            path, mark = tmp_path / name, tmp_path / "mark"
            content = {"format": "sketchssm-calibration", "omega": Bomb(mark)}
            if dump is None:
                torch.save(content, path)
            else:
                path.write_bytes(dump(content, 2))
            with pytest.raises(ValueError, match=r"not a safetensors file|plain tensors"):
                read(path)
            assert not mark.exists()


def rewrite(path: Path, tensors: dict[str, Tensor] | None = None, **header: str) -> None:
    """Save the sample with some header entries and tensors replaced."""
    sample().save(path)
    with calibration_file.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | (tensors or {}), path, metadata=metadata | header)


@pytest.mark.parametrize(
    ("header", "tensors", "reason"),
    [
        ({"format": "other"}, {}, "format is 'other'"),
        ({"version": "2"}, {}, "has version 2, this package reads 1"),
        ({"about": "{}"}, {}, "lacks 'layers'"),
        ({"about": "["}, {}, "is damaged"),
        ({}, {"more": torch.zeros(1)}, "it holds .*more"),
        ({}, {"paired": torch.zeros(2, 4, 5)}, r"paired must be \[2, 4, 6\]"),
        ({}, {"paired": torch.full((2, 4, 6), -1.0)}, "paired must not be negative"),
        ({}, {"slopes": torch.full((2, 4), torch.nan)}, "slopes must be finite"),
        ({}, {"omega": torch.ones(2, 4, 16, 5)}, "orthonormal columns"),
        ({}, {"omega": torch.ones(3, 4, 16, 5)}, r"omega must be \[2, groups"),
        (
            {},
            {"omega": basis(2, 3, 16, 5).float().contiguous(), "metric": torch.ones(2, 3, 16, 16)},
            "divide",
        ),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, header: dict, tensors: dict, reason: str
) -> None:
    """A file that is not whole, or not one, says what is wrong with it."""
    path = tmp_path / "c.safetensors"
    rewrite(path, tensors, **header)
    with pytest.raises(ValueError, match=reason):
        load(path)


def test_missing_and_cut_files(tmp_path: Path) -> None:
    """A path without a file is a FileNotFoundError, half a file a ValueError."""
    path = tmp_path / "c.safetensors"
    for read in (load, load_public):
        with pytest.raises(FileNotFoundError, match="no calibration file"):
            read(path)
    sample().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a safetensors file"):
        load(path)


def test_another_model_is_refused() -> None:
    """Everything that differs is named; the right model passes."""
    calibration = sample()
    calibration.check([0, 2], SPEC)
    calibration.check([0, 2], SPEC, "abc")
    other = replace(SPEC, heads=8, key_heads=8, value_dim=6)
    with pytest.raises(ValueError, match=r"\(tiny\): it has recurrent layers \[0, 2\] and not"):
        calibration.check([0, 1], SPEC)
    with pytest.raises(ValueError, match="heads 4 and not 8; value_dim 12 and not 6"):
        calibration.check([0, 2], other)
    with pytest.raises(ValueError, match="weights abc and not def"):
        replace(calibration, origin=replace(calibration.origin, weights="abc")).check(
            [0, 2], SPEC, "def"
        )


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_slices_by_heads(groups: int) -> None:
    """Two ranks' slices, with the slices of one allocation, are the whole model's."""
    whole = sample(groups)
    ranks = whole.allocate(3).ranks
    for part in (slice(0, 2), slice(2, 4)):
        cut = whole.slice_heads(part.start, part.stop)
        assert cut.heads == 2
        assert torch.equal(cut.basis(1), whole.basis(1)[part])
        assert torch.equal(cut.paired, whole.paired[:, part])
        assert ranks[:, part].shape == (2, cut.heads)


def test_slices_keep_groups_whole() -> None:
    """A cut that takes more than a group but not all of the next is refused."""
    whole = sample(2)
    assert torch.equal(whole.slice_heads(1, 2).basis(0), whole.basis(0)[1:2])
    with pytest.raises(ValueError, match="cut through a group of 2"):
        whole.slice_heads(1, 3)
    with pytest.raises(ValueError, match=r"heads must lie in 0\.\.4"):
        whole.slice_heads(2, 5)


def test_ranks_for_any_budget() -> None:
    """A mean rank becomes ranks that cost no more, more to heads that lose more."""
    calibration = sample()
    paired = calibration.paired.clone()
    paired[0, 1] *= 1000
    found = replace(calibration, paired=paired).allocate(2)
    assert found.allocation.bytes <= found.allocation.budget
    assert int(found.ranks[0, 1]) in (0, 5)
    assert found.ranks.shape == (2, 4)
    by_error = replace(calibration, paired=paired).allocate(2, criterion="error")
    assert not torch.equal(found.ranks, by_error.ranks)
    with pytest.raises(ValueError, match="needs missed and slopes"):
        replace(calibration, missed=None).allocate(2, criterion="error")


def test_fingerprint_knows_borders() -> None:
    """Texts that join to the same string are told apart, and order matters."""
    prints = {text_fingerprint(texts) for texts in (["ab", "c"], ["a", "bc"], ["c", "ab"], [])}
    assert len(prints) == 4


@pytest.fixture(scope="module")
def trace() -> dict[str, Tensor]:
    """States, queries and gradients behind the public file: [layers, B, windows, HV, ...]."""
    return torch.load(DATA / "sketchssm-trace.pt", weights_only=True)


def test_public_file_has_its_origin() -> None:
    """A file that sketchssm has written comes with model, layers, shapes and window."""
    found = load_public(PUBLIC)
    origin = found.origin
    assert (origin.model, origin.layers, origin.window, origin.erase) == ("tiny", (1, 3), 4, True)
    assert (found.heads, found.key_dim, origin.value_dim, found.largest_rank) == (4, 16, 16, 8)
    assert origin.notes["family"] == "gdn"
    spec = layer("gdn", key_dim=16, value_dim=16)
    found.check([1, 3], spec, "abc")
    with pytest.raises(ValueError, match="another model"):
        found.check([0, 1], spec)


def test_public_basis_spans_the_same(trace: dict[str, Tensor]) -> None:
    """Each prefix spans what theirs does, and what our statistics find with their ridge."""
    found = load_public(PUBLIC)
    theirs = torch.load(PUBLIC, weights_only=True)["omega"].double().mT
    for row in range(2):
        seen = Statistics.empty(4, 16)
        for state, query in zip(
            trace["state"][row].transpose(0, 1),
            trace["effective_query"][row].transpose(0, 1),
            strict=True,
        ):
            seen.add(state, query.permute(0, 3, 1, 2))
        ours = seen.grouped(2).basis(8, ridge=0.1).omega
        for rank in range(1, 9):
            expected = theirs[row, ..., :rank]
            expected = expected @ torch.linalg.pinv(expected)
            for omega in (found.omega[row].double(), ours):
                part = omega[..., :rank]
                assert torch.allclose(part @ part.mT, expected, atol=1e-5)


def test_public_scores_are_ours(trace: dict[str, Tensor]) -> None:
    """Their paired scores of all ranks are what ours give for the same numbers."""
    found = load_public(PUBLIC)
    for row in range(2):
        seen = Scores.empty(4, 8)
        for i in range(trace["state"].shape[2]):
            queries = trace["effective_query"][row][:, i].permute(0, 3, 1, 2)
            gradients = trace["gradient"][row][:, i].permute(0, 3, 1, 2)
            seen.add(trace["state"][row][:, i], found.basis(row), queries, gradients)
        expected = (seen.paired / seen.tokens).float()
        assert torch.allclose(found.paired[row], expected, rtol=1e-4, atol=1e-5)


def test_public_ranks_are_verified() -> None:
    """At their bytes our allocation is the table whose digest sketchssm put into the file."""
    actions = paper_actions(PaperBytes(16, 16, 4, erase=True))
    ranks = load_public(PUBLIC).allocate(2, actions=actions).ranks
    digest = hashlib.sha256(str(tuple(ranks.shape)).encode())
    digest.update(ranks.to(torch.int16).view(torch.uint8).numpy().tobytes())
    digest.update((ranks == 0).view(torch.uint8).numpy().tobytes())
    verified = torch.load(PUBLIC, weights_only=True)["verified"]["2"]
    assert digest.hexdigest() == verified["table_sha256"]


def test_public_file_becomes_ours(tmp_path: Path) -> None:
    """An imported calibration is saved and read as any other."""
    found = load_public(PUBLIC)
    found.save(tmp_path / "c.safetensors")
    assert same(load(tmp_path / "c.safetensors"), found)
    json.dumps(found.origin.notes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "is not a sketchssm-calibration file"),
        ({"schema_version": 2}, "has schema 2, this package reads 1"),
        ({"basis_fingerprint": "0"}, "do not belong together"),
        ({"geometry": {"groups": 3, "key_dim": 16}}, "does not fit groups"),
        ({"model": None}, "is damaged"),
        ({"layer_ids": [3, 1]}, "layers must ascend"),
    ],
)
def test_public_files_that_do_not_fit(tmp_path: Path, change: dict, reason: str) -> None:
    """Another format or schema, or parts that do not belong together, are refused."""
    found = torch.load(PUBLIC, weights_only=True)
    torch.save(found | change, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=reason):
        load_public(tmp_path / "c.pt")
