"""Owns strict YAML: text with positions to a frozen pydantic spec, or an error that names file, line, field and fix.

It must not know what the specs mean. Anchors and aliases, duplicate keys, several documents, YAML 1.1's hidden booleans
(``no``, ``on``) and numbers that YAML 1.1 reads as text (``1.0e9``) are refused, because each has misled somebody.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import itertools
import json
import re
import shlex
import textwrap
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from moesim.errors import InputError, did_you_mean

MAX_FILE_BYTES = 4 * 1024 * 1024  # the largest bundled YAML is below 100 kB; a spec of megabytes is a mistake or an attack
MAX_DEPTH = 32

Path_ = tuple[str | int, ...]
S = TypeVar("S", bound="Spec")


class Spec(BaseModel):
    """Base of everything that comes from YAML: strict, frozen, compared by value, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = {f.alias or name for name, f in cls.model_fields.items()}
            for key in data:
                if key not in known:
                    raise PydanticCustomError("unknown_key", "{key}|{hint}", {"key": str(key), "hint": did_you_mean(str(key), known)})
        return data

    @classmethod
    def short_schema(cls, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the JSON Schema of the short form that the spec is also read from, given those of its fields; None where it has none."""
        return None

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        full = handler.resolve_ref_schema(schema)
        fields = full.get("properties", {})
        for name, text in field_comments(cls).items():
            fields[cls.model_fields[name].alias or name].setdefault("description", text)
        if short := cls.short_schema(fields):
            whole = dict(full)
            full.clear()
            full["anyOf"] = [short, whole]
        return schema


@lru_cache
def field_comments(spec: type[BaseModel]) -> dict[str, str]:
    """Return what the comments behind or above the fields of a spec say: the one place where a field is explained. Not all have one."""
    found: dict[str, str] = {}
    for base in reversed(spec.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base)) if issubclass(base, Spec) else ""
        except (OSError, TypeError):  # a generic that pydantic made has no source of its own
            continue
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
        behind = {t.start[0]: t.string.lstrip("# ") for t in tokens if not t.line.lstrip().startswith("#")}
        alone = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.line.lstrip().startswith("#")}
        for line in ast.walk(ast.parse(source)):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                above = itertools.takewhile(alone.__contains__, range(line.lineno - 1, 0, -1))
                text = behind.get(line.end_lineno or 0) or " ".join(reversed([alone[n] for n in above]))
                if text:
                    found[line.target.id] = text
    return {name: text for name, text in found.items() if name in spec.model_fields}


def problem(expected: str, got: str, fix: str = "") -> PydanticCustomError:
    """Return the error that a validator of a spec raises; ``build`` makes an InputError with these three texts of it."""
    message = "|".join(text.replace("|", "/") for text in (expected, got, fix))
    return PydanticCustomError("quantity", "{message}", {"message": message})


@dataclass(frozen=True)
class Document:
    """Parsed YAML: plain data, the line of every value by its path, and the ``path=value`` assignments that are in it."""

    data: Any
    source: str
    lines: dict[Path_, str] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()

    def where(self, path: Path_) -> str:
        """Return ``file:line`` of the deepest known part of ``path``."""
        for n in range(len(path), -1, -1):
            if path[:n] in self.lines:
                return self.lines[path[:n]]
        return self.source

    def set(self, assignments: Iterable[str]) -> Document:
        """Return a copy with ``path=value`` assignments of the command line applied (values are YAML)."""
        data, lines, texts = json.loads(json.dumps(self.data)), dict(self.lines), tuple(assignments)
        for text in texts:
            where = f"--set {text}"
            name, sign, value = text.partition("=")
            if not sign or not name.strip():
                raise InputError("--set", expected="path=value, as in cache.policy=lru", got=f'"{text}"')
            path: Path_ = tuple(int(p) if p.isascii() and p.isdigit() and len(p) < 10 else p for p in name.strip().split("."))
            parsed = parse_yaml(value, where, name.strip()).data if value.strip() else None
            here = data
            for i, part in enumerate(path[:-1]):
                if isinstance(here, dict) and not isinstance(here.get(part), (dict, list)):
                    here[part] = {}
                here = _step(here, part, path[: i + 1], where)
            if isinstance(here, list):
                _step(here, path[-1], path, where)
            elif not isinstance(here, dict):
                raise InputError(name, expected="a mapping to set a key in", got=repr(here), where=where)
            here[path[-1] if isinstance(here, list) else str(path[-1])] = parsed
            lines = {p: w for p, w in lines.items() if p[: len(path)] != path}
            lines[path] = where
        return Document(data, self.source, lines, (*self.assignments, *texts))


def assignment(path: str, value: Any) -> str:
    """Return ``path=value`` such that ``Document.set`` sets the value as it is."""
    return f"{path}={_written(value)}"


def command(scenario: str, assignments: Iterable[str], verb: str = "run") -> str:
    """Return the command line that runs a scenario with assignments."""
    return " ".join(["moesim", verb, shlex.quote(scenario), *(f"--set {shlex.quote(text)}" for text in assignments)])


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(str(key))}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, float):
        digits = format(Decimal(repr(value)), "f")
        return digits if "." in digits else f"{digits}.0"
    return value if isinstance(value, str) and _reads_back(value) else json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=4096)
def _reads_back(text: str) -> bool:
    """Whether YAML reads a bare text, inside braces too, as that text."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 _./%+-]*", text):
        return False
    try:
        return bool(parse_yaml(text, "text").data == text)
    except InputError:
        return False


