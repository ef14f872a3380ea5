"""What a request from outside asks, read strictly: a JSON body or the parameters of a Triton call.

Nothing is guessed: a type that is not exactly the expected one is refused, so is an unknown name,
NaN, infinity, and a number beyond the server's limits. What depends on the model (the vocabulary,
the context limit, the weights of a saved state) is checked by the scheduler.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from fixedstate.errors import CapacityError, FixedStateError, StateError, UsageError
from fixedstate.runtime.requests import Request, Settings

if TYPE_CHECKING:
    from fixedstate.runtime.snapshot import Snapshot
    from fixedstate.runtime.text import Text

PARAMETERS = (
    *("max_new_tokens", "min_new_tokens", "steps", "threshold", "temperature", "seed"),
    *("stop", "stop_ids", "state", "return_state"),
)
"""What a request may say beside its prompt."""

SAME = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""Other names of parameters, as OpenAI's interface has them."""

_MOST_STEPS = 1 << 16  # a block has 256 slots at most, and more steps than slots change nothing
_MOST_ID = 2**31 - 1
_MOST_STOPS = 16
_STOP_LENGTH = 256  # characters of a stop text, which are held back while they may still come
_NAME = re.compile(r"[a-z_]+")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes from one request, and how many may wait.

    Attributes:
        max_prompt_tokens: Tokens of a prompt; those of a saved state are not among them.
        max_new_tokens: Tokens that a request may ask for.
        max_body_bytes: Bytes of a request, a saved state left out; also of a prompt's text.
        max_state_bytes: Bytes of a saved state that a request brings; 0 refuses states.
        queue: Requests that wait for a slot.

    Raises:
        UsageError: for a limit that is no whole number or too small.
    """

    max_prompt_tokens: int = 4096
    max_new_tokens: int = 1024
    max_body_bytes: int = 1 << 20
    max_state_bytes: int = 16 << 20
    queue: int = 64

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            least = 0 if entry.name in ("queue", "max_state_bytes") else 1
            if type(value) is not int or value < least:
                raise UsageError(
                    f"{entry.name} must be a whole number, {least} or more; got {value!r}"
                )

    @property
    def body_bytes(self) -> int:
        """Bytes of a whole request, with a saved state in base64."""
        return self.max_body_bytes + -(-self.max_state_bytes // 3) * 4


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it was asked, every type and limit checked.

    Attributes:
        text: The prompt as text; None where it is given as ids.
        ids: The prompt as ids; None where it is given as text.
        settings: How it is decoded.
        stop: Texts that end the answer and do not stand in it.
        state: The saved state that the prompt goes on from.
        return_state: Whether the state behind the answer is wanted.
    """

    text: str | None
    ids: tuple[int, ...] | None
    settings: Settings = field(default_factory=Settings)
    stop: tuple[str, ...] = ()
    state: Snapshot | None = None
    return_state: bool = False

    def request(self, text: Text | None, limits: Limits) -> Request:
        """The same for a decoder, its text encoded.

        Args:
            text: The model's tokenizer; None where it has none.
            limits: Of the server.

        Raises:
            UsageError: for text or stop texts without a tokenizer, or text that the model has no
                ids for.
            CapacityError: for too many tokens.
        """
        if text is None and self.text is not None:
            raise UsageError(
                "prompt is a text, but this model has no tokenizer: give the prompt as token ids"
            )
        if text is None and self.stop:
            raise UsageError(
                "stop holds texts, but this model has no tokenizer: give stop_ids instead"
            )
        if self.text is not None:
            assert text is not None
            goes_on = self.state is not None and bool(
                self.state.past_length + len(self.state.pending)
            )
            ids = text.encode(self.text, goes_on=goes_on)
        else:
            ids = list(self.ids or ())
        if len(ids) > limits.max_prompt_tokens:
            raise CapacityError(
                f"prompt has {len(ids)} tokens; the server takes {limits.max_prompt_tokens}: "
                "shorten it"
            )
        return Request(ids, self.settings, prefix=self.state, keep_state=self.return_state)


