"""The ``fixedstate`` command: one module a verb, loaded when the verb is used.

Results go to standard output, words for people to standard error. Exit codes: 0 (also with
warnings), 1 for an error or a failed comparison, 2 for a wrong request, 130 for Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from fixedstate import __version__
from fixedstate.cli.options import Session, debug_option
from fixedstate.errors import FixedStateError

VERBS = (
    "export",
    "calibrate",
    "build",
    "generate",
    "chat",
    "serve",
    "triton",
    "client",
    "prefix",
    "replay",
    "inspect",
    "check",
    "demo",
)
INTERRUPTED = 130

# What each extra of the package brings; a missing one is a sentence, not a traceback.
_EXTRAS = {
    "onnxruntime": "ort",
    "torch": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "ml_dtypes": "export",
    "filelock": "export",
    "platformdirs": "export",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "tritonclient": "triton",
    "google": "triton",
    "scipy": "calib",
    "matplotlib": "calib",
}


class Verbs(click.Group):
    """A group that imports a verb's module on use and turns every failure into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order of a user's day."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, its module imported now."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"fixedstate.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; an unknown one is refused with the list of those there are."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}: use one of {', '.join(VERBS)}")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line and leave the process with its exit code."""
        session = Session()
        extra |= {"standalone_mode": False, "obj": session}
        sys.exit(_guarded(lambda: super(Verbs, self).main(*args, **extra), session))


def _guarded(work: Any, session: Session) -> int:
    """Run the parsed command; say what went wrong in one line and return the exit code."""
    try:
        code = work()
        sys.stdout.flush()
    except click.ClickException as err:
        return _complain(_usage(err), err.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _reader_left()
    except FixedStateError as err:
        if session.debug:
            traceback.print_exc()
        return _complain(str(err), err.exit_code)
    except ModuleNotFoundError as err:
        if session.debug or err.name not in _EXTRAS:
            return _unexpected(err, session.debug)
        extra = _EXTRAS[err.name]
        return _complain(
            f"the package {err.name} is not installed: pip install 'fixedstate[{extra}]'", 1
        )
    except Exception as err:
        return _unexpected(err, session.debug)
    return code if isinstance(code, int) else 0


def _complain(text: str, code: int) -> int:
    click.echo(f"error: {' '.join(text.split())}", err=True)
    return code


def _usage(err: click.ClickException) -> str:
    context = getattr(err, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return err.format_message() + hint


def _unexpected(err: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    hint = "" if debug else " (--debug shows where)"
    return _complain(f"{type(err).__name__}: {err}{hint}", 1)


def _reader_left() -> int:
    """Whoever read standard output has gone; nothing can be said there any more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", message="%(prog)s %(version)s")
@debug_option
@click.pass_context
def cli(context: click.Context) -> None:
    """Export block-diffusion checkpoints to graphs with explicit state, and decode with them.

    Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 an
    error or a failed comparison, 2 a wrong request, 130 Ctrl-C.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: The words after ``fixedstate``; those of the process if not given.

    Returns:
        The exit code.
    """
    try:
        cli.main(args=None if args is None else list(args), prog_name="fixedstate")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    return 0
