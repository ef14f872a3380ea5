"""OpenAI's completion interface: bodies read strictly, answers in its form.

What of that interface is not served is refused by name, unless it asks for nothing. Beside it a
body may hold every parameter of :mod:`fixedstate.serve.asked`, and an answer holds `token_ids`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fixedstate.errors import (
    BackendError,
    BusyError,
    CapacityError,
    FixedStateError,
    StateError,
    UsageError,
)
from fixedstate.serve.answers import Ending, Piece
from fixedstate.serve.asked import Asked, Limits, field_of, read, short

PLACE = "{text}"
"""Where the content of a message goes in the template of a turn."""

# Fields that are taken as long as they ask for nothing.
_NOTHING: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
_ROLES = ("system", "developer", "user", "assistant")
_MESSAGE = ("role", "content")
_FIELDS = (*_NOTHING, "model", "stream", "stream_options", "user", "messages")

_STATUS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (BusyError, 429, "rate_limit_error", "queue_full"),
    (CapacityError, 400, "invalid_request_error", "context_length_exceeded"),
    (UsageError, 400, "invalid_request_error", None),
    (StateError, 400, "invalid_request_error", "state_refused"),
    (BackendError, 503, "server_error", "unavailable"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A completion that was asked for.

    Attributes:
        asked: What is to be decoded.
        chat: Whether it is a chat completion.
        stream: Whether the answer is sent block by block.
        usage: Whether a stream ends with the numbers of tokens.
        running_usage: Whether every event before holds those so far (``continuous_usage_stats`` of
            vLLM): a block is many tokens, so a client that measures cannot count events.
    """

    asked: Asked
    chat: bool
    stream: bool
    usage: bool
    running_usage: bool = False

    @property
    def operation(self) -> str:
        """Its name in measurements."""
        return "chat" if self.chat else "text_completion"


def read_call(
    body: Mapping[str, Any], limits: Limits, *, model: str, turn: str | None = None
) -> Call:
    """Read the body of a completion.

    Args:
        body: As :func:`fixedstate.serve.asked.read_json` gave it.
        limits: Of the server.
        model: The name of the only model.
        turn: Of a chat: what a message of the system or the user becomes, ``{text}`` in its place.
            None for a plain completion.

    Raises:
        UsageError: naming the field that is wrong or not served; `model` for another model.
        CapacityError, StateError: as :func:`fixedstate.serve.asked.read`.
    """
    given = {name: value for name, value in body.items() if value is not None}
    wanted = given.pop("model", model)
    if wanted != model or not isinstance(wanted, str):
        raise unknown_model(wanted, model)
    for name, harmless in _NOTHING.items():
        value = given.pop(name, None)
        if value is not None and not any(_same(value, one) for one in harmless):
            raise UsageError(f"{name} is not supported: leave it out")
    if not isinstance(given.pop("user", ""), str):
        raise UsageError("user must be a text")
    stream = _flag(given.pop("stream", False), "stream")
    options = given.pop("stream_options", {})
    if not isinstance(options, dict) or set(options) - set(_STREAM_OPTIONS):
        raise UsageError(
            f"stream_options must be an object that holds {' or '.join(_STREAM_OPTIONS)}, if "
            "anything"
        )
    if options and not stream:
        raise UsageError("stream_options goes with stream: leave it out")
    usage, running = (_flag(options.get(name, False), name) for name in _STREAM_OPTIONS)
    if running and not usage:
        raise UsageError("continuous_usage_stats goes with include_usage: ask for both")
    if turn is None:
        text, ids = _prompt(given.pop("prompt", None))
    else:
        text, ids = _conversation(given.pop("messages", None), turn), None
    asked = read(given, limits, text=text, ids=ids)
    if asked.return_state and asked.stop:
        raise UsageError(
            "return_state does not go with stop: the state would hold what stands behind the stop "
            "text; give stop_ids"
        )
    return Call(asked, turn is not None, stream, usage, running)