def read(
    given: Mapping[str, object],
    limits: Limits,
    *,
    text: object = None,
    ids: object = None,
) -> Asked:
    """Read the parameters of a request and its prompt; None stands for what is not given.

    Args:
        given: Parameters by name: :data:`PARAMETERS` and :data:`SAME`. `stop` is a text or a list
            of texts, `stop_ids` a list of ids or, where lists cannot be sent, a text such as
            ``1,2,3``; `state` is base64 of :meth:`Snapshot.to_bytes`.
        limits: Of the server.
        text: The prompt as text.
        ids: The prompt as ids.

    Raises:
        UsageError: naming the parameter: unknown, of another type, out of range, or text and ids
            both or neither given.
        CapacityError: naming the parameter that exceeds a limit.
        StateError: for a saved state that is damaged or newer.
    """
    values = _values(given)
    names = {SAME.get(name, name): name for name, value in given.items() if value is not None}
    settings: dict[str, Any] = {}
    for name, least, most in (
        ("max_new_tokens", 1, None),
        ("min_new_tokens", 0, limits.max_new_tokens),
        ("steps", 1, _MOST_STEPS),
        ("seed", 0, 2**64 - 1),
    ):
        if name in values:
            settings[name] = _whole(values[name], names[name], least, most)
    for name, high in (("threshold", 1.0), ("temperature", math.inf)):
        if name in values:
            settings[name] = _real(values[name], name, high)
    new = settings.setdefault(
        "max_new_tokens", min(Settings().max_new_tokens, limits.max_new_tokens)
    )
    if new > limits.max_new_tokens:
        raise CapacityError(
            f"{names['max_new_tokens']} is {short(new)}; the server gives "
            f"{limits.max_new_tokens} at most"
        )
    if "stop_ids" in values:
        settings["stop_ids"] = _stop_ids(values["stop_ids"])
    return Asked(
        **_prompt(text, ids, limits),
        settings=Settings(**settings),
        stop=_stops(values.get("stop", ())),
        state=_state(values["state"], limits) if "state" in values else None,
        return_state=_flag(values.get("return_state", False), "return_state"),
    )


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object, strictly: no NaN, no name twice, no number that Python would not read.

    Raises:
        UsageError: with what is wrong.
    """
    try:
        found = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except RecursionError:
        raise UsageError("the body is nested too deeply: expected one flat JSON object") from None
    except ValueError as err:  # JSON, UTF-8, and numbers of too many digits
        raise UsageError(f"the body is no JSON: {err}") from err
    if not isinstance(found, dict):
        raise UsageError(f"the body must be a JSON object; got {short(found)}")
    return found


def field_of(error: FixedStateError, others: Collection[str] = ()) -> str | None:
    """The parameter that a refusal speaks of: the name that its message begins with.

    Args:
        error: What :func:`read` raised.
        others: Names that are known beside those of this module.
    """
    found = _NAME.match(str(error))
    name = found[0] if found else ""
    known = name in PARAMETERS or name in SAME or name == "prompt" or name in others
    return name if known else None


# --- one value each -------------------------------------------------------------------------------


def _values(given: Mapping[str, object]) -> dict[str, Any]:
    """What is given, under the names of :data:`PARAMETERS`."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        known = SAME.get(name, name)
        if known not in PARAMETERS:
            raise UsageError(
                f"unknown parameter {short(name)}; known parameters: "
                f"{', '.join((*PARAMETERS, *SAME))}"
            )
        if value is None:
            continue
        if known in values:
            raise UsageError(f"{name} and another name of {known} are both given: give one")
        values[known] = value
    return values


