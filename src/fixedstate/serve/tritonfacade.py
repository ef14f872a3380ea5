"""A model in front of the streaming one that gives the whole answer as one response.

For clients of ``/generate`` and ``/infer``, which take exactly one. It asks the streaming model
from inside the server; an instance answers one request at a time, so its instances are its slots.
That a client of it has gone is not seen: the answer is decoded to its end.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fixedstate.serve.tritonmodel import IDS, TEXT

OUTPUTS = ("text_output", "token_ids", "finish_reason")
"""Outputs of the facade."""


class TritonPythonModel:
    """What the Python back end calls: ``initialize`` and ``execute``."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Note which model is asked.

        Args:
            args: As the Python back end gives them.
        """
        self._triton: Any = importlib.import_module("triton_python_backend_utils")
        config = json.loads(args["model_config"])
        self._model = config["parameters"]["model"]["string_value"]

    def execute(self, requests: Iterable[Any]) -> list[Any]:
        """One response for each request, in order; an error concerns its own request only."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        triton = self._triton
        inputs = [triton.get_input_tensor_by_name(request, name) for name in (TEXT, IDS)]
        asked = triton.InferenceRequest(
            model_name=self._model,
            requested_output_names=list(OUTPUTS),
            inputs=[tensor for tensor in inputs if tensor is not None],
            parameters=json.loads(request.parameters() or "{}"),
        )
        text, ids, reason = b"", [np.zeros(0, np.int64)], b""
        try:
            for response in asked.exec(decoupled=True):
                if response.has_error():
                    return triton.InferenceResponse(output_tensors=[], error=response.error())
                found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
                if found:
                    text += found["text_output"].ravel()[0]
                    ids.append(found["token_ids"].ravel())
                    reason = found["finish_reason"].ravel()[0]
        except Exception as err:  # of the server's own machinery
            error = triton.TritonError(str(err), triton.TritonError.INTERNAL)
            return triton.InferenceResponse(output_tensors=[], error=error)
        values = {
            "text_output": np.array([text], dtype=np.object_),
            "token_ids": np.concatenate(ids),
            "finish_reason": np.array([reason], dtype=np.object_),
        }
        return triton.InferenceResponse([triton.Tensor(name, v) for name, v in values.items()])
