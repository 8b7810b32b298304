"""The command line: parse, one call, show. No equation and no rule lives here.

Every module of this folder that has a ``register(app)`` adds its command; adding a command is adding a file.
Exit status: 0 done, 1 the answer is no, 2 the input is wrong (one line on stderr, never a traceback).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

import typer

from ..errors import TrainwrightError, nearest, one_line
from .output import prepare_streams

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # the parser that typer builds on has no public name for it

HELP = """Plan, explain, simulate and check distributed training of large language models.

Examples:

  trainwright plan llama-3.1-70b --on 64xH100 -o plan.toml

  trainwright memory 7B --on 8xA100-80GB --zero 3

  trainwright schedule 1f1b --stages 4 --microbatches 8
"""


def build() -> typer.Typer:
    """The application with the commands of every module of this folder, in alphabetical order."""
    app = typer.Typer(name="trainwright", help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback(invoke_without_command=True)
    def common(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    ) -> None:
        if version:
            from .. import __version__

            typer.echo(f"trainwright {__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    for module in sorted(m.name for m in iter_modules(__path__)):
        register = getattr(import_module(f"{__name__}.{module}"), "register", None)
        if register is not None:
            register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command line and exits with its status."""
    prepare_streams()
    gc.set_threshold(50_000)  # hundreds of modules make few cycles: looking for them at every 700 objects is a tenth of a short command
    try:
        status = _status(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has gone: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:  # a full disk behind standard output
        status = _fail(f"standard output: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _status(arguments: Sequence[str] | None) -> int:
    command = typer.main.get_command(build())
    try:
        status = command.main(args=arguments, prog_name="trainwright", standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare command: its help, which is no mistake
            print(error)
            return 0
        return _fail(_usage(error))
    except TrainwrightError as error:
        return _fail(str(error))
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except SystemExit:  # no command exits by itself: typer or rich at a pipe whose reader has gone (with 1), or the shell's completion
        return 0
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}")
    except RecursionError:
        return _fail("the input is nested too deeply")
    return status if isinstance(status, int) else 0


def _usage(error: Exception) -> str:
    """One line for a wrong option or argument, with the nearest option or command there is."""
    message = one_line(error.format_message()) if hasattr(error, "format_message") else one_line(error)
    message = message.rstrip(".")
    context = getattr(error, "ctx", None)
    where = f"{context.command_path}: " if context is not None else ""
    if "nearest" in message or "Did you mean" in message or "Possible options" in message or context is None:
        return where + message
    word = getattr(error, "option_name", None)
    if word is None and message.startswith("No such command"):
        commands = sorted(name for name, c in getattr(context.command, "commands", {}).items() if not c.hidden)
        near = nearest(message.split("'")[1] if "'" in message else message, commands) or commands
        return f"{where}{message} (nearest: {', '.join(near)})" if near else where + message
    if word:
        options = [o for p in context.command.params for o in p.opts]
        near = nearest(word, options)
        return f"{where}{message} (nearest: {', '.join(near)})" if near else where + message
    return where + message


def _fail(message: str) -> int:
    print(f"trainwright: {message}" if not message.startswith("trainwright") else message, file=sys.stderr)
    return 2
