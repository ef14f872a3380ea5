"""``fixedstate serve``: a bundle behind OpenAI's HTTP interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.chat import turn_option
from fixedstate.cli.opening import engine_options, open_decoder, open_text
from fixedstate.cli.options import NATURAL, POSITIVE, debug_option, real
from fixedstate.cli.output import note
from fixedstate.cli.trace import check_trace, trace_options, traced
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from socket import socket

    from fixedstate.runtime import Decoder
    from fixedstate.serve.answers import Answers
    from fixedstate.serve.app import Service
    from fixedstate.serve.asked import Limits

_TOKEN = "FIXEDSTATE_TOKEN"
_LOCAL = ("127.0.0.1", "::1", "localhost")

# Options about a decoder in this process.
_LOCAL_ONLY = (
    *("slots", "queue", "prefix_cache", "profile_json", "trace", "max_context", "memory"),
    *("threads", "provider", "allow_fallback", "engine_cache", "head"),
)


@click.command("serve", short_help="Serve a bundle over HTTP.")
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.option(
    "--triton",
    metavar="HOST:PORT",
    help="Let a Triton server answer instead of a bundle (its gRPC port).",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    default=8000,
    help="Port to listen on, 0 for a free one [default: 8000].",
)
@click.option(
    "--name", metavar="NAME", help="Of the model [default: the folder's, or `fixedstate`]."
)
@click.option(
    "--slots",
    type=POSITIVE,
    metavar="N",
    default=16,
    help="Requests decoded at once [default: 16].",
)
@click.option(
    "--queue",
    type=NATURAL,
    metavar="N",
    default=64,
    help="Requests that may wait for a slot [default: 64].",
)
@click.option(
    "--max-prompt-tokens",
    type=POSITIVE,
    metavar="N",
    default=4096,
    help="Refuse longer prompts [default: 4096].",
)
@click.option(
    "--max-new-tokens",
    type=POSITIVE,
    metavar="N",
    default=1024,
    help="Refuse requests for more tokens [default: 1024].",
)
@click.option(
    "--max-body-bytes",
    type=POSITIVE,
    metavar="N",
    default=1 << 20,
    help="Refuse larger requests, saved states left out [default: 1048576].",
)
@click.option(
    "--max-state-bytes",
    type=NATURAL,
    metavar="N",
    default=16 << 20,
    help="Refuse larger saved states, 0 for all [default: 16777216].",
)
@click.option(
    "--prefix-cache",
    type=POSITIVE,
    metavar="BYTES",
    help="Keep states of beginnings that prompts share.",
)
@turn_option
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Token that clients must send [default: ${_TOKEN}, else none].",
)
@click.option(
    "--drain-seconds",
    type=real(0),
    metavar="S",
    default="30",
    help="Time for open answers at SIGTERM [default: 30].",
)
@click.option(
    "--access-log/--no-access-log",
    default=True,
    help="Log every request [default: access-log].",
)
@click.option("--log-json", is_flag=True, help="Log JSON lines.")
@trace_options
@click.option("--force", is_flag=True, help="Replace what is at --trace and --profile-json.")
@engine_options
@debug_option
@click.pass_context
def command(context: click.Context, /, bundle: Path | None, **options: Any) -> None:
    """Serve BUNDLE over HTTP until SIGTERM or Ctrl-C.

    /v1/completions and /v1/chat/completions as OpenAI has them, /v1/models, /health/live,
    /health/ready, and /metrics for Prometheus. A line on standard error says when the first pass is
    done. SIGTERM lets open answers finish and exits with 0, Ctrl-C with 130; a second one ends them
    at once. Needs the extra `serve`.

    With --triton the model of a Triton server answers (`fixedstate triton`), --name names it, and
    its own limits hold as well.
    """
    _check(context, bundle, options["triton"])
    check_trace(options)
    token = _token(options["token_file"])
    limits = _limits(options)
    import asyncio  # only here: every start of the command line would pay for it

    from fixedstate.serve import logs, server
    from fixedstate.serve.app import Service

    with server.bind(options["host"], options["port"]) as sock:
        with traced(options) as watch:
            answers, name = _answers(bundle, options, limits, watch)
            logs.set_up(as_json=options["log_json"])
            service = Service(
                answers,
                limits,
                name,
                turn=options["turn"],
                token=token,
                access_log=options["access_log"],
            )
            code = asyncio.run(_serve(service, sock, options))
    context.exit(code)


def _check(context: click.Context, bundle: Path | None, triton: str | None) -> None:
    """Refuse what does not go together."""
    if (bundle is None) == (triton is None):
        raise click.UsageError("give a BUNDLE, or --triton HOST:PORT, one of them")
    if triton is None:
        return
    given = click.core.ParameterSource.COMMANDLINE
    for param in context.command.params:
        name = param.name or ""
        if name in _LOCAL_ONLY and context.get_parameter_source(name) is given:
            raise click.UsageError(
                f"{param.opts[0]} does not go with --triton: the model there has its own"
            )


def _answers(
    bundle: Path | None,
    options: Mapping[str, Any],
    limits: Limits,
    watch: Callable[[Decoder], Decoder],
) -> tuple[Answers, str]:
    """What answers, and the name of its model."""
    if bundle is None:
        from fixedstate.serve.tritonanswers import TritonAnswers
        from fixedstate.serve.tritonstream import MODEL

        name = options["name"] or MODEL
        return TritonAnswers(options["triton"], name), name
    from fixedstate.cli.batch import keep_prefixes
    from fixedstate.serve.answers import LocalAnswers

    decoder = watch(open_decoder(bundle, options, options["slots"]))
    if options["prefix_cache"]:
        keep_prefixes(decoder, options["prefix_cache"])
    text = open_text(decoder.bundle, False)
    name = options["name"] or bundle.resolve().name
    return LocalAnswers(decoder, text, limits), name


async def _serve(service: Service, sock: socket, options: Mapping[str, Any]) -> int:
    """Serve until it is told to end; returns the exit code."""
    from fixedstate.serve.server import Server

    host, port = options["host"], sock.getsockname()[1]
    if host not in _LOCAL and not service.token:
        note(f"{host} can be reached from elsewhere and no token is asked for: give --token-file")
    place = f"[{host}]" if ":" in host else host

    def ready() -> None:
        click.echo(f"ready: http://{place}:{port}", err=True)

    return await Server(service, sock, drain_seconds=options["drain_seconds"], on_ready=ready).run()


def _limits(options: Mapping[str, Any]) -> Limits:
    from fixedstate.serve.asked import Limits

    return Limits(
        max_prompt_tokens=options["max_prompt_tokens"],
        max_new_tokens=options["max_new_tokens"],
        max_body_bytes=options["max_body_bytes"],
        max_state_bytes=options["max_state_bytes"],
        queue=options["queue"],
    )


def _token(file: Path | None) -> str:
    """What clients have to know; empty for nothing.

    Raises:
        UsageError: for a token that cannot stand in a header.
    """
    if file is None:
        where, token = f"${_TOKEN}", os.environ.get(_TOKEN, "")
        if not token:
            return ""
    else:
        where = str(file)
        try:
            token = file.read_text("utf-8").strip()
        except OSError as err:
            raise UsageError(f"{file} cannot be read: {err.strerror or err}") from err
        except UnicodeDecodeError as err:
            raise UsageError(f"{file} is not a UTF-8 text") from err
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{where} holds no token: expected one word of printable ASCII")
    return token
