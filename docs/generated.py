"""Owns what the pages show that no one writes by hand: help of every command, keys of every file, pictures of real runs, notebooks.

A page asks with a line such as ``<!-- generated: schema scenario -->``; ``conf.py`` puts Markdown in its place before it is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
from typer.testing import CliRunner

from moesim.cli.main import COMMANDS, app, command_paths
from moesim.schema import schema

ROOT = Path(__file__).resolve().parents[1]
REQUEST = re.compile(r"^<!-- generated: (\w+) ?(.*?) -->$", re.M)


def fill(text: str, depth: int) -> str:
    """Return a page with what it asks for; ``depth`` is the number of folders that it lies below ``docs``."""
    return REQUEST.sub(lambda found: MAKERS[found[1]](found[2], depth), text)


def commands(_what: str, _depth: int) -> str:
    """Help of every command, as the program prints it."""
    out, group = [], ""
    for path in command_paths():
        help_text = CliRunner().invoke(app, [*path, "--help"], terminal_width=86, prog_name="moesim", catch_exceptions=False).output
        level = "##" if len(path) == 1 else "###"
        if len(path) == 2 and path[0] != group:
            out.append(f"## {path[0]}\n\n{COMMANDS[path[0]][1]}\n")
        group = path[0]
        out.append(f"{level} {' '.join(path)}\n\n```text\n{help_text.rstrip()}\n```\n")
    return "\n".join(out)


def keys(kind: str, _depth: int) -> str:
    """Tables of the keys of one kind of file, from its JSON Schema."""
    data = schema(kind)
    parts = {name: part for name, part in data.get("$defs", {}).items() if not name.startswith("Figure-")}
    return "\n".join([_part(kind, "", data, data), *(_part(kind, name, part, data) for name, part in parts.items())])


def _part(kind: str, name: str, part: dict[str, Any], data: dict[str, Any]) -> str:
    if "anyOf" in part:
        part = part["anyOf"][-1]
    lines = [f"({kind}-{name})=\n### {name}\n"] if name else []
    lines += [_escape_stars(part.get("description", "")), "", "| key | takes | default | |", "|---|---|---|---|"]
    for key, field in part.get("properties", {}).items():
        default = "required" if key in part.get("required", ()) else _default(field)
        about = field.get("description", "") if "pattern" not in field else ""
        lines.append("| " + " | ".join(_cell(x) for x in (f"`{key}`", _takes(kind, field, data), default, about)) + " |")
    return "\n".join(lines) + "\n"


def _default(field: dict[str, Any]) -> str:
    """What a key is without being stated; parts with defaults of their own show those in their own table."""
    value = field.get("default")
    return "" if isinstance(value, (dict, list)) or value is None else f"`{json.dumps(value)}`"


def _takes(kind: str, field: dict[str, Any], data: dict[str, Any]) -> str:
    """What a key takes, in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        if not name.startswith("Figure-"):
            return f"[{name}](#{kind}-{name})"
        return _takes(kind, data["$defs"][name]["anyOf"][0], data) + " ([figure](#figures))"
    if "pattern" in field and "description" in field:
        return str(field["description"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_takes(kind, x, data) for x in field[union] if x.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_takes(kind, field['items'], data)}" if field.get("items") else "list"
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        names = field.get("propertyNames", {}).get("enum")
        of = "" if not names else f" by {', '.join(f'`{name}`' for name in names)}"
        return f"mapping{of} of {_takes(kind, inner, data)}" if isinstance(inner, dict) and inner else "mapping"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if field.get("type") in ("integer", "number") and low is not None:
        small = high is not None and high < 10**9
        return f"{words[field['type']]}, {'above ' if 'exclusiveMinimum' in field else ''}{low:g}{f' to {high:g}' if small else ' or more'}"
    return words.get(field.get("type", ""), "any value")


def _cell(text: str) -> str:
    return _escape_stars(" ".join(text.split())).replace("|", "\\|")


def _escape_stars(text: str) -> str:
    return text.replace("``", "`").replace("*", "\\*")


def figure(name: str, depth: int) -> str:
    """A picture of a real run, drawn now, with what it shows as its text."""
    path, text = figures.draw(name)
    return f"![{text}]({'../' * depth}{path})"


def notebooks(_what: str, depth: int) -> str:
    """Links to the notebooks that are there."""
    found = sorted((ROOT / "notebooks").glob("*.ipynb"))
    lines = [f"- {{download}}`{_title(path)} <{'../' * (depth + 1)}notebooks/{path.name}>`" for path in found]
    return "\n".join(lines) or "There are none in this checkout."


def _title(path: Path) -> str:
    """The first heading of a notebook, else its name."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    heading = re.search(r"^# (.+)$", text, re.M)
    return heading[1].replace("`", "") if heading else path.stem


def claims(_what: str, _depth: int) -> str:
    """The table at the end of the executed notebook on field claims."""
    notebook = json.loads((ROOT / "notebooks" / "09_field_claims.ipynb").read_text(encoding="utf-8"))
    outputs = [output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return ["".join(data["text/markdown"]) for data in outputs if "text/markdown" in data][-1]


MAKERS: dict[str, Callable[[str, int], str]] = {
    "commands": commands,
    "schema": keys,
    "figure": figure,
    "notebooks": notebooks,
    "claims": claims,
}
