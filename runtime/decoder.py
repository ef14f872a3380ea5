"""A loaded bundle or engine that answers requests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.loop import ExclusiveUse, Stream
from fixedstate.runtime.memory import choose, roles
from fixedstate.runtime.prefix import PrefixStore, make_prefix
from fixedstate.runtime.requests import Request, Result, check_decodable
from fixedstate.runtime.scheduler import OnPass, Scheduler, Watcher
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.spec import ModelSpec

if TYPE_CHECKING:
    from fixedstate.runtime.deviceengine import DeviceEngine
    from fixedstate.runtime.enginefile import EngineFolder

_ENGINE = "engine.json"  # what tells an engine's folder; its module is loaded with one only


class Decoder:
    """Decodes with one bundle or engine; made by :func:`load`.

    One stream runs at a time: a call from another thread waits, a second stream in the same
    thread is refused.

    Attributes:
        bundle: The opened bundle, or engine, which has the same model, defaults and files.
        load_seconds: What opening it took.
        prefixes: States of prompts seen before; None keeps none.
    """

    def __init__(
        self,
        bundle: Bundle | EngineFolder,
        engine: SessionEngine | FullEngine | DeviceEngine | None,
        load_seconds: float = 0.0,
        prefixes: PrefixStore | None = None,
    ) -> None:
        self.bundle = bundle
        self.load_seconds = load_seconds
        self.prefixes = prefixes
        self._engine = engine
        self._lock = ExclusiveUse()

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.bundle.spec

    @property
    def engine(self) -> SessionEngine | FullEngine | DeviceEngine:
        """The passes over the state, or over whole sequences.

        Raises:
            UsageError: for a model without such passes, or after :meth:`close`.
        """
        check_decodable(self.spec)
        if self._engine is None:
            raise UsageError("this decoder is closed: load the bundle again")
        return self._engine

    def stream(
        self,
        requests: Sequence[Request],
        on_pass: OnPass | None = None,
        watcher: Watcher | None = None,
    ) -> Stream:
        """Decode requests and hand over every block as it is finished.

        Args:
            requests: Any number; those beyond the slots begin as others end.
            on_pass: Called after every round of denoise passes with the canvases.
            watcher: Told everything that happens to each row.

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
            prefixes=self.prefixes,
            watcher=watcher,
            lock=self._lock,
            load_seconds=self.load_seconds,
        )

    def generate(
        self,
        requests: Sequence[Request],
        on_pass: OnPass | None = None,
        watcher: Watcher | None = None,
    ) -> list[Result]:
        """Decode requests to their ends; Ctrl-C keeps their finished blocks.

        Args:
            requests: Any number; those beyond the slots begin as others end.
            on_pass: Called after every round of denoise passes with the canvases.
            watcher: Told everything that happens to each row.

        Returns:
            One result per request, in order.
        """
        stream = self.stream(requests, on_pass, watcher)
        try:
            for _ in stream:
                pass
        except KeyboardInterrupt:
            stream.close()
        return stream.results

    @contextlib.contextmanager
    def scheduler(
        self,
        *,
        queue_limit: int | None = None,
        on_pass: OnPass | None = None,
        watcher: Watcher | None = None,
    ) -> Iterator[Scheduler]:
        """For servers: a scheduler that requests are submitted to as they come, tick by tick.

        The decoder belongs to it until the ``with`` block ends, which cancels what is open.

        Args:
            queue_limit: Requests that may wait for a slot; None for any number.
            on_pass: Called after every round of denoise passes with the canvases.
            watcher: Told everything that happens to each row.
        """
        with self._lock:
            scheduler = Scheduler(
                self.engine,
                self.bundle.decode,
                queue_limit=queue_limit,
                prefixes=self.prefixes,
                on_pass=on_pass,
                watcher=watcher,
                load_seconds=self.load_seconds,
            )
            try:
                yield scheduler
            except BaseException:
                scheduler.cancel_all(broken=True)  # a pass may have been cut short
                raise
            finally:
                scheduler.cancel_all()

    def prefill(
        self,
        prompt_ids: Sequence[int] | Array,
        seed: int = 0,
        prefix: Snapshot | None = None,
    ) -> Snapshot:
        """The state behind a prompt, to begin any number of requests with.

        Args:
            prompt_ids: Any number of tokens.
            seed: Noted in the state.
            prefix: A saved state that the prompt goes on from.

        Raises:
            UsageError: for ids that are no tokens, or a model without state.
            CapacityError: where they do not fit the limit.
        """
        with self._lock:
            blocks = self.bundle.decode.prefill_blocks
            return make_prefix(self.engine, prompt_ids, blocks, seed, prefix)

    def refuse_reentry(self) -> None:
        """Refuse a thread that would wait for a stream of its own.

        Raises:
            UsageError: where a stream of this thread is open.
        """
        self._lock.refuse_reentry()

    def close(self) -> None:
        """Let go of sessions and state."""
        engine, self._engine = self._engine, None
        give_back = getattr(engine, "close", None)
        if give_back is not None:  # memory of a device is not given back by itself
            give_back()

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
    memory: str | None = None,
    head: str = "logits",
    engine_cache: str | os.PathLike[str] | None = None,
) -> Decoder:
    """Open a bundle on ONNX Runtime, or an engine on its TensorRT.

    Args:
        path: The bundle's folder, or that of an engine, which runs on a card whatever `provider`
            says and has no threads, no optimization and no fallback.
        threads: Of a single pass; None for ONNX Runtime's choice.
        provider: ``cpu``, ``cuda``, ``tensorrt`` or ``tensorrt-rtx``.
        allow_fallback: Take the CPU where the provider cannot be used; the results name what
            was really used.
        slots: Requests that run together at most.
        verify_weights: False skips the hash of the weights file.
        limit: Tokens per request at most, prompt included and rounded up to whole blocks; None
            for no limit.
        optimization: ``none``, ``basic`` or ``all``.
        memory: ``lean`` holds the weights once and runs every pass on the graph
            ``commit_denoise``; ``fast`` holds them twice and denoises on a graph of its own. None
            for ``lean`` above 1 GB of weights; see :func:`fixedstate.runtime.memory.plan`.
        head: What the passes give, as far as it was exported: ``confidence``, ``entropy`` or
            ``top_k`` of the open slots instead of all scores, which costs less. Requests that
            need more are refused.
        engine_cache: Folder in which the providers ``tensorrt`` and ``tensorrt-rtx`` keep the
            engines that they build, and an engine of TensorRT-RTX what it compiles for this card;
            None does all of it at every load.

    Raises:
        BundleError: for a missing, damaged or newer bundle.
        BackendError: where the back end cannot do what was asked.
        UsageError: for a setting out of range.
    """
    start = time.perf_counter()
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be 1 token or more; got {limit}")
    if Path(path, _ENGINE).is_file():
        _check_options(threads, provider, allow_fallback, optimization)
        from fixedstate.runtime import trt
        from fixedstate.runtime.enginefile import EngineFolder

        folder = EngineFolder.open(path, verify=verify_weights)
        device = trt.open_engine(
            folder,
            slots=slots,
            limit=limit,
            memory=memory,
            head=head,
            runtime_cache=None if engine_cache is None else Path(engine_cache),
        )
        return Decoder(folder, device, time.perf_counter() - start)
    bundle = Bundle.open(path, verify_weights=verify_weights)
    engine: SessionEngine | FullEngine | DeviceEngine
    if bundle.spec.objective == "full":
        choose(bundle, memory, head=head)
        engine = open_full(
            bundle,
            threads=threads,
            provider=provider,
            allow_fallback=allow_fallback,
            slots=slots,
            limit=limit,
            optimization=optimization,
            engine_cache=engine_cache,
        )
    else:
        engine = open_engine(
            bundle,
            threads=threads,
            provider=provider,
            allow_fallback=allow_fallback,
            slots=slots,
            limit=limit,
            optimization=optimization,
            memory=memory,
            head=head,
            engine_cache=engine_cache,
        )
    return Decoder(bundle, engine, time.perf_counter() - start)


