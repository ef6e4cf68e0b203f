"""Owns ``moesim models``."""

from __future__ import annotations

import typer

from moesim import resources
from moesim.cli.bundled import show_list
from moesim.cli.options import ListFormat, ListOutput
from moesim.model import ModelSpec
from moesim.model_files import load_model

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog="Example: moesim models -o json")
def models(output: ListOutput = ListFormat.text) -> None:
    """List the bundled models."""
    show_list({name: describe(load_model(path)) for name, path in resources.names("models").items()}, output)


def describe(model: ModelSpec) -> str:
    """Return a model in one line."""
    layers = len(model.moe_layers)
    of = f"{layers}" if layers == model.n_layers else f"{layers} of {model.n_layers}"
    return f"{model.params_total / 1e9:.4g} B parameters, {of} MoE layers, top {model.top_k} of {model.n_experts} experts"
