"""The model that Triton Inference Server's Python back end runs: a decoder behind its interface.

The generated ``model.py`` imports :class:`TritonPythonModel` from here. One thread owns the decoder
and runs a pass of all open requests after another; each finished block is one response, and the
last one carries the final flag. Nothing here imports Triton: its module
``triton_python_backend_utils`` exists only inside of the server, and is looked up when the model
is loaded.

This module mutates. What is shared with the thread that decodes is the list of orders and the count
of open requests, under a condition; everything else belongs to that thread.
"""

from __future__ import annotations

import base64
import importlib
import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fixedstate import runtime
from fixedstate.errors import (
    BackendError,
    BundleError,
    BusyError,
    CapacityError,
    FixedStateError,
    StateError,
    UsageError,
)
from fixedstate.runtime.requests import BlockEvent, PassEvent, Request, Settings
from fixedstate.runtime.scheduler import Scheduler
from fixedstate.serve import asked
from fixedstate.serve.asked import Limits
from fixedstate.serve.stops import StopTexts

if TYPE_CHECKING:
    from fixedstate.runtime.text import Detokenizer, Text

BUNDLE = "bundle"
"""Folder of the bundle or engine, beside ``model.py``."""

TEXT, IDS = "text_input", "input_ids"
"""Inputs of the model; a request gives one of them."""

OUTPUTS = (
    *("text_output", "token_ids", "block_index", "finish_reason", "prompt_tokens"),
    *("denoise_passes", "state"),
)
"""Outputs of the model; the last two come with the last block, ``state`` if it was asked for."""

OLDEST = "24.10"
"""The oldest release of the server that this was tried with, version 2.51.0."""

CODES = {
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
    "INTERNAL": "INTERNAL",
}
"""Names of gRPC for those of the Python back end; a message begins with one.

A stream carries no code unless the client asks for it (``triton_grpc_error``), and then server
2.51 reads freed memory behind a refusal (triton-inference-server/server#8708).
"""

_OWN = "triton_"  # parameters of the server itself
_LOOK_SECONDS = 0.005  # between two looks for cancelled requests: each look costs 35 us a request
_JOIN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What ``config.pbtxt`` says about the model: its ``parameters``, as text.

    Attributes:
        digest: sha256 of the manifest of the bundle or engine: its identity.
        slots: Requests that run together.
        queue: Requests that wait for a slot; more are refused as unavailable.
        max_prompt_tokens: Tokens of a prompt.
        max_new_tokens: Tokens that a request may ask for.
        max_text_bytes: Bytes of a prompt's text.
        max_state_bytes: Bytes of a saved state that a request brings; 0 refuses states.
        threads: Of a single pass; 0 for ONNX Runtime's choice, and with an engine.
        target_version: Release of the server that the repository was written for.
    """

    digest: str
    slots: int = 16
    queue: int = 64
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 1024
    max_text_bytes: int = 1 << 16
    max_state_bytes: int = 0
    threads: int = 0
    target_version: str = OLDEST

    def to_parameters(self) -> dict[str, str]:
        """Texts by name; the inverse of :meth:`from_parameters`."""
        return {entry.name: str(getattr(self, entry.name)) for entry in fields(self)}

    @classmethod
    def from_parameters(cls, given: Mapping[str, str]) -> ModelSetup:
        """Read the texts of a ``config.pbtxt``; what is none of ours is left alone.

        Raises:
            UsageError: for one that is missing or no whole number.
        """
        values: dict[str, Any] = {}
        for entry in fields(cls):
            text = given.get(entry.name)
            if text is None:
                raise UsageError(
                    f"config.pbtxt has no parameter {entry.name!r}: write the repository again"
                )
            values[entry.name] = text if entry.type == "str" else _whole(entry.name, text)
        return cls(**values)

    @property
    def limits(self) -> Limits:
        """What is taken of one request."""
        return Limits(
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            max_body_bytes=self.max_text_bytes,
            max_state_bytes=self.max_state_bytes,
            queue=self.queue,
        )


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"parameter {name!r} of config.pbtxt is no whole number: {text!r}")
    return int(text)


def check_numpy(version: str, target: str) -> None:
    """Refuse a numpy that the stub of an old server cannot talk to.

    The stub of release 24.10 was compiled before numpy 2: tensors come out empty, without an error.

    Args:
        version: Of numpy.
        target: Release of the server, such as ``24.10``.

    Raises:
        BackendError: naming both.
    """
    if int(version.partition(".")[0]) >= 2 and target <= OLDEST:
        raise BackendError(
            f"numpy {version} is installed, but the Python back end of Triton {target} reads "
            "tensors of numpy 1 only (they come out empty): install numpy<2 in the environment of "
            "the stub, or write the repository with --target-version of a newer server"
        )


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a request is told in place of an answer, and who waits for it."""

    sender: Any
    said: str
    code: str
    outcome: str