def _check_options(
    threads: int | None,
    provider: str,
    allow_fallback: bool,
    optimization: str,
) -> None:
    """Refuse what is said about ONNX Runtime where an engine is opened.

    Raises:
        UsageError: naming the setting.
    """
    given = {
        f"threads {threads}": threads is not None,
        f"provider {provider!r}": provider != "cpu",
        "a fallback to the CPU": allow_fallback,
        f"optimization {optimization!r}": optimization != "all",
    }
    for what, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{what} was asked for, but an engine runs on its own TensorRT and card: leave it "
                "out, or open the bundle"
            )


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
    memory: str | None = None,
    head: str = "logits",
    engine_cache: str | os.PathLike[str] | None = None,
) -> SessionEngine | DeviceEngine:
    """The passes of an opened bundle on ONNX Runtime; arguments as in :func:`load`.

    On another provider than the CPU the state lies on the card, and :meth:`DeviceEngine.close`
    gives its memory back.

    Raises:
        UsageError: for a model of objective ``full``, which has no state to pass on.
    """
    from fixedstate.runtime import ort

    if bundle.spec.objective == "full":
        raise UsageError(
            "this model looks at the whole sequence (objective 'full'): no exact cache exists for "
            "it, so no state can go from block to block; it decodes over whole sequences only"
        )
    wanted = roles(bundle, choose(bundle, memory, head=head), head)
    _cache_settings(provider, engine_cache)
    if ort.choose_provider(provider, allow_fallback) != "cpu":
        from fixedstate.runtime import ortdevice

        try:
            return ortdevice.open_engine(
                bundle,
                wanted,
                provider=provider,
                threads=threads,
                slots=slots,
                limit=limit,
                capacity=capacity,
                optimization=optimization,
                engine_cache=engine_cache,
            )
        except BackendError:
            if not allow_fallback:
                raise
    sessions = ort.open_sessions(bundle, wanted, threads=threads, optimization=optimization)
    return SessionEngine(
        bundle.spec,
        bundle.state,
        sessions,
        slots=slots,
        limit=limit,
        capacity=capacity,
        weights=bundle.weights,
    )


def open_full(
    bundle: Bundle,
    *,
    threads: int | None = None,
    provider: str = "cpu",
    allow_fallback: bool = False,
    slots: int = 1,
    limit: int | None = None,
    optimization: str = "all",
    engine_cache: str | os.PathLike[str] | None = None,
) -> FullEngine:
    """The whole-sequence passes of objective ``full``; arguments as in :func:`load`."""
    from fixedstate.runtime import ort

    check_decodable(bundle.spec)
    settings = {"full": _cache_settings(provider, engine_cache)}
    sessions = ort.open_sessions(
        bundle,
        ("full",),
        provider=provider,
        allow_fallback=allow_fallback,
        threads=threads,
        optimization=optimization,
        settings=settings,
    )
    return FullEngine(bundle.spec, sessions, slots=slots, limit=limit)


def _cache_settings(provider: str, engine_cache: str | os.PathLike[str] | None) -> dict[str, str]:
    """The provider's options for a folder of engines; refused where it builds none."""
    if engine_cache is None:
        return {}  # and what runs on a card is not even imported
    from fixedstate.runtime import ortdevice

    return ortdevice.cache_settings(provider, engine_cache)
