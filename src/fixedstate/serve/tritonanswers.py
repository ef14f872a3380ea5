"""Answers of a Triton server, over gRPC: the front runs beside it, or anywhere else."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import numpy as np

from fixedstate.errors import BackendError, DecodeError
from fixedstate.runtime.aio import Load
from fixedstate.serve.answers import Ending, Piece
from fixedstate.serve.asked import Asked
from fixedstate.serve.stops import StopTexts
from fixedstate.serve.tritonmodel import IDS, TEXT
from fixedstate.serve.tritonstream import MODEL, Block, address_of, block_of, failure_of

_SETTINGS = ("max_new_tokens", "min_new_tokens", "steps", "threshold", "temperature")


class TritonAnswers:
    """Answers of one model of a Triton server; as :class:`fixedstate.serve.answers.Answers`.

    Args:
        url: ``host:port`` of the server's gRPC port.
        model: Its name there.
        deadline: Seconds from one block to the next: a server whose Python stub dies may never
            answer.

    Raises:
        UsageError: for an address that is none.
    """

    load: Load | None = None  # the server has measurements of its own
    broken = ""  # another server may come up at the address: nothing here has to be restarted

    def __init__(self, url: str, model: str = MODEL, deadline: float = 60.0) -> None:
        self._url, self._model, self._deadline = address_of(url), model, deadline
        self._client: Any = None
        self._open: set[TritonAnswer] = set()
        self.slots = 0

    @property
    def where(self) -> str:
        """The model and its address, for messages."""
        return f"model {self._model!r} at {self._url}"

    async def __aenter__(self) -> TritonAnswers:
        from tritonclient.grpc import aio

        self._client = aio.InferenceServerClient(self._url)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel_all()
        await self._client.close()

    async def warm(self) -> None:
        """Ask for the model's configuration.

        Raises:
            BackendError: where the server or the model is not there.
        """
        try:
            found = await self._client.get_model_config(
                self._model, as_json=True, client_timeout=self._deadline
            )
            self.slots = int(found["config"]["parameters"]["slots"]["string_value"])
        except Exception as err:  # the package's own, gRPC's, and a model of another kind
            raise BackendError(f"{self.where} is not there, or none of ours: {err}") from err

    async def ask(self, asked: Asked) -> TritonAnswer:
        """Begin to answer; as :meth:`fixedstate.serve.answers.Answers.ask`."""
        over = asyncio.Event()
        answer = TritonAnswer(self, self._call(asked, over), over, asked, self._deadline)
        self._open.add(answer)
        return answer

    def cancel_all(self) -> None:
        """End every open request before the next pass."""
        for answer in list(self._open):
            answer.cancel()

    def over(self, answer: TritonAnswer) -> None:
        """An answer has ended."""
        self._open.discard(answer)

    def _call(self, asked: Asked, over: asyncio.Event) -> Any:
        """The responses to a request, as they come; our side stays open until it is over."""
        from tritonclient import grpc

        if asked.text is not None:
            tensor = grpc.InferInput(TEXT, [1], "BYTES")
            tensor.set_data_from_numpy(np.array([asked.text.encode()], dtype=np.object_))
        else:
            values = np.array(asked.ids, np.int64)
            tensor = grpc.InferInput(IDS, [len(values)], "INT64")
            tensor.set_data_from_numpy(values)
        request = {
            "model_name": self._model,
            "inputs": [tensor],
            "parameters": _parameters(asked),
        }

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield request
            await over.wait()  # server 2.51 may crash where an error meets a half-closed stream

        return self._client.stream_infer(requests())


class TritonAnswer:
    """An answer of a Triton server; as :class:`fixedstate.serve.answers.Answer`.

    Args:
        answers: Whose it is.
        responses: Of the server.
        over: Set once it has ended.
        asked: What was asked.
        deadline: Seconds for each response.
    """

    def __init__(
        self,
        answers: TritonAnswers,
        responses: Any,
        over: asyncio.Event,
        asked: Asked,
        deadline: float,
    ) -> None:
        self._answers, self._responses, self._deadline = answers, responses, deadline
        self._over = over
        self._stop = StopTexts(asked.stop)
        self._tokens = 0
        self.prompt_tokens: int | None = None
        self.ending: Ending | None = None

    async def next(self) -> Piece | None:
        """The next piece; as :meth:`fixedstate.serve.answers.Answer.next`."""
        if self.ending is not None:
            return None
        try:
            block = await self._block()
        except BaseException:
            self.cancel()
            raise
        self.prompt_tokens = block.prompt_tokens
        last = block.finish_reason is not None
        if last:
            self._close()
        self._tokens += len(block.token_ids)
        text = self._stop.push(block.text)
        found = self._stop.found
        if last and not found:
            text += self._stop.finish()
        if found or last:
            self.cancel()  # nothing where it has ended by itself
            self.ending = Ending(
                finish_reason="stop" if found else str(block.finish_reason),
                error=None,
                new_tokens=self._tokens,
                denoise_passes=block.denoise_passes,
                state=base64.b64decode(block.state) if block.state else None,
            )
        return Piece(block.token_ids, text)

    async def _block(self) -> Block:
        """The next block of the server.

        Raises:
            FixedStateError: for what the server refuses, or where it fails or is silent.
        """
        from grpc.aio import AioRpcError

        where = self._answers.where
        while True:
            try:
                result, error = await asyncio.wait_for(self._responses.__anext__(), self._deadline)
            except asyncio.TimeoutError:
                raise BackendError(
                    f"{where} gave no response within {self._deadline:g} s: it may have lost the "
                    "process of its model"
                ) from None
            except StopAsyncIteration:
                raise DecodeError(f"{where} ended a stream without its last block") from None
            except AioRpcError as err:
                self._close()
                raise failure_of(err.details() or "", where, str(err.code())) from err
            if error is not None:
                self._close()
                raise failure_of(str(error.message()), where)
            block = block_of(result)
            if block is not None:
                return block

    def cancel(self) -> None:
        """End it before the next pass; nothing if it has ended."""
        # A cancel behind the last response would keep the model from being unloaded.
        if not self._over.is_set():
            self._close()
            self._responses.cancel()

    def _close(self) -> None:
        self._over.set()
        self._answers.over(self)


def _parameters(asked: Asked) -> dict[str, str | int | float | bool]:
    """What the model is told; stop texts are looked for here, where there may be several."""
    settings = asked.settings
    given = {name: getattr(settings, name) for name in _SETTINGS}
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    found["seed"] = str(settings.seed)  # beyond 63 bits there is no number for it
    if settings.stop_ids is not None:
        found["stop_ids"] = ",".join(map(str, settings.stop_ids))
    if asked.state is not None:
        found["state"] = base64.b64encode(asked.state.to_bytes()).decode("ascii")
    if asked.return_state:
        found["return_state"] = True
    return found