@dataclass
class _Job:
    """A request on its way, and who waits for its blocks."""

    request: Request
    sender: Any
    pieces: Detokenizer | None
    stops: StopTexts

    def text_of(self, event: BlockEvent) -> str:
        """The text that a block completes, up to a stop text; with the last block all of it."""
        if self.pieces is None:
            return ""
        text = self.stops.push(self.pieces.push(event.token_ids))
        if event.finish_reason is not None and not self.stops.found:
            text += self.stops.push(self.pieces.finish()) + self.stops.finish()
        return text


class TritonPythonModel:
    """What the Python back end calls: ``initialize``, ``execute`` and ``finalize``."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle, run one block, and start the thread that decodes.

        Args:
            args: As the Python back end gives them: the model's config as JSON, its folder, name
                and version.

        Raises:
            TritonModelException: in one sentence, where the model cannot be served.
        """
        self._triton: Any = importlib.import_module("triton_python_backend_utils")
        try:
            self._open(args)
        except FixedStateError as err:
            raise self._triton.TritonModelException(" ".join(str(err).split())) from err

    def _open(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        given = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        self._setup = setup = ModelSetup.from_parameters(given)
        check_numpy(np.__version__, setup.target_version)
        if not self._triton.using_decoupled_model_transaction_policy(config):
            raise UsageError(
                "config.pbtxt says that this model is not decoupled: it gives a response for every "
                "block, so leave model_transaction_policy { decoupled: true } as it was written"
            )
        folder = Path(args["model_repository"], args["model_version"], BUNDLE)
        self._limits = setup.limits
        self._decoder = decoder = runtime.load(
            folder, slots=setup.slots, threads=setup.threads or None
        )
        if decoder.bundle.digest != setup.digest:
            raise BundleError(
                f"{folder} is another one than config.pbtxt was written for: its manifest has "
                f"sha256 {decoder.bundle.digest[:16]}..., expected {setup.digest[:16]}...: write "
                "the repository again"
            )
        self._text = _tokenizer(decoder)
        _first_block(decoder)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = _Metrics(self._triton, labels)
        self._metrics.state_bytes(decoder.engine.state_bytes() * setup.slots)
        self._passes = 0
        self._looked = 0.0
        # Shared with the thread, under the condition:
        self._wake = threading.Condition()
        self._orders: list[_Job | _Refusal] = []
        self._open_jobs = 0
        self._stopping = False
        self._ended = False
        self._why = "the model is being unloaded: ask another server"
        self._thread = threading.Thread(target=self._work, name="fixedstate", daemon=True)
        self._thread.start()

    def finalize(self) -> None:
        """Answer what is still open as unavailable, and let go of everything."""
        if not hasattr(self, "_thread"):
            return  # it was never loaded
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            self._decoder.close()

    # --- in the thread of the server's requests

    def execute(self, requests: Iterable[Any]) -> None:
        """Take requests: each is checked here, and answered by the thread that decodes.

        What is wrong with one concerns that one only. Nothing is sent and nothing counted here: a
        metric that two threads change at once makes the server of 24.10 read freed memory
        (``Metric::SaveToSharedMemory`` of triton-inference-server/python_backend holds no lock),
        and with the server go all requests.
        """
        for request in requests:
            sender = request.get_response_sender()
            try:
                order: _Job | _Refusal = self._admit(request, sender)
            except BusyError as err:
                order = _Refusal(sender, str(err), "UNAVAILABLE", "rejected")
            except (UsageError, CapacityError, StateError) as err:
                order = _Refusal(sender, str(err), "INVALID_ARG", "invalid")
            except Exception as err:
                self._log(f"a request could not be read: {err!r}")
                order = _Refusal(
                    sender, "internal error: see the server's log", "INTERNAL", "error"
                )
            with self._wake:
                ended = self._ended
                if not ended:
                    self._orders.append(order)
                    self._wake.notify()
            if ended:  # nothing else is sent or counted any longer
                self._turn_away(order)

    def _admit(self, request: Any, sender: Any) -> _Job:
        """Take a place for one request; only this thread takes places.

        Raises:
            BusyError: where all are taken; it is not read then.
            UsageError, CapacityError, StateError: naming what is wrong.
        """
        places = self._setup.slots + self._setup.queue
        with self._wake:
            taken = self._open_jobs
        if taken >= places:
            raise BusyError(
                f"{taken} requests are open, {self._setup.slots} slots and {self._setup.queue} "
                "places in the queue are taken: try again once one has ended"
            )
        job = self._read(request, sender)
        with self._wake:
            self._open_jobs += 1
        return job

    def _read(self, request: Any, sender: Any) -> _Job:
        """What a request asks; its tensors are copied, since they go with the call.

        Raises:
            UsageError, CapacityError, StateError: naming what is wrong.
        """
        parameters = json.loads(request.parameters() or "{}")
        given = {k: v for k, v in parameters.items() if not k.startswith(_OWN)}
        for name in ("seed", "max_new_tokens", "max_tokens"):
            value = given.get(name)  # JSON over HTTP loses whole numbers from 2**31 on; texts stay
            if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
                given[name] = int(value)
        text, ids = (self._input(request, name) for name in (TEXT, IDS))
        if ids is not None and len(ids) > self._limits.max_prompt_tokens:
            raise CapacityError(
                f"prompt has {len(ids)} tokens; the server takes "
                f"{self._limits.max_prompt_tokens}: shorten it"
            )
        if text is not None and len(text) != 1:
            raise UsageError(f"{TEXT} holds {len(text)} texts; give one")
        found = asked.read(
            given,
            self._limits,
            text=None if text is None else _utf8(text[0]),
            ids=None if ids is None else ids.tolist(),
        )
        if found.stop and found.return_state:
            raise UsageError(
                "return_state does not go with stop: the state behind an answer holds whole blocks"
            )
        pieces = self._text.incremental() if self._text is not None else None
        job = found.request(self._text, self._limits)
        return _Job(job, sender, pieces, StopTexts(found.stop))

    def _input(self, request: Any, name: str) -> Any:
        tensor = self._triton.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy().ravel()

    # --- in the thread that decodes

    def _work(self) -> None:
        running: dict[int, _Job] = {}
        try:
            with self._decoder.scheduler(on_pass=self._count_pass) as scheduler:
                self._serve(scheduler, running)
        except Exception as err:
            self._log(f"decoding has ended: {err!r}")
            self._why = "decoding has ended by an error: load the model again"
        for job in running.values():
            self._turn_away(job)
        while True:  # until the model is unloaded somebody must tell the others
            orders, stopping = self._wait(idle=True)
            for order in orders:
                self._turn_away(order)
            with self._wake:
                self._ended = stopping and not self._orders
                if self._ended:
                    return

    def _serve(self, scheduler: Scheduler, running: dict[int, _Job]) -> None:
        """Take orders and run passes until the model is unloaded."""
        while True:
            orders, stopping = self._wait(scheduler.idle)
            for order in orders:
                if stopping:
                    self._turn_away(order)
                elif isinstance(order, _Refusal):
                    self._refuse(order)
                else:
                    self._submit(scheduler, order, running)
            if stopping:
                return
            self._drop_cancelled(scheduler, running)
            if scheduler.idle:
                continue
            try:
                events = scheduler.tick()
            except Exception as err:  # no state behind these rows can be trusted any longer
                self._log(f"a pass failed: {err!r}")
                scheduler.cancel_all(broken=True)
                for number, job in [*running.items()]:
                    scheduler.result(number)
                    del running[number]
                    self._end(job, f"a pass failed: {_said(err)}", "INTERNAL", "error")
                continue
            for event in events:
                self._respond(scheduler, running, event)
            self._metrics.active(scheduler.running)
            self._metrics.queued(scheduler.waiting)

    def _wait(self, idle: bool) -> tuple[list[_Job | _Refusal], bool]:
        """The requests that came since the last call, and whether the model is being unloaded.

        Sleeps while there is nothing to do.
        """
        with self._wake:
            while idle and not (self._orders or self._stopping):
                self._wake.wait()
            orders, self._orders = self._orders, []
            return orders, self._stopping

    def _turn_away(self, order: _Job | _Refusal) -> None:
        """Answer what nobody will decode."""
        if isinstance(order, _Refusal):
            self._refuse(order)
        else:
            self._end(order, self._why, "UNAVAILABLE", "rejected")

    def _submit(self, scheduler: Scheduler, job: _Job, running: dict[int, _Job]) -> None:
        try:
            running[scheduler.submit(job.request)] = job
        except (UsageError, CapacityError, StateError) as err:  # it concerns the one who asked
            self._end(job, str(err), "INVALID_ARG", "invalid")
        except Exception as err:
            self._log(f"a request could not be queued: {err!r}")
            self._end(job, "internal error: see the server's log", "INTERNAL", "error")

    def _drop_cancelled(self, scheduler: Scheduler, running: dict[int, _Job]) -> None:
        """Free the slots of requests that nobody waits for any longer."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for number, job in [*running.items()]:
            if job.sender.is_cancelled():
                scheduler.cancel(number)
                scheduler.result(number)
                del running[number]
                self._end(job, "cancelled by the client", "CANCELLED", "cancelled")
        if scheduler.idle:
            self._metrics.active(0)
            self._metrics.queued(0)

    def _respond(self, scheduler: Scheduler, running: dict[int, _Job], event: BlockEvent) -> None:
        """Send a finished block; the last one with the final flag."""
        job, number = running[event.row], event.row
        text = job.text_of(event)
        if job.stops.found and event.finish_reason is None:
            scheduler.cancel(number)
            event = replace(event, finish_reason="stop")
        result = None
        if event.finish_reason is not None:
            del running[number]
            result = scheduler.result(number)
            if result.finish_reason == "error":
                self._end(job, result.error or "decoding failed", "INTERNAL", "error")
                return
            if job.stops.found:
                event = replace(event, finish_reason="stop")
        # Numbers first: who has seen the block must find it counted.
        self._metrics.block(len(event.token_ids), self._taken_passes())
        if result is None:
            if not self._send(job, self._tensors(job, event, text), last=False):
                scheduler.cancel(number)
                scheduler.result(number)
                del running[number]
                self._end(job, "a block could not be sent", "INTERNAL", "error")
            return
        self._metrics.outcome("ok")
        self._metrics.active(scheduler.running)
        self._close()
        tensors = self._tensors(job, event, text)
        tensors["denoise_passes"] = np.array([result.denoise_passes], np.int64)
        if job.request.keep_state:
            state = b"" if result.state is None else result.state.to_bytes()
            tensors["state"] = _bytes(base64.b64encode(state))
        self._send(job, tensors, last=True)
        job.sender = None  # a sender that lives keeps the model from being unloaded

    def _tensors(self, job: _Job, event: BlockEvent, text: str) -> dict[str, Any]:
        return {
            "text_output": _bytes(text.encode()),
            "token_ids": np.array(event.token_ids, np.int64),
            "block_index": np.array([event.block], np.int32),
            "finish_reason": _bytes((event.finish_reason or "").encode()),
            "prompt_tokens": np.array([job.request.prompt_tokens], np.int64),
        }

    def _send(self, job: _Job, tensors: Mapping[str, Any], *, last: bool) -> bool:
        """Whether a block went out; a connection may break in ways the server did not foresee."""
        triton = self._triton
        try:
            outputs = [triton.Tensor(name, value) for name, value in tensors.items()]
            flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
            job.sender.send(triton.InferenceResponse(outputs), flags=flags)
        except Exception as err:
            self._log(f"a block could not be sent: {err!r}")
            return False
        return True

    # --- ends

    def _refuse(self, refusal: _Refusal) -> None:
        """Answer with an error, which is the last response."""
        triton = self._triton
        code = getattr(triton.TritonError, refusal.code)
        said = f"{CODES[refusal.code]}: {' '.join(refusal.said.split())}"
        error = triton.TritonError(said, code)
        self._metrics.outcome(refusal.outcome)
        try:
            refusal.sender.send(
                triton.InferenceResponse(output_tensors=[], error=error),
                flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
        except Exception as err:
            self._log(f"an error could not be sent: {err!r}")

    def _end(self, job: _Job, said: str, code: str, outcome: str) -> None:
        self._close()
        sender, job.sender = job.sender, None
        self._refuse(_Refusal(sender, said, code, outcome))

    def _close(self) -> None:
        with self._wake:
            self._open_jobs -= 1

    def _count_pass(self, event: PassEvent) -> None:
        self._passes += 1

    def _taken_passes(self) -> int:
        """Passes since the last call: counted with a block, since a count costs 50 us."""
        passes, self._passes = self._passes, 0
        return passes

    def _log(self, text: str) -> None:
        self._triton.Logger.log_error(f"fixedstate: {text}")


class _Metrics:
    """Numbers on the server's metrics port; a number that is as it was is not sent again."""

    def __init__(self, triton: Any, labels: dict[str, str]) -> None:
        family = triton.MetricFamily
        count, gauge = family.COUNTER, family.GAUGE
        self._families = {
            name: family(name=f"fixedstate_{name}", description=said, kind=kind)
            for name, said, kind in (
                ("requests_total", "Requests by outcome", count),
                ("blocks_total", "Finished blocks", count),
                ("tokens_total", "New tokens", count),
                ("passes_total", "Denoise passes, each over all active rows", count),
                ("active_slots", "Requests in a slot", gauge),
                ("queued_requests", "Requests that wait for a slot", gauge),
                ("state_bytes", "Bytes of the constant-size state of all slots", gauge),
            )
        }
        self._values = {
            name: self._families[name].Metric(labels=labels)
            for name in self._families
            if name != "requests_total"
        }
        self._outcomes = {
            outcome: self._families["requests_total"].Metric(labels={**labels, "outcome": outcome})
            for outcome in ("ok", "invalid", "rejected", "cancelled", "error")
        }
        self._shown: dict[str, float] = {}

    def outcome(self, name: str) -> None:
        self._outcomes[name].increment(1)

    def block(self, tokens: int, passes: int) -> None:
        for name, value in (("blocks", 1), ("tokens", tokens), ("passes", passes)):
            if value:
                self._values[f"{name}_total"].increment(value)

    def active(self, value: int) -> None:
        self._show("active_slots", value)

    def queued(self, value: int) -> None:
        self._show("queued_requests", value)

    def state_bytes(self, value: int) -> None:
        self._show("state_bytes", value)

    def _show(self, name: str, value: float) -> None:
        if self._shown.get(name) != value:
            self._shown[name] = value
            self._values[name].set(value)


def _tokenizer(decoder: runtime.Decoder) -> Text | None:
    from fixedstate.runtime.text import TOKENIZER, Text

    return Text.open(decoder.bundle) if TOKENIZER in decoder.bundle.files else None


def _first_block(decoder: runtime.Decoder) -> None:
    """Decode one token, so that a model that cannot is never ready and nobody waits for the first.

    Raises:
        BackendError: where it fails.
    """
    result = decoder.generate([Request([decoder.spec.any_token], Settings(max_new_tokens=1))])[0]
    if result.error is not None:
        raise BackendError(f"the first block failed: {result.error}")


def _utf8(data: bytes | str) -> str:
    if isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        raise UsageError(f"prompt is no UTF-8 text: {err.reason} at byte {err.start}") from err


def _bytes(data: bytes) -> Any:
    return np.array([data], dtype=np.object_)


def _said(err: Exception) -> str:
    """What a client hears of a failure: our own sentences, nothing of other packages."""
    return str(err) if isinstance(err, FixedStateError) else "see the server's log"
