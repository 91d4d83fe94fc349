"""House rules that a machine can check, over the whole package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lazystate"
FILES = sorted(SOURCE.rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("src", "tests", "docs", "benchmarks", "training")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".json", ".toml") and "assets" not in path.parts
)

# Bottom to top; a module imports from its own part of the package and from lower levels only.
LEVELS = (
    ("spec", "philox"),
    ("gates", "formats", "presets", "reference", "shipped"),
    ("planner",),
    ("recommendation",),
    ("ops",),
    ("checks",),
    ("cache",),
    ("sketch", "baselines"),
    ("engines",),
    ("evaluation",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
PUBLIC = LEVEL["cache"]  # where `from lazystate import StateCache` comes from


def name(path: Path) -> str:
    """A file's path below the repository, as a test's name."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_short(path: Path) -> None:
    """No file of the package is longer than 500 lines."""
    assert len(path.read_text("utf8").splitlines()) <= 500


@pytest.mark.parametrize("path", FILES, ids=name)
def test_functions_fit_a_screen(path: Path) -> None:
    """No function but a GPU kernel has more than 50 lines, its docstring not counted."""
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]
            kernel = any("jit" in ast.unparse(mark) for mark in node.decorator_list)
            length = (node.end_lineno or 0) - first.lineno + 1
            assert kernel or length <= 50, f"{node.name}: {length} lines"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_public_names_have_docstrings(path: Path) -> None:
    """Every public function, class and method says what it is."""
    tree = ast.parse(path.read_text("utf8"))
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if f"{node.name}.setter" not in marks:  # the property says it
                assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_settings_are_arguments(path: Path) -> None:
    """Nothing reads the environment."""
    text = path.read_text("utf8")
    assert not re.search(r"\benviron\b|getenv", text)


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_paths_are_relative(path: Path) -> None:
    """No file names a place on somebody's machine."""
    places = "|".join(("home", "root", "tmp", "work", "mnt", "Users", "opt", "scratch"))
    found = re.search(rf"(?<![\w.}}/])/({places})/\w", path.read_text("utf8"))
    assert not found, found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_arrows_point_down(path: Path) -> None:
    """A module knows only of what lies below it: cli, engines, cache, ops, spec."""
    part = path.relative_to(SOURCE).with_suffix("").parts[0]
    if part == "__init__":
        return
    assert part in LEVEL, f"{part}: say in LEVELS where it belongs"
    for module in imports(path):
        package, *rest = module.split(".")
        if package != "lazystate" or (rest and rest[0] == part):
            continue
        level = LEVEL.get(rest[0], PUBLIC) if rest else PUBLIC
        assert level < LEVEL[part], f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", sorted((SOURCE / "reference").rglob("*.py")), ids=name)
def test_the_reference_stands_alone(path: Path) -> None:
    """The reference needs PyTorch and the spec, and shares nothing with the code it judges."""
    for module in imports(path):
        standard = module.split(".")[0] in ("__future__", "collections", "dataclasses")
        allowed = ("torch", "lazystate.reference", "lazystate.spec")
        assert standard or module.startswith(allowed), module


def test_backends_do_not_know_each_other() -> None:
    """The GPU path imports nothing of the PyTorch path, nor the other way round."""
    for one, other in (("torch", "triton"), ("triton", "torch")):
        for path in (SOURCE / "ops" / one).rglob("*.py"):
            for module in imports(path):
                assert not module.startswith(f"lazystate.ops.{other}"), f"{name(path)}: {module}"
