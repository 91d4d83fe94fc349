"""Fetch the texts of `sources.json` by package name and write them as clean UTF-8 files.

Every text comes out in one form: a paragraph is one line, paragraphs are separated by one blank
line, and a paragraph seen before in the same source is dropped. Tools needed: `apt-get`, `dpkg`,
`npm`, `pip`, and `mod2imp` (Debian package libsword-utils) for the four SWORD modules.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Source = dict[str, str]
MANIFEST = Path(__file__).with_name("sources.json")
BLOCK_TAGS = r"</?(?:p|div|br|h[1-6]|li|ul|ol|dd|dt|dl|blockquote|table|tr|title)\b[^>]*>"
BOOK_ORDER = (
    "emma",
    "mansfield-park",
    "northanger-abbey",
    "persuasion",
    "pride-and-prejudice",
    "sense-and-sensibility",
)


# --- packages -------------------------------------------------------------------------------


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command and return its standard output."""
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True)
    return done.stdout.decode("utf8", "replace")


def fetch_debian(name: str, version: str, work: Path) -> Path:
    """Download and unpack a Debian package; returns the folder. The version is only recorded."""
    target = work / "debian" / name
    if not target.exists():
        run(["apt-get", "-q", "download", name], cwd=work)
        archive = next(work.glob(f"{name}_*.deb"))
        if version not in archive.name.replace("%3a", ":"):
            print(f"note: {name}: got {archive.name}, the manifest has {version}", file=sys.stderr)
        target.mkdir(parents=True)
        run(["dpkg", "-x", str(archive), str(target)])
    return target


def fetch_npm(name: str, version: str, work: Path) -> Path:
    """Download and unpack an npm package; returns the folder that holds its files."""
    target = work / "npm" / name.replace("/", "-").lstrip("@")
    if not target.exists():
        packed = run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=work).split()[-1]
        with tarfile.open(work / packed) as archive:
            archive.extractall(target, filter="data")
    return target / "package"