def _step(here: Any, part: str | int, path: Path_, where: str) -> Any:
    try:
        return here[part if isinstance(here, list) else str(part)]
    except (KeyError, IndexError, TypeError):
        raise InputError(".".join(map(str, path)), expected="a place that exists", got="none there", where=where) from None


_LOOKS_NUMERIC = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)[eE][+-]?\d+$|[+-]?\.?inf$|nan$", re.IGNORECASE)
_HIDDEN_BOOLEANS = {"yes", "no", "on", "off", "y", "n"}


def _scalar(event: yaml.ScalarEvent, where: str, name: str) -> Any:
    text = event.value
    if event.tag is not None:
        raise InputError(name, expected="a plain value", got=event.tag, fix="remove the tag", where=where)
    if event.style is not None:
        return text
    if text.lower() in _HIDDEN_BOOLEANS:
        raise InputError(name, expected="true or false, or quoted text", got=text, fix=f'write true, false or "{text}"', where=where)
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?[0-9]+", text):
        if len(text) > 30:
            raise InputError(name, expected="a number of at most 30 digits", got=f"{len(text)} digits", where=where)
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+)", text):
        return float(text)
    if _LOOKS_NUMERIC.match(text):
        raise InputError(
            name,
            expected="a plain decimal number, or a quantity with a unit",
            got=text,
            fix="YAML 1.1 reads this as text; write the digits out",
            where=where,
        )
    return text


def parse_yaml(text: str, source: str, name: str = "") -> Document:
    """Parse one YAML document strictly. ``name`` is the field that the whole text is the value of, for messages.

    Raises
    ------
    InputError
        With ``source:line`` for syntax errors and each construct that the module docstring refuses.
    """
    lines: dict[Path_, str] = {}
    stack: list[tuple[Any, Path_, Any]] = []  # container, its path, pending key (mapping only)
    root: list[Any] = []
    no_key = object()
    documents = 0
    has_lines = not source.startswith("--")

    def add(value: Any, path: Path_, where: str) -> None:
        lines[path] = where
        if not stack:
            root.append(value)
        elif isinstance(stack[-1][0], list):
            stack[-1][0].append(value)
        else:
            container, at, key = stack[-1]
            container[key] = value
            stack[-1] = (container, at, no_key)

    def named(path: Path_) -> str:
        return ".".join([*([name] if name else []), *map(str, path)]) or "value"

    def next_path() -> Path_:
        if not stack:
            return ()
        container, at, key = stack[-1]
        return (*at, len(container)) if isinstance(container, list) else (*at, key)

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            where = f"{source}:{event.start_mark.line + 1}" if has_lines and event.start_mark is not None else source
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise InputError("YAML", expected="one document", got="a second one", fix="split the file", where=where)
            elif isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise InputError("YAML", expected="no anchors or aliases", got="one", fix="write the value out", where=where)
            elif isinstance(event, yaml.ScalarEvent):
                if stack and isinstance(stack[-1][0], dict) and stack[-1][2] is no_key:
                    key = event.value
                    container, at, _ = stack[-1]
                    if key in container:
                        raise InputError(
                            key, expected="each key once", got=f"it again (first on {lines[(*at, key)]})", fix="remove one", where=where
                        )
                    lines[(*at, key)] = where
                    stack[-1] = (container, at, key)
                else:
                    path = next_path()
                    add(_scalar(event, where, named(path)), path, where)
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                if event.tag is not None:
                    raise InputError("YAML tag", expected="plain values", got=event.tag, fix="remove the tag", where=where)
                if stack and isinstance(stack[-1][0], dict) and stack[-1][2] is no_key:
                    raise InputError("YAML key", expected="text", got="a list or mapping", where=where)
                if len(stack) >= MAX_DEPTH:
                    raise InputError("YAML", expected=f"at most {MAX_DEPTH} levels", got="more", fix="flatten the file", where=where)
                path = next_path()
                inner: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
                add(inner, path, where)
                stack.append((inner, path, no_key))
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                stack.pop()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark is not None and has_lines else source
        raise InputError(
            "YAML", expected="valid syntax", got=str(getattr(error, "problem", error) or error).replace("\n", " "), where=where
        ) from None
    return Document(root[0] if root else None, source, lines)


