"""Owns ``moesim ui``: the what-if page on this machine, for its own browser only."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import note
from moesim.errors import InputError
from moesim.scenario import load_scenario

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
ADDRESS = "127.0.0.1"
OPTIONS = {
    "server.address": ADDRESS,
    "server.fileWatcherType": "none",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",
    "theme.base": "light",
}


@app.command("ui", epilog="Example: moesim ui quickstart --port 8600")
def run(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="What the page starts with: a bundled name or a YAML file.")
    ] = "quickstart",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port on this machine.")] = 8501,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open a page to try models, machines and policies on. Ctrl-C ends it."""
    load_scenario(scenario)
    if find_spec("streamlit") is None:
        raise InputError("moesim ui", expected="the package streamlit", got="none", fix="pip install 'moesim[ui]'")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((ADDRESS, port))
        except OSError as error:
            raise InputError("--port", expected="a free port", got=f"{port}: {error.strerror}", fix="choose another with --port") from None
    from streamlit.web.cli import main  # an optional extra

    note(f"http://{ADDRESS}:{port}")
    page = Path(__file__).parents[1] / "ui" / "page.py"
    chosen = OPTIONS | {"server.port": str(port), "server.headless": "false" if browser else "true"}
    main(
        ["run", str(page), *(f"--{name}={value}" for name, value in chosen.items()), "--", scenario],
        prog_name="moesim ui",
        standalone_mode=False,
    )
