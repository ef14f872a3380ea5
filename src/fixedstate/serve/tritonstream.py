"""Asking a model repository on a running Triton server, block by block, over gRPC."""

from __future__ import annotations

import contextlib
import queue
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from fixedstate.errors import BackendError, BusyError, FixedStateError, UsageError
from fixedstate.serve.tritonmodel import CODES, IDS, TEXT

MODEL = "fixedstate"
"""Name of the model, unless a repository was written with another one."""

_FINAL = "triton_final_response"
_URL = re.compile(r"(?:grpc://)?([A-Za-z0-9_.-]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})")
_REASON = re.compile(r"\[StatusCode\.[A-Z_]+\] ")
_CODE = re.compile(rf"({'|'.join(CODES.values())}): ")


def address_of(url: str) -> str:
    """``host:port`` of an address as it may be written.

    Raises:
        UsageError: for one that is none.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise UsageError(
            f"{url!r} is no address of a Triton server: give host:port of its gRPC port, such "
            "as localhost:8001"
        )
    return f"{match[1]}:{match[2]}"


@dataclass(frozen=True, slots=True)
class Block:
    """A finished block as the server sent it.

    Attributes:
        index: From 0.
        text: The text that it completes; empty where the model has no tokenizer.
        token_ids: Its new tokens.
        finish_reason: Why the answer ended with it; None where it goes on.
        state: The state behind the answer in base64, where it was asked for; else empty.
        prompt_tokens: Tokens of the prompt, those of a saved state among them.
        denoise_passes: Passes that the answer took; known with the last block.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    state: str = ""
    prompt_tokens: int | None = None
    denoise_passes: int | None = None


class TritonClient:
    """A connection to one model of a server; used by ``with``.

    Args:
        url: ``host:port`` of the server's gRPC port.
        model: Its name.
        deadline: Seconds from one response to the next: a server whose Python stub dies may never
            answer.

    Raises:
        UsageError: for an address that is none.
    """

    def __init__(self, url: str, model: str = MODEL, deadline: float = 60.0) -> None:
        self._url = address_of(url)
        from tritonclient import grpc

        self._grpc: Any = grpc
        self._model, self._deadline = model, deadline
        self._client = grpc.InferenceServerClient(self._url)

    def __enter__(self) -> TritonClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def stream(
        self,
        *,
        text: str | None = None,
        ids: Sequence[int] | None = None,
        parameters: Mapping[str, str | int | float | bool] | None = None,
    ) -> Iterator[Block]:
        """Ask, and hand over every block as it comes; closing the iterator cancels the request.

        Args:
            text: The prompt as text.
            ids: The prompt as ids, instead.
            parameters: As the model takes them; a state is base64.

        Raises:
            UsageError: for what the model refuses.
            BusyError: where it has no place for the request now.
            BackendError: where the server cannot be reached, fails, or misses the deadline.
        """
        from tritonclient.utils import InferenceServerException

        given = dict(parameters or {})
        if isinstance(given.get("seed"), int):  # beyond 63 bits there is no number for it
            given["seed"] = str(given["seed"])
        inputs = self._inputs(text, ids)
        arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client = self._client
        client.start_stream(lambda result, error: arrived.put((result, error)))
        over = False
        try:
            # A stream that has broken refuses the request; the reason arrives as its response.
            with contextlib.suppress(InferenceServerException):
                client.async_stream_infer(
                    self._model, inputs, parameters=given, enable_empty_final_response=True
                )
            while not over:
                result, error = self._next(arrived)
                if error is not None:
                    over = True  # the server has ended the stream
                    raise self._failure(error)
                over = bool(result.get_response().parameters[_FINAL].bool_param)
                block = block_of(result)
                if block is not None:
                    yield block
        finally:
            # A cancel behind the last response would keep the model from being unloaded.
            client.stop_stream(cancel_requests=not over)

    def _inputs(self, text: str | None, ids: Sequence[int] | None) -> list[Any]:
        if (text is None) == (ids is None):
            raise UsageError("give text or token ids, one of them")
        if text is not None:
            tensor = self._grpc.InferInput(TEXT, [1], "BYTES")
            tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
        else:
            values = np.array(ids, np.int64)
            tensor = self._grpc.InferInput(IDS, [len(values)], "INT64")
            tensor.set_data_from_numpy(values)
        return [tensor]

    def _next(self, arrived: queue.Queue[tuple[Any, Any]]) -> tuple[Any, Any]:
        try:
            return arrived.get(timeout=self._deadline)
        except queue.Empty:
            raise BackendError(
                f"{self._url} gave no response within {self._deadline:g} s: the server may have "
                "lost the process of its model; restart it, or wait longer with --deadline"
            ) from None

    def _failure(self, error: Any) -> FixedStateError:
        """What an error of the server means here."""
        code, said = str(error.status() or ""), str(error.message() or error)
        return failure_of(said, f"model {self._model!r} at {self._url}", code)


def failure_of(said: str, where: str, code: str = "") -> FixedStateError:
    """What an error of a Triton server means here.

    Args:
        said: Its text; our models begin it with the code.
        where: The model and its address, for the message.
        code: Of gRPC; empty where there is none.
    """
    code = code.removeprefix("StatusCode.")
    said = _REASON.sub("", said).strip()
    found = _CODE.match(said)
    if found:
        code, said = found[1], said[found.end() :]
    if code == "INVALID_ARGUMENT":
        return UsageError(f"the server refused the request: {said}")
    if code == "UNAVAILABLE" and "requests are open" in said:
        return BusyError(f"the server is busy: {said}")
    return BackendError(f"{where} cannot answer ({code or 'no code'}): {said}")


def block_of(result: Any) -> Block | None:
    """The block of a response; None for one that only ends the stream."""
    ids = result.as_numpy("token_ids")
    if ids is None:
        return None
    texts = {}
    for name in ("text_output", "finish_reason", "state"):
        value = result.as_numpy(name)
        texts[name] = "" if value is None else value.ravel()[0].decode()
    return Block(
        index=int(result.as_numpy("block_index").ravel()[0]),
        text=texts["text_output"],
        token_ids=tuple(ids.ravel().tolist()),
        finish_reason=texts["finish_reason"] or None,
        state=texts["state"],
        prompt_tokens=_number(result, "prompt_tokens"),
        denoise_passes=_number(result, "denoise_passes"),
    )


def _number(result: Any, name: str) -> int | None:
    value = result.as_numpy(name)
    return None if value is None else int(value.ravel()[0])