def fetch_pypi(name: str, version: str, work: Path) -> Path:
    """Download and unpack a wheel; returns the folder."""
    target = work / "pypi" / name
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work)]
        run([*command, f"{name}=={version}"])
        wheel = next(work.glob(f"{name.replace('-', '_')}-{version}*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


FETCHERS = {"debian": fetch_debian, "npm": fetch_npm, "pypi": fetch_pypi}


# --- text forms -----------------------------------------------------------------------------


def clean(text: str) -> str:
    """Collapse white space and drop control characters."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufeff]", "", text.replace("\xa0", " "))
    return re.sub(r"\s+", " ", text).strip()


def unwrap(text: str) -> Iterator[str]:
    """Split hard-wrapped text at blank lines and join the lines of every paragraph."""
    for block in re.split(r"\n\s*\n", text.replace("\r", "")):
        yield clean(block)


def strip_tags(text: str) -> Iterator[str]:
    """Paragraphs of an HTML or OSIS text; block tags end a paragraph, others vanish."""
    text = re.sub(r"(?is)<(script|style|head|note)\b.*?</\1>", " ", text)
    text = re.sub(rf"(?i){BLOCK_TAGS}", "\n\n", text)
    yield from unwrap(html.unescape(re.sub(r"<[^>]+>", "", text)))


def from_html(folder: Path, source: Source) -> Iterator[str]:
    """Every HTML file that matches the pattern."""
    for path in sorted(folder.glob(source["file"])):
        yield from strip_tags(path.read_text("utf8", "replace"))


def from_text(folder: Path, source: Source) -> Iterator[str]:
    """Every plain, hard-wrapped file that matches the pattern."""
    for path in sorted(folder.glob(source["file"])):
        yield from unwrap(path.read_text("utf8", "replace"))


def from_gzip_text(folder: Path, source: Source) -> Iterator[str]:
    """A gzip'd plain file, without its tables (lines drawn with box characters)."""
    text = gzip.decompress((folder / source["file"]).read_bytes()).decode("utf8", "replace")
    lines = ("" if re.search(r"[\u2500-\u257f]", line) else line for line in text.splitlines())
    yield from unwrap("\n".join(lines))


def from_bible(folder: Path, source: Source) -> Iterator[str]:
    """A SWORD Bible, dumped by mod2imp; `file` is the module's name. Paragraphs span verses."""
    root = folder / "usr/share/sword"
    dump = run(["env", f"SWORD_PATH={root}", "mod2imp", source["file"]])
    entries = re.sub(r"(?m)^\$\$\$.*\n", source.get("between", " "), dump)
    yield from (part.strip("\u00b6 ") for part in strip_tags(entries))


def from_commentary(folder: Path, source: Source) -> Iterator[str]:
    """A SWORD commentary: every entry begins a paragraph; entries are repeated per verse."""
    yield from from_bible(folder, source | {"between": "\n\n"})


def from_plays(folder: Path, source: Source) -> Iterator[str]:
    """Markdown plays: emphasis and heading marks removed, verse lines joined."""
    for path in sorted(folder.glob(source["file"])):
        text = re.sub(r"[*_]{1,2}|^#+ ", "", path.read_text("utf8"), flags=re.MULTILINE)
        yield from unwrap(re.sub(r"^([A-Z][A-Z ,.']+?) *$", r"\1:", text, flags=re.MULTILINE))


def from_factbook(folder: Path, source: Source) -> Iterator[str]:
    """Field texts of at least 120 characters from the country files."""

    def texts(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "text" and isinstance(value, str):
                    yield value
                else:
                    yield from texts(value)

    for path in sorted(folder.glob(source["file"])):
        for text in texts(json.loads(path.read_text("utf8"))):
            if len(text) >= 120:
                yield from (clean(part) for part in text.split("++"))


def from_recipes(folder: Path, source: Source) -> Iterator[str]:
    """Recipes as title, list of ingredients, numbered steps."""
    for recipe in json.loads((folder / source["file"]).read_text("utf8")).values():
        steps = " ".join(recipe["steps"])
        if len(steps) > 80:
            yield clean(recipe["title"]) + "."
            yield "Ingredients: " + clean("; ".join(recipe["ingredients"])) + "."
            yield clean(steps)


def rdb_books(raw: bytes) -> Iterator[str]:
    """Character vectors of more than 1,000 lines in an R lazy-load database."""
    position = 0
    while position < len(raw) - 4:  # records: 4-byte length, then a zlib stream
        stream = zlib.decompressobj()
        data = stream.decompress(raw[position + 4 :])
        position = len(raw) - len(stream.unused_data)
        lines, end = [], 0
        for match in re.finditer(rb"\x00[\x00-\xff]{2}\x09(....)", data, re.DOTALL):
            size = struct.unpack(">i", match[1])[0]
            if match.start() >= end and 0 <= size < 5000 and match.end() + size <= len(data):
                end = match.end() + size
                lines.append(data[match.end() : end].decode("utf8", "replace"))
        if len(lines) > 1000:
            yield "\n".join(lines)


def from_austen(folder: Path, source: Source) -> Iterator[str]:
    """One novel of the janeaustenr package, chosen by the source's name."""
    books = list(rdb_books((folder / source["file"]).read_bytes()))
    yield from unwrap(books[BOOK_ORDER.index(source["name"])].replace("_", ""))


EXTRACTORS: dict[str, Callable[[Path, Source], Iterator[str]]] = {
    "html": from_html,
    "text": from_text,
    "gzip": from_gzip_text,
    "bible": from_bible,
    "commentary": from_commentary,
    "plays": from_plays,
    "factbook": from_factbook,
    "recipes": from_recipes,
    "austen": from_austen,
}


def join(paragraphs: Iterable[str], longest_repeat: int) -> str:
    """One text with a blank line between paragraphs; longer paragraphs are kept once only."""
    seen: set[str] = set()
    kept = []
    for paragraph in paragraphs:
        if len(paragraph) < 2 or (len(paragraph) > longest_repeat and paragraph in seen):
            continue
        seen.add(paragraph)
        kept.append(paragraph)
    return "\n\n".join(kept) + "\n"


# --- main -----------------------------------------------------------------------------------


def fetch(source: Source, work: Path) -> str:
    """The clean text of one source."""
    folder = FETCHERS[source["ecosystem"]](source["package"], source["version"], work)
    paragraphs = EXTRACTORS[source["form"]](folder, source)
    if source["group"] != "train":
        return join(paragraphs, longest_repeat=sys.maxsize)
    return join(paragraphs, longest_repeat=0 if source["form"] == "commentary" else 40)


def pack_books(texts: Path, sources: list[Source], assets: Path) -> None:
    """Write the two held-out books that ship with the package, xz-compressed."""
    assets.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if source["group"] == "held-out-shipped":
            raw = (texts / f"{source['name']}.txt").read_bytes()
            packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
            (assets / f"{source['name']}.txt.xz").write_bytes(packed)


def main() -> None:
    """Fetch everything, report digests that differ from the manifest, or record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="working folder")
    parser.add_argument("--record", action="store_true", help="write digests to the manifest")
    parser.add_argument("--books", type=Path, help="folder for the two compressed books")
    args = parser.parse_args()
    texts = args.out / "texts"
    work = args.out / "packages"
    for folder in (texts, work):
        folder.mkdir(parents=True, exist_ok=True)
    manifest = json.loads(MANIFEST.read_text("utf8"))
    for source in manifest["sources"]:
        raw = fetch(source, work).encode("utf8")
        digest = hashlib.sha256(raw).hexdigest()
        (texts / f"{source['name']}.txt").write_bytes(raw)
        state = "same" if digest == source.get("sha256") else "differs from the manifest"
        print(f"{source['name']}: {len(raw) / 1e6:.2f} MB, {state}")
        if args.record:
            source.update(sha256=digest, bytes=len(raw))
    if args.record:
        MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n", "utf8")
    if args.books:
        pack_books(texts, manifest["sources"], args.books)


if __name__ == "__main__":
    main()
