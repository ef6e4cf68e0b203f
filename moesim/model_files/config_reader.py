"""Owns typed access to the keys of a foreign description (config.json, GGUF metadata): a value of the right type, or a named refusal.

It must not know what the keys mean. A key that is null counts as absent, as it does for the programs that write these files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from moesim.errors import InputError

MAX_INT = 2**40  # above any dimension or count in these files (architecture.MAX_DIM), and exact in every type that reads it
T = TypeVar("T")


@dataclass(frozen=True)
class Keys:
    """The keys of one mapping.

    Parameters
    ----------
    data : Mapping
        Keys and values.
    where : str
        The file, for messages.
    prefix : str
        Path of the mapping inside the file, e.g. ``"text_config."``.
    """

    data: Mapping[str, Any]
    where: str
    prefix: str = ""

    def has(self, *names: str) -> bool:
        """True if one of these keys has a value."""
        return any(self.data.get(name) is not None for name in names)

    def key(self, *names: str) -> str:
        """Return the first of these keys that has a value, or "" if none has."""
        return next((name for name in names if self.data.get(name) is not None), "")

    def fail(self, name: str, expected: str, got: str, fix: str = "") -> InputError:
        """Return (to be raised) the error for one key."""
        return InputError(self.prefix + name, expected=expected, got=got, fix=fix, where=self.where)

    def missing(self, what: str, *names: str) -> InputError:
        """Return (to be raised) the error for a value that no key gives, with the keys that were seen."""
        seen = ", ".join(sorted(map(str, self.data))[:40])
        expected = names[0] if len(names) == 1 else "one of " + ", ".join(names)
        fix = f"keys seen: {seen or 'none'}"
        return InputError(f"{self.prefix}{names[0]}", expected=f"{what} ({expected})", got="none", fix=fix, where=self.where)

    def require_int(self, what: str, *names: str, low: int = 1) -> int:
        """Return the whole number under the first of these keys that has a value; refuse if none has."""
        value = self.int(*names, low=low)
        if value is None:
            raise self.missing(what, *names)
        return value

    @overload
    def int(self, *names: str, low: int = 1) -> int | None: ...

    @overload
    def int(self, *names: str, default: int, low: int = 1) -> int: ...

    def int(self, *names: str, default: int | None = None, low: int = 1) -> int | None:
        """Return the whole number (``low`` or more) under the first of these keys that has a value, or the default."""
        name = self.key(*names)
        if not name:
            return default
        value = self.data[name]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_INT:
            raise self.fail(name, f"a whole number of {low} or more", _show(value))
        return value

    def bool(self, *names: str, default: bool = False) -> bool:
        """Return the truth value under the first of these keys that has a value, or the default."""
        name = self.key(*names)
        if not name:
            return default
        value = self.data[name]
        if not isinstance(value, bool):
            raise self.fail(name, "true or false", _show(value))
        return value

    def text(self, *names: str) -> str:
        """Return the text under the first of these keys that has a value, or ""."""
        name = self.key(*names)
        if not name:
            return ""
        value = self.data[name]
        if not isinstance(value, str):
            raise self.fail(name, "text", _show(value))
        return value

    def items(self, name: str, kind: type[T], what: str) -> list[T] | None:
        """Return a list whose entries all have one type, or None."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(x, kind) and (kind is bool or not isinstance(x, bool)) for x in value):
            raise self.fail(name, f"a list of {what}", _show(value))
        return value

    def below(self, name: str) -> Keys | None:
        """Return a nested mapping, or None."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(name, "a mapping", _show(value))
        return Keys(value, self.where, f"{self.prefix}{name}.")


def _show(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
