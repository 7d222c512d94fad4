"""Collects the training text of the embedded `tiny` checkpoint.

Every source is open for this use (permissive licence or public domain) and comes from where
anyone can get it: the standard library of the running interpreter, the Python packages installed
beside it, and documentation packages of Debian, fetched with `apt-get download` and unpacked
without installing. A document is one file, or one section of a book-length file. Documents are
cleaned, stripped of exact and near duplicates, and split by document into train and held-out.

    python training/tiny/corpus.py        ->  build/train.jsonl, build/heldout.jsonl
                                              build/manifest.json
"""

import hashlib
import html.parser
import importlib.metadata
import json
import platform
import re
import subprocess
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

BUILD = Path(__file__).parent / "build"
LONGEST_DOCUMENT = 200_000  # bytes
SHORTEST_DOCUMENT = 400  # bytes
HELDOUT_SHARE = 0.025  # of the documents
LONGEST_HELDOUT = 50_000  # bytes: one long file would outweigh many
SHINGLE_LINES = 8
TEST_FILE_SHARE = 0.1  # tests repeat themselves: more of them teaches less per byte


@dataclass(frozen=True)
class Source:
    """Where a set of documents comes from and why it may be used."""

    package: str  # Debian or PyPI name
    origin: str  # "stdlib" | "pypi" | "debian"
    kind: str  # "code" | "prose"
    licence: str  # SPDX identifier
    pattern: str = "**/*.py"  # debian only: files inside the unpacked package
    reader: str = "plain"  # "plain" | "html" | "dictd" | "sword"


@dataclass(frozen=True)
class Document:
    """One cleaned text."""

    path: str
    package: str
    kind: str
    text: str

    def digest(self) -> str:
        """Hash of the content, which decides everything that is decided per document."""
        return hashlib.sha256(self.text.encode()).hexdigest()


PYPI = {
    "Apache-2.0": "absl-py etils flax jax optax orbax-checkpoint treescope",
    "BSD-3-Clause": "click numpy psutil traitlets",
    "MIT": "anyio attrs einops h11 jsonschema markdown-it-py opt_einsum parso platformdirs "
    "pytest PyYAML referencing rich",
}
RUST_BOOKS = "book edition-guide embedded-book nomicon reference rust-by-example rustc rustdoc"
SOURCES = (
    Source("python", "stdlib", "code", "PSF-2.0"),
    *(Source(p, "pypi", "code", licence) for licence, ps in PYPI.items() for p in ps.split()),
    Source("python3.11-doc", "debian", "prose", "PSF-2.0", "**/_sources/**/*.rst.txt"),
    Source("python-pandas-doc", "debian", "prose", "BSD-3-Clause", "**/_sources/**/*.rst.txt"),
    Source("python-sklearn-doc", "debian", "prose", "BSD-3-Clause", "**/_sources/**/*.rst.txt"),
    Source("postgresql-doc-15", "debian", "prose", "PostgreSQL", "**/*.html", "html"),
    Source("sqlite3-doc", "debian", "prose", "public domain", "**/*.html", "html"),
    *(
        Source("rust-doc", "debian", "prose", "MIT OR Apache-2.0", f"**/html/{b}/**/*.html", "html")
        for b in RUST_BOOKS.split()
    ),
    Source("dict-devil", "debian", "prose", "public domain", "**/*.dict.dz", "dictd"),
    Source("dict-jargon", "debian", "prose", "public domain", "**/*.dict.dz", "dictd"),
    Source("sword-text-web", "debian", "prose", "public domain", "**/*.bzz", "sword"),
)

# Vendored code under other licences, generated tables and data written as code.
UNWANTED_PATH = re.compile(
    r"(^|/)(site-packages|lib2to3|encodings|pydoc_data|_vendor|third_party|vendored|Icons|data"
    r"|.*testdata|.*_data|cjkencodings|crashers|typing/tests)/"
    r"|_pb2\.py$|_gen\.py$|(^|/)(_cm_listed|table_\w+|badsyntax\w*|bad_\w*)\.py$"
    r"|/AMDGPU/|modules/generated/|auto_examples/|reference/api/"
    r"|(genindex|search|py-modindex|print|toc|bookindex|all)\.html$"
)


def installed_files(source: Source) -> Iterator[tuple[str, Path]]:
    """Yields (name, file) of the standard library or of an installed package, in name order."""
    if source.origin == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = ((p.relative_to(root).as_posix(), p) for p in root.rglob("*.py"))
    else:
        files = importlib.metadata.distribution(source.package).files or ()
        found = ((str(f), Path(str(f.locate()))) for f in files if f.suffix == ".py")
    for name, path in sorted(found):
        digest = hashlib.sha256(name.encode()).digest()
        is_test = re.search(r"(^|[/_])tests?[/_]", name)
        sampled_out = is_test and digest[0] >= 256 * TEST_FILE_SHARE
        if not sampled_out and ".." not in name:
            yield name, path


