"""The training corpus: where the text comes from, how it is cleaned, and how it is split by document.

Five domains in three languages, so that a router has something to specialise on. All of it comes with ordinary package
clients or with Python itself:

    docs      Python manual, reStructuredText sources   Debian package python3.11-doc
    code      Python standard library source            the running interpreter
    glossary  WordNet words and glosses                 Debian package wordnet-base
    man-fr    manual pages in French                    Debian package manpages-fr
    man-de    manual pages in German                    Debian package manpages-de

A document is one file (for the glossary: 40 entries that follow one another in one lexicographer category). Its split
depends on a hash of its name alone, so it is the same on every machine and no document is in two splits; a French and
a German translation of the same manual page always fall into the same split. Documents under a licence of their own
are left out, and so are lines and sections that credit persons or give addresses: the texts are excerpts, the
copyright holders are named by the source packages (see NOTICE.md).

    python corpus.py --cache DIR        writes DIR/{train,calibration,heldout}.jsonl and DIR/sources.json
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import platform
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DOMAINS = ("docs", "code", "glossary", "man-fr", "man-de")
SPLITS = ("train", "calibration", "heldout")
SPLIT_PER_MILLE = {"heldout": 50, "calibration": 50}  # the rest is train
PACKAGES = {  # domain -> (Debian package, licence of what is used of it)
    "docs": ("python3.11-doc", "PSF-2.0"),
    "glossary": ("wordnet-base", "WordNet-3.0"),
    "man-fr": ("manpages-fr", "GPL-3.0-or-later"),
    "man-de": ("manpages-de", "GPL-3.0-or-later"),
}
MIN_CHARS = 600  # shorter documents are stubs

# a file that carries permission terms of its own is not covered by its package's main licence
OWN_LICENCE = re.compile(
    r"permission is hereby|permission to use, copy|redistribution and use|licensed under|licensed to|"
    r"general public license|mozilla public|creative commons|all rights reserved",
    re.IGNORECASE,
)
CREDIT = re.compile(
    r"[\w.+-]+@[\w-]+\.\w|https?://|\bauthors?\b|\bcopyright|\b(contributed|written|created|maintained|patch) by\b|"
    r"\bmaintainers?\b|(section|module|code)author|\bthanks to\b|\bcredits?\b",
    re.IGNORECASE,
)
# "by Given Family": case matters here, so it cannot be part of the expression above
NAMED = re.compile(r"\b(?:[Bb]y|[Ff]rom|von|par) [A-Z][a-z]+ (?:[A-Z]\. )?(?:[Vv]an )?[A-Z][a-z]+\b")
CREDIT_SECTION = re.compile(r"AUT(EUR|OR)|TRADUCTION|ÜBERSETZ|COPYRIGHT|DANKSAGUNG|REMERCIEMENT|BUGS|BOGUES|FEHLER|SIGNALER|COLOPHON")


def split_of(key: str) -> str:
    """Name of the split that the document with this key belongs to."""
    value = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 1000
    for split, per_mille in SPLIT_PER_MILLE.items():
        if value < per_mille:
            return split
        value -= per_mille
    return "train"


def fetch(package: str, cache: Path) -> tuple[Path, str]:
    """Download a Debian package with apt-get and unpack it, both only once; returns (folder, version)."""
    target = cache / "unpacked" / package
    debs = cache / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    found = sorted(debs.glob(f"{package}_*.deb"))
    if not found:
        subprocess.run(["apt-get", "download", "-q", package], cwd=debs, check=True)
        found = sorted(debs.glob(f"{package}_*.deb"))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", str(found[-1]), str(target)], check=True)
    shown = subprocess.run(["dpkg-deb", "-f", str(found[-1]), "Version"], check=True, capture_output=True, text=True)
    return target, shown.stdout.strip()


def drop_credits(text: str) -> str:
    """Remove lines that credit persons or give addresses, and squeeze runs of blank lines."""
    kept = (x.rstrip() for x in text.split("\n") if not (CREDIT.search(x) or NAMED.search(x)))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


def python_docs(root: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the manual's sources; without the chapters that are lists of changes, people or licences."""
    skip = ("whatsnew", "license", "about", "copyright", "bugs", "changelog", "contents")
    for base in sorted(root.glob("usr/share/doc/python3*/html/_sources")):
        for path in sorted(base.rglob("*.rst.txt")):
            name = path.relative_to(base).as_posix().removesuffix(".rst.txt")
            if not name.startswith(skip):
                yield name, path.read_text(encoding="utf-8")


