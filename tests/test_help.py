"""Help of every command, nested ones too, fits one screen and has an example; a shell completes commands, options and bundled names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from moesim.cli.main import app, command_paths


@pytest.mark.parametrize("path", list(command_paths()), ids=" ".join)
def test_help_fits_one_screen_and_has_an_example(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path, "--help"], terminal_width=100, prog_name="moesim")
    assert done.exit_code == 0 and len(done.output.splitlines()) <= 40
    assert f"moesim {' '.join(path)}" in " ".join(done.output.partition("Example")[2].split())


COMPLETIONS = {
    "moesim swe": {"sweep"},
    "moesim run quick": {"quickstart"},
    "moesim run quickstart --hardware ref": {"ref-16gb"},
    "moesim hardware lap": {"laptop-8gb"},
    "moesim size over": {"overnight"},
    "moesim sweep quick": {"quickstart-switches"},
    "moesim trace info tiny": {"tinymoe"},
    "moesim schema sc": {"scenario"},
    "moesim run quickstart -o m": {"md"},
    "moesim run --time": {"--timeline"},
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_completion(line: str) -> None:
    words = {"_MOESIM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    code = "import sys; from moesim.cli.main import main; sys.argv = ['moesim']; main()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True)
    assert set(done.stdout.split()) == COMPLETIONS[line], done.stderr


def test_a_shell_can_load_it() -> None:
    words = {"_MOESIM_COMPLETE": "source_bash"}
    done = subprocess.run([sys.executable, "-m", "moesim"], env=os.environ | words, capture_output=True, text=True)
    assert "complete -o default -F _moesim_completion moesim" in done.stdout, done.stderr