def unpacked(package: str) -> tuple[Path, str]:
    """Fetches a Debian package into the cache; returns its unpacked folder and its version."""
    cache = BUILD / "cache" / package
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob("*.deb")):
        try:
            subprocess.run(
                ["apt-get", "-q", "download", package], cwd=cache, check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(
                f"the Debian package {package} could not be downloaded; the corpus is built on "
                "Debian 12 or a relative of it, after `apt-get update`"
            ) from error
    archive = next(cache.glob("*.deb"))
    if not (cache / "usr").exists():
        subprocess.run(["dpkg", "-x", archive, cache], check=True)
    version = subprocess.run(
        ["dpkg-deb", "-f", archive, "Version"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return cache, version


class PageText(html.parser.HTMLParser):
    """Text of an HTML page: blocks on their own lines, `pre` verbatim, navigation left out."""

    BLOCK = frozenset("p div li ul ol dl dt dd tr table pre h1 h2 h3 h4 h5 h6 section br".split())
    VOID = frozenset("br hr img input link meta col wbr source area base".split())
    SILENT_TAG = frozenset("script style nav header footer head button svg title".split())
    SILENT_CLASS = frozenset(
        "navheader navfooter toc headerlink related sphinxsidebar sidebar nav-wrapper toc_box "
        "menu header footer anchor mark genealogy nosearch desktoponly mobileonly".split()
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.open: list[tuple[str, bool]] = []
        self.silent = 0
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCK:
            self.pieces.append("\n")
        if tag in self.VOID:
            return
        classes = set((dict(attrs).get("class") or "").split())
        silent = tag in self.SILENT_TAG or bool(classes & self.SILENT_CLASS)
        self.open.append((tag, silent))
        self.silent += silent
        self.verbatim += tag == "pre"
        if tag == "li":
            self.pieces.append("- ")
        if tag in ("h1", "h2", "h3", "h4", "p", "pre", "dl"):
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if not any(name == tag for name, _ in self.open):
            return
        while self.open:  # also closes what the page left open inside
            name, silent = self.open.pop()
            self.silent -= silent
            self.verbatim -= name == "pre"
            if name == tag:
                break
        if tag in self.BLOCK:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.pieces.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def page_text(page: str) -> str:
    """Plain text of one HTML page."""
    parser = PageText()
    parser.feed(page)
    text = re.sub(r"\n[ \t]+(?=\n)|\n ?-? *(?=\n)", "\n", "".join(parser.pieces))
    return re.sub(r"\n (?=\S)", "\n", re.sub(r"\n{3,}", "\n\n", text))


def dictd_sections(raw: bytes) -> Iterator[str]:
    """Yields sections of about 40 kB of a dictd dictionary, cut between entries."""
    entries = re.split(r"\n(?=\S)", zlib.decompress(raw, wbits=31).decode())
    section: list[str] = []
    for entry in entries:
        section.append(entry)
        if sum(map(len, section)) > 40_000:
            yield "\n".join(section)
            section = []
    yield "\n".join(section)


def sword_sections(path: Path) -> Iterator[str]:
    """Yields the chapters of a SWORD module, without its notes and markup."""
    data = path.read_bytes()
    index = path.with_suffix(".bzs").read_bytes()
    for at in range(0, len(index), 12):
        start = int.from_bytes(index[at : at + 4], "little")
        size = int.from_bytes(index[at + 4 : at + 8], "little")
        if not size:
            continue
        book = zlib.decompress(data[start : start + size]).decode()
        book = re.sub(r"<note.*?</note>|<title type=\"x-.*?</title>", "", book, flags=re.DOTALL)
        for chapter in re.split(r"<chapter [^>]*sID=[^>]*>", book):
            text = re.sub(r"<l\b[^>]*>", "\n", re.sub(r"\s+", " ", chapter))
            text = re.sub(r"<(p|lg|div|title)\b[^>]*>", "\n\n", text)
            text = re.sub(r"\s+([,.;:?!’”])", r"\1", re.sub(r"<[^>]*>", "", text))
            yield re.sub(r"\n{3,}", "\n\n", re.sub(r" *\n *", "\n", text))


def raw_documents(source: Source) -> Iterator[tuple[str, str]]:
    """Yields (name, text) before cleaning, in name order."""
    if source.origin != "debian":
        for name, path in installed_files(source):
            try:
                with tokenize.open(path) as file:  # honours a declared source encoding
                    yield name, file.read()
            except (SyntaxError, UnicodeDecodeError, OSError):
                continue
        return
    root, _ = unpacked(source.package)
    paths = sorted(p for p in root.glob(source.pattern) if p.is_file() and not p.is_symlink())
    for path in paths:
        name = path.relative_to(root).as_posix()
        if UNWANTED_PATH.search(name):
            continue
        if source.reader == "dictd":
            sections = dictd_sections(path.read_bytes())
        elif source.reader == "sword":
            sections = sword_sections(path)
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
            yield name, page_text(text) if source.reader == "html" else text
            continue
        for number, text in enumerate(sections):
            yield f"{name}#{number:04d}", text


def clean(text: str) -> str:
    """Normalises newlines and blank space, drops a leading licence notice, cuts long text."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "").lstrip("\ufeff")
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    notice = re.match(r"(?:#!?[^\n]*\n|\n)+", text)
    if notice and re.search(r"licen[cs]e|copyright", notice[0], re.IGNORECASE):
        text = text[notice.end() :]
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"
    encoded = text.encode()
    if len(encoded) > LONGEST_DOCUMENT:
        text = encoded[: encoded.rindex(b"\n", 0, LONGEST_DOCUMENT) + 1].decode()
    return text


def is_text(text: str) -> bool:
    """False for what is data rather than writing: long lines, tables of numbers, broken text."""
    size = len(text)
    if len(text.encode()) < SHORTEST_DOCUMENT or "\ufffd" in text:
        return False
    lines = text.split("\n")
    digits = sum(c.isdigit() for c in text)
    foreign = sum(ord(c) > 127 for c in text)
    longest = max(map(len, lines))
    return digits < 0.12 * size and foreign < 0.05 * size and longest < 5_000


def without_furniture(documents: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Removes lines that stand on very many pages of one source: menus, notices, footers."""
    pages = Counter(line for _, text in documents for line in set(text.split("\n")))
    limit = max(8, len(documents) // 12)
    repeated = {line for line, n in pages.items() if n > limit and len(line.strip()) > 3}
    return [
        (name, "\n".join(line for line in text.split("\n") if line not in repeated))
        for name, text in documents
    ]


def shingles(text: str) -> set[int]:
    """Hashes of every run of SHINGLE_LINES non-blank lines."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    count = max(1, len(lines) - SHINGLE_LINES + 1)
    runs = ("\n".join(lines[i : i + SHINGLE_LINES]) for i in range(count))
    return {int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest()) for run in runs}


def collect() -> list[Document]:
    """Reads, cleans and de-duplicates every source; the order is fixed by SOURCES and by name."""
    seen: set[int] = set()
    kept: list[Document] = []
    for source in tqdm(SOURCES, desc="sources", unit="source"):
        documents = [
            (name, text)
            for name, raw in raw_documents(source)
            if not UNWANTED_PATH.search(name) and is_text(text := clean(raw))
        ]
        if source.reader == "html":
            pages = without_furniture(documents)
            documents = [(name, text) for name, raw in pages if is_text(text := clean(raw))]
        for name, text in documents:
            runs = shingles(text)
            if len(runs & seen) > 0.4 * len(runs):
                continue
            seen |= runs
            kept.append(Document(name, source.package, source.kind, text))
    return kept


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Splits by content hash; a candidate that shares runs of lines with training stays there."""
    candidates = [
        int(d.digest()[:8], 16) < HELDOUT_SHARE * 2**32 and len(d.text.encode()) <= LONGEST_HELDOUT
        for d in documents
    ]
    trained: set[int] = set()
    for document, candidate in zip(documents, candidates, strict=True):
        if not candidate:
            trained |= shingles(document.text)
    train, heldout = [], []
    for document, candidate in zip(documents, candidates, strict=True):
        runs = shingles(document.text) if candidate else set()
        unseen = candidate and len(runs & trained) <= 0.1 * len(runs)
        (heldout if unseen else train).append(document)
    return train, heldout


def version(source: Source) -> str:
    """Version of the package that a source was read from."""
    if source.origin == "stdlib":
        return platform.python_version()
    if source.origin == "pypi":
        return importlib.metadata.version(source.package)
    return unpacked(source.package)[1]


def describe(split_name: str, documents: list[Document]) -> dict:
    """Totals of one split, in all and per kind and package."""
    text = hashlib.sha256()
    packages: dict[str, dict[str, int]] = {}
    kinds: Counter[str] = Counter()
    for document in documents:
        size = len(document.text.encode())
        text.update(document.text.encode())
        kinds[document.kind] += size
        entry = packages.setdefault(document.package, {"documents": 0, "bytes": 0})
        entry["documents"] += 1
        entry["bytes"] += size
    return {
        "split": split_name,
        "documents": len(documents),
        "bytes": sum(kinds.values()),
        "bytes_by_kind": dict(kinds),
        "sha256": text.hexdigest(),
        "packages": packages,
    }


def main() -> None:
    """Builds both splits and the manifest."""
    BUILD.mkdir(exist_ok=True)
    splits = dict(zip(("train", "heldout"), split(collect()), strict=True))
    for name, documents in splits.items():
        with (BUILD / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for document in documents:
                file.write(json.dumps(vars(document), ensure_ascii=False) + "\n")
    sources = {
        s.package: {"origin": s.origin, "kind": s.kind, "licence": s.licence, "version": version(s)}
        for s in SOURCES
    }
    manifest = {"sources": sources, "splits": [describe(n, d) for n, d in splits.items()]}
    (BUILD / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for entry in manifest["splits"]:
        kinds = ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in entry["bytes_by_kind"].items())
        print(f"{entry['split']}: {entry['documents']} documents, {kinds}")


if __name__ == "__main__":
    main()
