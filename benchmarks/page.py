"""A page with a generated table between two markers: write it, or check that it is current."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def filled(page: str, name: str, table: str) -> str:
    """The page with what stands between the markers of `name` replaced by the table."""
    begin, end = (f"<!-- {name}: {edge} -->\n" for edge in ("begin", "end"))
    before, rest = page.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def write(path: Path, name: str, table: str, *, check: bool) -> None:
    """Write the table into the page, or with `check` only compare.

    Raises:
        SystemExit: with `check`, if the page is not what its numbers make.
    """
    page = path.read_text("utf8")
    new = filled(page, name, table)
    if not check:
        path.write_text(new, "utf8")
    elif new != page:
        raise SystemExit(f"{path.name} is behind its numbers: table {name!r} must be written again")
