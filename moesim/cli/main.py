"""Owns the command line's frame: the table of commands, exit codes, and how errors are shown. It knows no command's options.

A command's module is imported when the command is used, so that ``moesim --help`` starts fast. Data goes to stdout; errors,
progress and notes to stderr. An error is one line, ``error: ...``; a traceback appears only with ``MOESIM_DEBUG=1``, and only for bugs.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moesim import __version__
from moesim.cli.options import EXIT_BROKEN_PIPE
from moesim.errors import EXIT_INPUT, EXIT_INTERNAL, MoesimError

EXIT_INTERRUPTED = 130  # 128 + SIGINT

# command -> (module, first line of its help); a test compares the two.
COMMANDS = {
    "run": ("moesim.cli.run", "Simulate a scenario: does it fit, how fast is it, and why."),
    "sweep": ("moesim.cli.sweep", "Compute many points of a scenario and find the best."),
    "serve-sim": ("moesim.cli.serve_sim", "Simulate serving: requests arrive and wait, batches form."),
    "whatif": ("moesim.cli.whatif", "Show what a scenario's speed depends on, and what to change."),
    "size": ("moesim.cli.size", "Find machines and upgrades that meet needs, cheapest first."),
    "doctor": ("moesim.cli.doctor", "Check a scenario for what usually goes wrong, and its cost."),
    "report": ("moesim.cli.report", "Write a page that shows one run or compares several."),
    "ui": ("moesim.cli.ui", "Open a page to try models, machines and policies on."),
    "budget": ("moesim.cli.budget", "Show where the memory goes, and the largest context."),
    "from-llama": ("moesim.cli.from_llama", "Turn a llama.cpp command line into a scenario."),
    "suggest-flags": ("moesim.cli.suggest_flags", "Search the fastest llama.cpp flags for a scenario."),
    "models": ("moesim.cli.models", "List the bundled models."),
    "hardware": ("moesim.cli.hardware", "List the bundled hardware profiles, and parts to compose."),
    "scenarios": ("moesim.cli.scenarios", "List the bundled scenarios."),
    "calibrate": ("moesim.cli.calibrate", "Measure this machine as a hardware profile."),
    "validate": ("moesim.cli.validate", "Run schedules on real experts, compare with the simulation."),
    "quality": ("moesim.cli.quality", "Measure what precision costs in quality, find the best plan."),
    "backtest": ("moesim.cli.backtest", "Predict what other people measured, and say how far off."),
    "trace": ("moesim.cli.trace", "Look into routing traces."),
    "schema": ("moesim.cli.schema", "Print the JSON Schema of a kind of file, for editors."),
}


class LazyGroup(TyperGroup):
    """The commands of the table, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = typer.main.get_command(importlib.import_module(COMMANDS[cmd_name][0]).app)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


EXAMPLES = "Example: moesim run quickstart --set workload.output_tokens=32 --plot run.png"
app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, pretty_exceptions_enable=False)


def command_paths() -> Iterator[tuple[str, ...]]:
    """All commands that do something, by the words that call them."""
    return _paths(typer.main.get_command(app), ())


def _paths(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    names = command.list_commands(None) if hasattr(command, "list_commands") else []
    for name in names:
        yield from _paths(command.get_command(None, name), (*path, name))
    if not names:
        yield path


def _version(wanted: bool) -> None:
    if wanted:
        print(f"moesim {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def moesim(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Will this Mixture-of-Experts model fit this machine, how fast will it run, and what should change?"""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_INPUT)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing but a bug of ours gives 1."""
    try:
        code = app(args=arguments, prog_name="moesim", standalone_mode=False)
        if code == EXIT_BROKEN_PIPE:
            raise BrokenPipeError
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except MoesimError as error:
        if error.exit_code == EXIT_INTERNAL:
            return _bug(error)
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains while it shuts down
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # what typer raises of a wrong command line, in all its versions
        if usage is not None:
            return _fail(usage(), EXIT_INPUT)
        return _bug(error)


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _bug(error: Exception) -> int:
    if os.environ.get("MOESIM_DEBUG") == "1":
        traceback.print_exception(error)
    what = str(error) if isinstance(error, MoesimError) else f"{type(error).__name__}: {error}"
    return _fail(f"internal: {what}; this is a bug in moesim, MOESIM_DEBUG=1 shows where", EXIT_INTERNAL)


def main() -> None:
    """Entry point of the command ``moesim``."""
    sys.exit(run())