def _prompt(text: object, ids: object, limits: Limits) -> dict[str, Any]:
    if (text is None) == (ids is None):
        both = "neither" if text is None else "both"
        raise UsageError(f"prompt: give text or token ids, one of them; got {both}")
    if text is not None:
        return {"text": _text(text, "prompt", limits.max_body_bytes), "ids": None}
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        raise UsageError(f"prompt must be a text or a flat list of token ids; got {short(ids)}")
    if len(ids) > limits.max_prompt_tokens:
        raise CapacityError(
            f"prompt has {len(ids)} tokens; the server takes {limits.max_prompt_tokens}: shorten it"
        )
    return {"text": None, "ids": tuple(_whole(token, "prompt", 0, _MOST_ID) for token in ids)}


def _text(value: object, name: str, most: int) -> str:
    """A text that has UTF-8 bytes, and no more than `most` of them."""
    if type(value) is not str:
        raise UsageError(f"{name} must be a text; got {short(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{name} is not UTF-8: it holds half of a surrogate pair") from None
    if size > most:
        raise CapacityError(f"{name} has {size} bytes; the server takes {most}: shorten it")
    return value


def _whole(value: object, name: str, least: int, most: int | None) -> int:
    """A whole number; True is none, 1.0 is none."""
    if type(value) is not int or value < least or (most is not None and value > most):
        up_to = "or more" if most is None else f"to {most}"
        raise UsageError(f"{name} must be a whole number, {least} {up_to}; got {short(value)}")
    return value


def _real(value: object, name: str, high: float) -> float:
    """A finite number from 0 to `high`."""
    number = math.nan
    if type(value) is float or type(value) is int:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not (math.isfinite(number) and 0 <= number <= high):
        wanted = "0 or more and finite" if math.isinf(high) else f"between 0 and {high:g}"
        raise UsageError(f"{name} must be a number, {wanted}; got {short(value)}")
    return number


def _flag(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise UsageError(f"{name} must be true or false; got {short(value)}")
    return value


def _stops(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or len(texts) > _MOST_STOPS:
        raise UsageError(
            f"stop must be a text or a list of {_MOST_STOPS} texts at most; got {short(value)}"
        )
    for text in texts:
        if not text or len(_text(text, "stop", 4 * _STOP_LENGTH)) > _STOP_LENGTH:
            raise UsageError(
                f"stop holds {short(text)}: give texts of 1 to {_STOP_LENGTH} characters"
            )
    return tuple(texts)


def _stop_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*|", value):
        value = [int(word) for word in value.split(",") if word]
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_STOPS:
        raise UsageError(
            f"stop_ids must be a list of {_MOST_STOPS} token ids at most; got {short(value)}"
        )
    return tuple(_whole(token, "stop_ids", 0, _MOST_ID) for token in value)


def _state(value: object, limits: Limits) -> Snapshot:
    from fixedstate.runtime.snapshot import Snapshot

    if not limits.max_state_bytes:
        raise UsageError("state: this server takes no saved states: leave it out")
    if type(value) is not str:
        raise UsageError(f"state must be base64 of a saved state; got {short(value)}")
    try:
        data = base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as err:
        raise UsageError(f"state must be base64 of a saved state: {err}") from err
    if len(data) > limits.max_state_bytes:
        raise CapacityError(
            f"state has {len(data)} bytes; the server takes {limits.max_state_bytes}"
        )
    try:
        return Snapshot.from_bytes(data, "state")
    except StateError:
        raise
    except Exception as err:  # bytes from outside: whatever they break is theirs
        raise StateError(f"state is damaged: {type(err).__name__}") from err


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"the body holds {name}, which is no JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = iter(name for name, _ in pairs)
        seen: set[str] = set()
        while (twin := next(names)) not in seen:
            seen.add(twin)
        raise UsageError(f"{short(twin)} stands twice in the body: give it once")
    return found


def short(value: object) -> str:
    """A value in a message: never longer than a line, whatever was sent."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    if isinstance(value, (list, tuple, dict)) and len(value) > 8:
        return f"{len(value)} values"
    try:
        text = ascii(value)
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
