"""Measurements of a server in Prometheus' form.

Names beginning with ``gen_ai_`` are those of the OpenTelemetry semantic conventions for generative
models (``gen_ai.server.*``, in development there) in Prometheus' spelling, with their attributes
and buckets. What is called the first token there is the first block here: its tokens come at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fixedstate.serve.answers import Answers

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of :meth:`Metrics.text`."""

_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_DURATION = tuple(0.01 * 2**i for i in range(14))
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
_PASSES = (0.03125, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


class Metrics:
    """Counters and histograms of one server.

    Args:
        answers: Asked for its load when the measurements are read.
        model: Its name.
    """

    def __init__(self, answers: Answers, model: str) -> None:
        self._model = model
        self._registry = registry = CollectorRegistry()
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From the arrival of a request to its last byte.",
            (*_LABELS, "error_type"),
            buckets=_DURATION,
            registry=registry,
        )
        self._first = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the arrival of a request to its first finished block.",
            _LABELS,
            buckets=_FIRST,
            registry=registry,
        )
        self._per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per token behind the first block, of answers of several blocks.",
            _LABELS,
            buckets=_PER_TOKEN,
            registry=registry,
        )
        self._tokens = Counter(
            "gen_ai_server_tokens",
            "Tokens of prompts (input) and answers (output).",
            (*_LABELS, "gen_ai_token_type"),
            registry=registry,
        )
        self._passes_per_token = Histogram(
            "fixedstate_passes_per_token",
            "Denoise passes per token of an answer.",
            buckets=_PASSES,
            registry=registry,
        )
        self._passes = Counter(
            "fixedstate_denoise_passes",
            "Denoise passes that requests took part in.",
            registry=registry,
        )
        self._finished = Counter(
            "fixedstate_answers",
            "Answers that began, by how they ended.",
            ("finish_reason",),
            registry=registry,
        )
        self._responses = Counter(
            "fixedstate_http_responses",
            "Responses by status; 499 where the client had gone.",
            ("status",),
            registry=registry,
        )
        registry.register(_Gauges(answers))

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)

    def response(self, status: int) -> None:
        """A response was sent."""
        self._responses.labels(str(status)).inc()

    def first_block(self, operation: str, seconds: float) -> None:
        """The first block of an answer is there."""
        self._first.labels(*self._labels(operation)).observe(seconds)

    def request(self, operation: str, seconds: float, error: str = "") -> None:
        """A request was answered or refused.

        Args:
            operation: ``chat`` or ``text_completion``.
            seconds: It took.
            error: Class of what was wrong with it; empty for none.
        """
        self._duration.labels(*self._labels(operation), error).observe(seconds)

    def answer(
        self,
        operation: str,
        *,
        finish_reason: str,
        prompt_tokens: int | None,
        new_tokens: int,
        passes: int | None,
        seconds_behind: float,
        tokens_behind: int,
    ) -> None:
        """An answer ended.

        Args:
            operation: ``chat`` or ``text_completion``.
            finish_reason: Why.
            prompt_tokens: Tokens of its prompt, where known.
            new_tokens: Its tokens.
            passes: Denoise passes, where known.
            seconds_behind: From its first block to its end.
            tokens_behind: Tokens behind its first block.
        """
        labels = self._labels(operation)
        self._finished.labels(finish_reason).inc()
        self._tokens.labels(*labels, "input").inc(prompt_tokens or 0)
        self._tokens.labels(*labels, "output").inc(new_tokens)
        if tokens_behind:
            self._per_token.labels(*labels).observe(seconds_behind / tokens_behind)
        if passes is not None:
            self._passes.inc(passes)
            if new_tokens:
                self._passes_per_token.observe(passes / new_tokens)

    def _labels(self, operation: str) -> tuple[str, str, str]:
        return operation, "fixedstate", self._model


class _Gauges(Collector):
    """What is so at the moment when it is asked for."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """The gauges that are known."""
        load = self._answers.load
        values: dict[str, tuple[str, Any]] = {
            "slots": ("Requests that run together.", self._answers.slots)
        }
        if load is not None:
            values |= {
                "active_slots": ("Requests in a slot.", load.running),
                "queue": ("Requests that wait for a slot.", load.waiting),
                "state_bytes": ("Constant-size states in use.", load.state_bytes),
                "kv_bytes": ("Keys and values of committed tokens in use.", load.kv_bytes),
            }
        for name, (words, value) in values.items():
            yield GaugeMetricFamily(f"fixedstate_{name}", words, value=value)
