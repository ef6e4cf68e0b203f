"""Sphinx's settings: ``sphinx-build -W -n docs docs/_build/html`` (extra ``moesim[docs]``). Pages are Markdown (MyST)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import generated  # noqa: E402 (it lies beside this file)
from pydantic import BaseModel  # noqa: E402

from moesim import __version__  # noqa: E402

project = "moesim"
release = version = __version__
copyright = "the authors of moesim, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = "moesim"
html_copy_source = False
smartquotes = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "model_config, model_post_init, model_fields, model_computed_fields"}
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_rtype = False
# Names in annotations, most of which have no page of their own. Those that pages name are checked by tests/test_docs.py.
nitpick_ignore_regex = [("py:.*", ".*")]


def _fill(_app: Any, name: str, source: list[str]) -> None:
    source[0] = generated.fill(source[0], name.count("/"))


def _no_fields(_app: Any, _what: str, _name: str, thing: Any, *_rest: Any) -> tuple[str, None] | None:
    """The fields of specs have tables of their own; as a signature they are a page of annotations."""
    return ("", None) if isinstance(thing, type) and issubclass(thing, BaseModel) else None


def setup(app: Any) -> None:
    """Fill in what pages ask to be generated."""
    app.connect("source-read", _fill)
    app.connect("autodoc-process-signature", _no_fields)