def python_code() -> Iterator[tuple[str, str]]:
    """(name, text) of the standard library's modules; without tests, tables and generated files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # besides tests: tables (encodings), a copy of the manual (pydoc_data), near copies (lib2to3), demos
    skip = {"test", "tests", "idle_test", "lib2to3", "turtledemo", "encodings", "pydoc_data", "site-packages"}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        # config-* and _sysconfigdata are generated at build time: they tell of the machine, not of Python
        if not skip.intersection(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            yield "/".join(parts), path.read_text(encoding="utf-8", errors="replace")


def glossary(root: Path, per_document: int = 40) -> Iterator[tuple[str, str]]:
    """(name, text) of groups of WordNet entries, each entry a line "word, word (noun): gloss"."""
    kinds = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    groups: dict[str, list[str]] = {}
    for part in ("noun", "verb", "adj", "adv"):
        for line in (root / f"usr/share/wordnet/data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith("  "):  # the licence at the head of the file
                continue
            fields, gloss = line.split(" | ", 1)
            f = fields.split(" ")
            words = [re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in f[4 : 4 + 2 * int(f[3], 16) : 2]]
            groups.setdefault(f"{part}-{f[1]}", []).append(f"{', '.join(words)} ({kinds[f[2]]}): {gloss.strip()}")
    for category, lines in groups.items():
        if category == "noun-18":  # lexicographer file noun.person: largely a list of real persons
            continue
        for start in range(0, len(lines), per_document):
            yield f"{category}/{start // per_document:04d}", "\n".join(lines[start : start + per_document])


ROFF_CHARACTERS = dict.fromkeys("&|^/,%:", "") | {"e": "\\", "~": " ", "0": " "}  # any other character: itself
ROFF_NAMED = {"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "em": "—", "en": "–", "bu": "•"}
ROFF_NAMED |= {"ha": "^", "ti": "~", "Fo": "«", "Fc": "»", "rs": "\\"}


def plain_roff(source: str) -> str:
    """The text of a manual page: markup removed, headings, paragraphs and tagged items kept as lines."""
    lines: list[str] = []
    skipping = False
    for line in source.split("\n"):
        if line.startswith((".", "'")):
            macro, _, rest = line[1:].strip().partition(" ")
            if macro in ("SH", "Sh"):
                skipping = bool(CREDIT_SECTION.search(rest.upper()))
            if macro in ("SH", "Sh", "SS", "Ss"):
                line = "\n" + rest.strip('"')
            elif macro in ("B", "I", "BR", "RB", "IR", "RI", "BI", "IB", "SM", "SB"):
                glued = len(macro) == 2 and macro[0] != macro[1] and macro not in ("SM", "SB")
                line = re.sub(r'(?<!\\)"', "", rest.replace(" ", "") if glued and '"' not in rest else rest)
            elif macro in ("PP", "P", "LP", "TP", "IP", "HP", "Pp", "sp", "It"):
                line = "\n" + (rest.split('"')[1] if macro == "IP" and '"' in rest else "")
            else:
                continue
        if not skipping:
            lines.append(line)
    text = re.sub(r"\\f(?:\[\w*\]|\(..|.)|\\s[-+]?\d", "", "\n".join(lines))
    text = re.sub(r"\\\((..)|\\\[(\w\w)\]", lambda m: ROFF_NAMED.get(m[1] or m[2], ""), text)
    text = re.sub(r'\\".*', "", text)
    return re.sub(r"\\(.)", lambda m: ROFF_CHARACTERS.get(m[1], m[1]), text)


def manual_pages(root: Path, language: str) -> Iterator[tuple[str, str]]:
    """(name, text) of the manual pages of one language."""
    for path in sorted((root / "usr/share/man" / language).rglob("*.gz")):
        source = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
        if ".so " not in source[:200]:  # a page that only points to another one
            yield path.name.removesuffix(".gz"), plain_roff(source)


def documents(domain: str, cache: Path) -> tuple[list[tuple[str, str]], dict]:
    """All documents of a domain as (name, raw text), and where they come from."""
    if domain == "code":
        source = {"package": "Python standard library", "version": platform.python_version(), "licence": "PSF-2.0"}
        return list(python_code()), source
    package, licence = PACKAGES[domain]
    root, version = fetch(package, cache)
    readers = {"docs": python_docs, "glossary": glossary}
    reader = readers.get(domain) or (lambda r: manual_pages(r, domain.removeprefix("man-")))
    return list(reader(root)), {"package": package, "version": version, "licence": licence}


def collect(cache: Path) -> dict:
    """Write the three splits and sources.json to `cache`; returns what sources.json holds."""
    cache.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list[str]] = {name: [] for name in SPLITS}
    seen: set[bytes] = set()
    report: dict = {"domains": {}, "min_chars": MIN_CHARS, "split_per_mille": SPLIT_PER_MILLE}
    for domain in DOMAINS:
        found, entry = documents(domain, cache)
        entry |= {"documents": dict.fromkeys(SPLITS, 0), "bytes": dict.fromkeys(SPLITS, 0), "own_licence_left_out": 0}
        for name, raw in found:
            # only code files carry licence headers; prose that matches merely speaks of licences
            if domain == "code" and OWN_LICENCE.search(raw):
                entry["own_licence_left_out"] += 1
                continue
            text = drop_credits(raw)
            digest = hashlib.sha256(text.encode()).digest()
            if len(text) < MIN_CHARS or digest in seen:
                continue
            seen.add(digest)
            split = split_of(f"man/{name}" if domain.startswith("man-") else f"{domain}/{name}")
            splits[split].append(json.dumps({"domain": domain, "name": name, "text": text}, ensure_ascii=False))
            entry["documents"][split] += 1
            entry["bytes"][split] += len(text.encode())
        report["domains"][domain] = entry
    for name, lines in splits.items():
        (cache / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (cache / "sources.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def load_split(cache: Path, split: str) -> list[dict]:
    """Documents of a split, each {"domain", "name", "text"}; collects the corpus first where it is not there yet."""
    if not (cache / "sources.json").exists():
        collect(cache)
    with open(cache / f"{split}.jsonl", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def main() -> None:
    parser = argparse.ArgumentParser(description="collect the corpus of the tiny MoE model")
    parser.add_argument("--cache", type=Path, required=True, help="folder for downloads and the collected text")
    report = collect(parser.parse_args().cache)
    for domain, e in report["domains"].items():
        sizes = "  ".join(f"{s} {e['documents'][s]} docs {e['bytes'][s] / 1e6:.2f} MB" for s in SPLITS)
        print(f"{domain:9s} {e['package']} {e['version']}: {sizes}, {e['own_licence_left_out']} left out")


if __name__ == "__main__":
    main()
