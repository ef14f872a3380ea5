"""A loaded bundle that answers requests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import TracebackType

from fixedstate.bundle import Bundle
from fixedstate.errors import UsageError
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.loop import ExclusiveUse, OnPass, Stream
from fixedstate.runtime.requests import Request, Result, check_decodable
from fixedstate.spec import ModelSpec


class Decoder:
    """Decodes with one bundle; made by :func:`load`.

    One stream runs at a time: a call from another thread waits, a second stream in the same
    thread is refused.

    Attributes:
        bundle: The opened bundle.
        load_seconds: What opening it took.
    """

    def __init__(
        self, bundle: Bundle, engine: SessionEngine | None, load_seconds: float = 0.0
    ) -> None:
        self.bundle = bundle
        self.load_seconds = load_seconds
        self._engine = engine
        self._lock = ExclusiveUse()

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.bundle.spec

    @property
    def engine(self) -> SessionEngine:
        """The passes over the state.

        Raises:
            UsageError: for a model without such passes, or after :meth:`close`.
        """
        check_decodable(self.spec)
        if self._engine is None:
            raise UsageError("this decoder is closed: load the bundle again")
        return self._engine

    def stream(self, requests: Sequence[Request], on_pass: OnPass | None = None) -> Stream:
        """Decode requests and hand over every block as it is finished.

        Args:
            requests: Any number; more than slots run in waves.
            on_pass: Called after every denoise pass with the canvases.

        Returns:
            An iterator of block events; its `results` are complete when it ends. Close it to end
            early (a ``with`` block does).

        Raises:
            UsageError: for a request that is wrong, before any pass.
            CapacityError: for a request that does not fit, before any pass.
        """
        return Stream(
            self.engine,
            requests,
            self.bundle.decode,
            on_pass=on_pass,
            lock=self._lock,
            load_seconds=self.load_seconds,
        )

    def generate(self, requests: Sequence[Request], on_pass: OnPass | None = None) -> list[Result]:
        """Decode requests to their ends; Ctrl-C keeps their finished blocks.

        Args:
            requests: Any number; more than slots run in waves.
            on_pass: Called after every denoise pass with the canvases.

        Returns:
            One result per request, in order.
        """
        stream = self.stream(requests, on_pass)
        try:
            for _ in stream:
                pass
        except KeyboardInterrupt:
            stream.close()
        return stream.results

    def close(self) -> None:
        """Let go of sessions and state."""
        self._engine = None

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    provider: str = "cpu",
    allow_fallback: bool = False,
    slots: int = 1,
    verify_weights: bool = True,
    limit: int | None = None,
    optimization: str = "all",
    single_graph: bool = False,
) -> Decoder:
    """Open a bundle on ONNX Runtime.

    Args:
        path: The bundle's folder.
        threads: Of a single pass; None for ONNX Runtime's choice.
        provider: ``cpu``, ``cuda``, ``tensorrt`` or ``tensorrt-rtx``.
        allow_fallback: Take the CPU where the provider cannot be used; the results name what
            was really used.
        slots: Requests that run together at most.
        verify_weights: False skips the hash of the weights file.
        limit: Tokens per request at most, prompt included and rounded up to whole blocks; None
            for no limit.
        optimization: ``none``, ``basic`` or ``all``.
        single_graph: Run both passes on the graph ``commit_denoise`` where the bundle has it:
            one copy of the weights in memory instead of two, slower passes.

    Raises:
        BundleError: for a missing, damaged or newer bundle.
        BackendError: where the back end cannot do what was asked.
        UsageError: for a setting out of range.
    """
    start = time.perf_counter()
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be 1 token or more; got {limit}")
    bundle = Bundle.open(path, verify_weights=verify_weights)
    engine = None
    if bundle.spec.objective != "full":
        engine = open_engine(
            bundle,
            threads=threads,
            provider=provider,
            allow_fallback=allow_fallback,
            slots=slots,
            limit=limit,
            optimization=optimization,
            single_graph=single_graph,
        )
    return Decoder(bundle, engine, time.perf_counter() - start)


def open_engine(
    bundle: Bundle,
    *,
    threads: int | None = None,
    provider: str = "cpu",
    allow_fallback: bool = False,
    slots: int = 1,
    limit: int | None = None,
    capacity: int = 0,
    optimization: str = "all",
    single_graph: bool = False,
) -> SessionEngine:
    """The passes of an opened bundle on ONNX Runtime; arguments as in :func:`load`."""
    from fixedstate.runtime import ort

    roles: list[str] = [role for role in ("denoise", "commit") if role in bundle.graphs]
    if single_graph:
        roles = ["commit_denoise"]
    elif len(roles) < 2:
        roles.append("commit_denoise")  # one graph for what has none of its own
    sessions = ort.open_sessions(
        bundle,
        tuple(roles),
        provider=provider,
        allow_fallback=allow_fallback,
        threads=threads,
        optimization=optimization,
    )
    return SessionEngine(
        bundle.spec, bundle.state, sessions, slots=slots, limit=limit, capacity=capacity
    )
