"""A stand-in for ``triton_python_backend_utils``, the module that the server gives its models.

It keeps what is sent and counted; it checks nothing that the server does not check either. What it
promises was seen on server 2.51.0, whose own tests are in tests/triton/test_server.py.
"""

from __future__ import annotations

import json
import threading
import time
import types
from typing import Any

import numpy as np

FINAL = 1


class Tensor:
    """A name and an array."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError(Exception):
    """An error of one response."""

    INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = "invalid", "unavailable", "internal", "gone"

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    """Tensors, or an error."""

    def __init__(self, output_tensors=(), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Sender:
    """Where the responses of one request go; `gone` makes the client leave."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.flags: list[int] = []
        self.gone = False
        self.over = threading.Event()
        self.started = threading.Event()
        self.broken = False

    def is_cancelled(self) -> bool:
        return self.gone

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        if self.broken and response.error is None:
            raise RuntimeError("the connection broke")
        assert not self.over.is_set(), "a response behind the final one"
        self.responses.append(response)
        self.flags.append(flags)
        self.started.set()
        if flags == FINAL:
            self.over.set()

    def wait(self, seconds: float = 60.0) -> Sender:
        """Until the final response."""
        assert self.over.wait(seconds), f"no final response; {len(self.responses)} others"
        return self

    @property
    def error(self) -> TritonError | None:
        return self.responses[-1].error

    @property
    def blocks(self) -> list[dict[str, np.ndarray]]:
        return [response.outputs for response in self.responses if response.error is None]

    @property
    def ids(self) -> list[int]:
        return [token for block in self.blocks for token in block["token_ids"].tolist()]

    @property
    def text(self) -> str:
        return b"".join(block["text_output"][0] for block in self.blocks).decode()

    @property
    def reason(self) -> str:
        return self.blocks[-1]["finish_reason"][0].decode()


class Request:
    """Inputs by name, and parameters."""

    def __init__(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> None:
        self.sender = Sender()
        self._parameters = json.dumps(parameters or {})
        self.inputs = {name: Tensor(name, array) for name, array in inputs.items()}

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> Sender:
        return self.sender


class Metric:
    """A number that one thread changes: server 2.51 crashes once two do (and nothing says so)."""

    def __init__(self) -> None:
        self.value = 0.0
        self._by: threading.Thread | None = None

    def _change(self, value: float) -> None:
        thread = threading.current_thread()
        if self._by is not None and self._by.is_alive():
            assert self._by is thread, f"changed by {self._by.name} and by {thread.name}"
        self._by, self.value = thread, value

    def increment(self, by: float) -> None:
        self._change(self.value + by)

    def set(self, value: float) -> None:
        self._change(value)


def module() -> types.ModuleType:
    """A fresh module; `metrics` holds every metric by name and outcome, `errors` the log."""
    made = types.ModuleType("triton_python_backend_utils")
    made.metrics, made.errors = {}, []

    class MetricFamily:
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, name: str, description: str, kind: str) -> None:
            self.name = name

        def Metric(self, labels: dict[str, str]) -> Metric:
            metric = Metric()
            made.metrics[self.name, labels.get("outcome", "")] = metric
            return metric

    made.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    made.Tensor, made.TritonError = Tensor, TritonError
    made.InferenceResponse, made.MetricFamily = InferenceResponse, MetricFamily
    made.TritonModelException = type("TritonModelException", (Exception,), {})
    made.Logger = types.SimpleNamespace(log_error=made.errors.append)
    made.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    made.using_decoupled_model_transaction_policy = lambda config: config.get(
        "model_transaction_policy", {}
    ).get("decoupled", False)
    return made


def text(value: str, **parameters: Any) -> Request:
    """A request with a text prompt."""
    return Request(parameters, text_input=np.array([value.encode()], dtype=np.object_))


def ids(*values: int, **parameters: Any) -> Request:
    """A request with a prompt of ids."""
    return Request(parameters, input_ids=np.array(values, np.int64))


def until(condition, seconds: float = 30.0) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)
