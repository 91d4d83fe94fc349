"""What the package brings along: three small trained hybrids and two books held out of training."""

from __future__ import annotations

import lzma
from importlib import resources
from pathlib import Path

ASSETS = Path(str(resources.files("lazystate"))) / "assets"


def models() -> list[str]:
    """Names of the shipped models, sorted."""
    return sorted(path.parent.name for path in ASSETS.glob("models/*/config.json"))


def model_folder(model: str) -> Path:
    """The folder of a shipped model, or of any model saved by transformers.

    Args:
        model: a name of `models()`, or a path to a folder with a config.json.

    Raises:
        ValueError: if it is neither.
    """
    if model in models():
        return ASSETS / "models" / model
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    found = "a folder without config.json" if folder.is_dir() else "no folder of that path"
    raise ValueError(
        f"model must be a shipped name ({', '.join(models())}) or a folder with a config.json, "
        f"got {model!r}: {found}; download a model first, and give the folder it lies in"
    )


def books() -> list[str]:
    """Names of the held-out books, sorted."""
    return sorted(path.name.removesuffix(".txt.xz") for path in ASSETS.glob("books/*.txt.xz"))


def book(name: str) -> str:
    """The text of a held-out book.

    Raises:
        ValueError: if `name` is not one of `books()`.
    """
    if name not in books():
        raise ValueError(f"book must be one of {', '.join(books())}, got {name!r}")
    with lzma.open(ASSETS / "books" / f"{name}.txt.xz", "rt", encoding="utf-8") as file:
        return file.read()