def read_text(path: str | Path, limit: int = MAX_FILE_BYTES) -> str:
    """Read a UTF-8 text file of at most ``limit`` bytes, without the byte order mark that some editors put before it; or raise an InputError
    that names it."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise InputError("file", expected="a file", got="a folder", where=str(path))
        if size > limit:
            raise InputError("file", expected=f"at most {limit} bytes", got=f"{size} bytes", where=str(path))
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError("file", expected="an existing file", got="none", fix="check the path", where=str(path)) from None
    except UnicodeDecodeError:
        raise InputError("file", expected="UTF-8 text", got="other bytes", where=str(path)) from None
    except OSError as error:
        raise InputError("file", expected="a readable file", got=error.strerror or str(error), where=str(path)) from None


def read_yaml(path: str | Path) -> Document:
    """Read and parse a YAML file strictly; see ``parse_yaml``."""
    return parse_yaml(read_text(path), str(path))


def read_plain_yaml(path: str | Path) -> Any:
    """Return the data of a YAML file that others wrote: read safely, but anchors are allowed and no lines are kept."""
    text = read_text(path)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        got = str(getattr(error, "problem", error) or error).replace("\n", " ")
        raise InputError("YAML", expected="valid syntax", got=got, where=where) from None


def build(spec: type[S], document: Document) -> S:
    """Validate a document against a spec.

    Raises
    ------
    InputError
        The first problem, with ``file:line``, field, expected, got and fix; further problems are counted.
    """
    if not isinstance(document.data, dict):
        raise InputError(
            "document",
            expected=f"a mapping of {', '.join(list(spec.model_fields)[:6])}, ...",
            got=_show(document.data),
            where=document.where(()),
        )
    try:
        return spec.model_validate(document.data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first, more = problems[0], len(problems) - 1
        failure = _to_input_error(dict(first), document)
        if more:
            failure = InputError(
                failure.what,
                expected=failure.expected,
                got=failure.got,
                where=failure.where,
                fix=(failure.fix + " " if failure.fix else "") + f"(and {more} more)",
            )
        raise failure from None


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return "nothing" if value is None else text if len(text) <= 80 else text[:77] + "..."


def _to_input_error(problem: dict[str, Any], document: Document) -> InputError:
    loc: Path_ = tuple(problem["loc"])
    # pydantic adds the names of union branches to the path; they are no keys of the file
    path: list[str | int] = []
    here = document.data
    for part in loc:
        inside = part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int) and part < len(here)
        if inside:
            here = here[part]
            path.append(part)
        elif problem["type"] == "missing" and part == loc[-1]:
            path.append(part)
    name = ".".join(map(str, path)) or "document"
    where = document.where(tuple(path))
    kind, message, got = problem["type"], str(problem["msg"]), _show(problem.get("input"))
    if kind == "unknown_key":
        key, hint = message.split("|", 1)
        at = (*path, key)
        return InputError(".".join(map(str, at)), expected="a known key", got=f'"{key}"', fix=hint, where=document.where(at))
    if kind == "quantity":
        expected, got, fix = message.split("|", 2)
        return InputError(name, expected=expected, got=got, fix=fix, where=where)
    if kind == "missing":
        return InputError(name, expected="a value", got="none", fix=f'add "{path[-1] if path else loc[-1]}"', where=where)
    if kind == "literal_error":
        expected = str(problem.get("ctx", {}).get("expected", ""))
        return InputError(
            name,
            expected=f"one of {expected}",
            got=got,
            fix=did_you_mean(str(problem.get("input")), re.findall(r"'([^']*)'", expected)).split("known:")[0].strip(),
            where=where,
        )
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return InputError(name, expected=message, got=got, where=where)


def content_hash(spec: BaseModel | Mapping[str, Any]) -> str:
    """Return the SHA-256 (16 hex digits) of a spec's canonical JSON: the identity used in provenance."""
    data = spec.model_dump(mode="json") if isinstance(spec, BaseModel) else spec
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()[:16]