def _prompt(value: object) -> tuple[object, object]:
    """Text and ids, one of them None: a text, a list of ids, or one of these in a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if value is None:
        raise UsageError("prompt is missing: give a text or a list of token ids")
    if isinstance(value, list) and any(isinstance(entry, (str, list)) for entry in value):
        raise UsageError("prompt holds several prompts: ask for one at a time")
    return (value, None) if isinstance(value, str) else (None, value)


def _conversation(messages: object, turn: str) -> str:
    """The text of a chat so far: turns of the user as the template has them, answers as they were.

    It is the text that ``fixedstate chat`` goes through, line by line.
    """
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of one message or more")
    parts = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise UsageError(f"{where} must be an object with role and content")
        unknown = sorted(set(message) - set(_MESSAGE))
        if any(message[name] is not None for name in unknown):
            raise UsageError(f"{where} holds {short(unknown[0])}: only role and content are served")
        role = message.get("role")
        if role not in _ROLES:
            raise UsageError(f"{where} has role {short(role)}; expected {', '.join(_ROLES)}")
        content = _content(message.get("content"), where)
        parts.append(content if role == "assistant" else turn.replace(PLACE, content))
    if messages[-1]["role"] == "assistant":
        raise UsageError("messages must end with a message to answer, not with one of assistant")
    return "".join(parts)


def _content(value: object, where: str) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UsageError(f"{where} has no content: expected a text")
    for part in value:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or set(part) != {"type", "text"}
        ):
            raise UsageError(f"{where} holds a part that is no text: only texts are served")
        if not isinstance(part["text"], str):
            raise UsageError(f"{where} holds a part whose text is none")
    return "".join(part["text"] for part in value)


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _flag(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise UsageError(f"{name} must be true or false")
    return value


# --- answers -------------------------------------------------------------------------------------


class Form:
    """The form of one answer.

    Args:
        call: What was asked.
        request_id: The id of the request.
        model: The name of the model.
        created: Seconds since 1970.

    Attributes:
        prompt_tokens: Tokens of the prompt; None where they are not known yet.
    """

    def __init__(self, call: Call, request_id: str, model: str, created: int) -> None:
        self._call = call
        self.prompt_tokens: int | None = None
        prefix, kind = ("chatcmpl", "chat.completion") if call.chat else ("cmpl", "text_completion")
        chunk = f"{kind}.chunk" if call.chat and call.stream else kind
        self._head = {
            "id": f"{prefix}-{request_id}",
            "object": chunk,
            "created": created,
            "model": model,
        }
        self._first = True
        self._sent = 0  # tokens

    def whole(self, pieces: list[Piece], ending: Ending) -> dict[str, Any]:
        """A whole answer."""
        text = "".join(piece.text for piece in pieces)
        ids = [token for piece in pieces for token in piece.token_ids]
        said = (
            {"message": {"role": "assistant", "content": text}}
            if self._call.chat
            else {"text": text}
        )
        choice = self._choice(said, ids, ending)
        usage = self._whole_usage(ending)
        return {**self._head, "choices": [choice], "usage": usage, **_state(ending)}

    def piece(self, piece: Piece, ending: Ending | None) -> bytes:
        """An event of a stream: a block, with the ending where it is the last."""
        if self._call.chat:
            role = {"role": "assistant"} if self._first else {}
            said: dict[str, Any] = {"delta": {**role, "content": piece.text}}
        else:
            said = {"text": piece.text}
        self._first = False
        self._sent = ending.new_tokens if ending else self._sent + len(piece.token_ids)
        choice = self._choice(said, list(piece.token_ids), ending)
        so_far = self._usage(self._sent) if self._call.running_usage else None
        usage = {"usage": so_far} if self._call.usage else {}
        state = _state(ending) if ending else {}
        return event({**self._head, "choices": [choice], **usage, **state})

    def last(self, ending: Ending) -> bytes:
        """What stands behind the last block of a stream."""
        done = b"data: [DONE]\n\n"
        if not self._call.usage:
            return done
        return event({**self._head, "choices": [], "usage": self._whole_usage(ending)}) + done

    def _choice(
        self, said: dict[str, Any], ids: list[int], ending: Ending | None
    ) -> dict[str, Any]:
        reason = ending.finish_reason if ending else None
        return {"index": 0, **said, "token_ids": ids, "logprobs": None, "finish_reason": reason}

    def _whole_usage(self, ending: Ending) -> dict[str, Any]:
        return self._usage(ending.new_tokens) | {"denoise_passes": ending.denoise_passes}

    def _usage(self, new_tokens: int) -> dict[str, Any]:
        prompt = self.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new_tokens,
            "total_tokens": None if prompt is None else prompt + new_tokens,
        }


def _state(ending: Ending) -> dict[str, Any]:
    if ending.state is None:
        return {}
    return {"state": base64.b64encode(ending.state).decode("ascii")}


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


# --- refusals ------------------------------------------------------------------------------------


def unknown_model(wanted: object, model: str) -> UsageError:
    """The refusal of a model that is not served here."""
    return UsageError(f"model {short(wanted)} is not served here; the model is {model!r}")


def status_of(error: FixedStateError) -> int:
    """The HTTP status of an error."""
    if _speaks_of_model(error):
        return 404
    return next((status for kind, status, _, _ in _STATUS if isinstance(error, kind)), 500)


def error_body(error: FixedStateError) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    found = next((entry for entry in _STATUS if isinstance(error, entry[0])), None)
    kind, code = (found[2], found[3]) if found else ("server_error", None)
    if _speaks_of_model(error):
        code = "model_not_found"
    return problem(str(error), kind, code, field_of(error, _FIELDS))


def problem(
    message: str, kind: str, code: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _speaks_of_model(error: FixedStateError) -> bool:
    return type(error) is UsageError and field_of(error, _FIELDS) == "model"
