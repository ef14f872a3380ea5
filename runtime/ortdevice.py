"""Bundles on those providers of ONNX Runtime that run on a card: CUDA, TensorRT, TensorRT-RTX.

The state lies in device memory of our own and is bound by address, once for every pass; see
:class:`fixedstate.runtime.deviceengine.DeviceEngine`. Sessions work in our stream, so that their
passes and our copies are in order.

No CUDA graphs: ONNX Runtime captures one graph per session and shape only where a run id says so,
and replays it on the addresses of the first run, while our pairs trade places.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np

from fixedstate.bundle import Bundle, Graph
from fixedstate.errors import BackendError, UsageError
from fixedstate.plugins.driver import Stream
from fixedstate.runtime import ort
from fixedstate.runtime.buffers import columns_for
from fixedstate.runtime.deviceengine import DeviceEngine
from fixedstate.runtime.devicememory import DeviceDriver
from fixedstate.runtime.enginefile import Plan
from fixedstate.runtime.identity import Profile
from fixedstate.state import split_role

PREFIXES = {"tensorrt": "trt", "tensorrt-rtx": "nv"}
"""How the options of providers that build an engine begin."""

_LEVELS = ("min", "opt", "max")
_ONNX_TYPES = {  # numbers of TensorProto.DataType, since numpy has no bfloat16
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
}


def open_engine(
    bundle: Bundle,
    roles: tuple[str, ...],
    *,
    provider: str,
    threads: int | None = None,
    slots: int = 1,
    limit: int | None = None,
    capacity: int = 0,
    optimization: str = "all",
    engine_cache: str | os.PathLike[str] | None = None,
    device: int = 0,
) -> OrtDeviceEngine:
    """Open the graphs of a bundle on a card; the same decode loop drives it as on the CPU.

    Args:
        bundle: The bundle.
        roles: Roles to open.
        provider: ``cuda``, ``tensorrt`` or ``tensorrt-rtx``.
        threads: Of what runs on the host, which is little; None for ONNX Runtime's choice.
        slots: Rows at most.
        limit: Committed tokens per row at most; None for no limit. Providers that build engines
            need one where the model has keys and values.
        capacity: Columns of keys and values at first.
        optimization: A key of :data:`fixedstate.runtime.ort.OPTIMIZATIONS`.
        engine_cache: Folder in which a provider keeps the engines that it builds; None builds them
            in every process.
        device: Number of the card.

    Raises:
        BackendError: where the provider is not here, does not run a whole graph, or does not read
            the memory it was bound to.
        CapacityError: where the device's memory is too small.
        UsageError: for a setting that the provider does not allow.
    """
    kept = cache_settings(provider, engine_cache)
    target = ort.target_of(provider)
    plans = {
        role: _plan(bundle, role, bundle.graph(role, target), provider, slots, limit)
        for role in roles
    }
    with ExitStack() as stack:
        with _card(provider):
            driver = DeviceDriver(device)
        stack.callback(driver.close, quiet=True)
        stream = stack.enter_context(driver.stream())
        sessions = ort.open_sessions(
            bundle,
            roles,
            provider=provider,
            threads=threads,
            optimization=optimization,
            settings={
                role: {**provider_settings(provider, plan, stream), **kept}
                for role, plan in plans.items()
            },
            device=device,
        )
        loaded = {role: OrtRole(plans[role], session, device) for role, session in sessions.items()}
        del sessions
        for role in loaded.values():
            stack.callback(role.close)
        engine = OrtDeviceEngine(
            bundle.spec,
            bundle.state,
            loaded,
            driver,
            slots=slots,
            limit=limit,
            capacity=capacity,
            weights=bundle.weights,
            provider=provider,
            graphs=False,
            stream=stream,
        )
        stack.callback(engine.close)
        engine.check_reads()
        engine.on_close(stack.pop_all().close)
        return engine


@contextmanager
def _card(provider: str) -> Iterator[None]:
    """Say which provider needs the card that is not there."""
    try:
        yield
    except BackendError as err:
        raise BackendError(f"provider {provider!r} needs an NVIDIA card: {err}") from err


def _plan(
    bundle: Bundle, role: str, graph: Graph, provider: str, slots: int, limit: int | None
) -> Plan:
    """What a session of a role takes: any shape, but where an engine is built for a range.

    Raises:
        UsageError: where the range has no end.
    """
    plan = Plan(role, graph.file, graph.sha256, graph.inputs, graph.outputs)
    if provider not in PREFIXES:
        return plan
    length = bundle.spec.block_len
    least = most = length
    if any("C" in port.shape for port in graph.inputs):
        if limit is None:
            raise UsageError(
                f"provider {provider!r} builds its engine for sizes known before, and no limit was "
                "given: say how many tokens a request has at most (limit, --max-context)"
            )
        whole = bundle.state.whole_blocks
        least, most = (columns_for(need, length, limit, whole) for need in (1, limit))
    fused = split_role(role)[0] == "commit_denoise"
    blocks = max(bundle.decode.prefill_blocks, 2 if fused else 1)
    levels = (
        {"B": 1, "n": 1, "m": 1, "C": least, "R": 1},
        {"B": slots, "n": 1, "m": 2, "C": most, "R": length},
        {"B": slots, "n": blocks, "m": blocks, "C": most, "R": length},
    )
    profile: Profile = {
        port.name: (port.resolve(**levels[0]), port.resolve(**levels[1]), port.resolve(**levels[2]))
        for port in graph.inputs
        if any(isinstance(dim, str) for dim in port.shape)
    }
    return Plan(role, graph.file, graph.sha256, graph.inputs, graph.outputs, (profile,))


def provider_settings(provider: str, plan: Plan, stream: Stream) -> dict[str, str]:
    """The options that a provider is given for one role, as it names them.

    Without the range of every input, those that build engines build another one at every new
    shape. Sources of the names: ONNX Runtime's pages "CUDA Execution Provider" and "TensorRT
    Execution Provider", and ``tensorrt_rtx_provider_options.h`` of the plugin's package.

    Args:
        provider: ``cuda``, ``tensorrt`` or ``tensorrt-rtx``.
        plan: With the ranges.
        stream: That its kernels are put in.
    """
    found = {"has_user_compute_stream": "1", "user_compute_stream": str(stream.handle)}
    prefix = PREFIXES.get(provider, "")
    for profile in plan.profiles:
        for index, level in enumerate(_LEVELS):
            found[f"{prefix}_profile_{level}_shapes"] = ",".join(
                f"{name}:{'x'.join(map(str, bounds[index]))}" for name, bounds in profile.items()
            )
    return found


def cache_settings(provider: str, folder: str | os.PathLike[str] | None) -> dict[str, str]:
    """The options that make a provider keep the engines it builds; none without a folder.

    Raises:
        UsageError: for a folder and a provider that builds no engines.
    """
    if folder is None:
        return {}
    path = os.fspath(folder)
    if provider == "tensorrt":
        return {"trt_engine_cache_enable": "1", "trt_engine_cache_path": path}
    if provider == "tensorrt-rtx":
        return {"nv_runtime_cache_path": path}
    raise UsageError(
        f"engine_cache {path!r} was given; provider {provider!r} builds no engines, only "
        f"{' and '.join(PREFIXES)} do: leave it out"
    )


class OrtDeviceEngine(DeviceEngine):
    """State on a card and sessions of ONNX Runtime over it; made by :func:`open_engine`."""

    _part, _holder, _verb = "graph", "bundle", "export"
    _fusing = "export the bundle with the fused graph"

    @property
    def places(self) -> dict[str, dict[str, dict[str, int]]]:
        """By graph and provider, how often each operator runs there."""
        found = {}
        for role in self._roles.values():
            if isinstance(role, OrtRole) and role.session is not None:
                found[role.plan.role] = role.session.places
        return found

    def check_reads(self) -> None:
        """Refuse sessions that read a copy of what they were bound to.

        ONNX Runtime copies an input when it is bound if it takes the memory for that of another
        device than its own, and reads that copy ever after. Other ids have to give other results.

        Raises:
            BackendError: where they do not.
        """
        length, places = self.spec.block_len, None
        if self.head != "logits":
            places = np.zeros((1, 1), np.int64)
        found = []
        for ids in (np.zeros(length, np.int64), 1 + np.arange(length) % (self.spec.vocab_size - 1)):
            given = self._denoise(ids[None], places, 0)
            found.append([array.tobytes() for array in given.values()])
        self.reset(0)
        self.returned_bytes = self.sent_bytes = 0
        if found[0] == found[1]:
            raise BackendError(
                f"provider {self.provider!r} gives the same results for other tokens: it does not "
                "read the device memory that it was bound to; use another provider or another "
                "version of ONNX Runtime, and report this"
            )


class OrtRole:
    """One graph on a card.

    Attributes:
        plan: Its ports, and the range it takes where there is one.
        session: Its session; None once closed.
    """

    def __init__(self, plan: Plan, session: ort.OrtSession, device: int) -> None:
        self.plan = plan
        self.session: ort.OrtSession | None = session
        self._device = device

    def bind(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        stream: Stream,
    ) -> OrtPass:
        """A pass with device memory at every port, bound once and for all.

        Args:
            shapes: Of every port.
            addresses: Likewise.
            stream: That the session was opened with.

        Raises:
            CapacityError: where its range does not take the shapes.
            BackendError: where ONNX Runtime refuses a port.
        """
        if self.session is None:
            raise BackendError(f"the session of {self.plan.file} is closed: load the bundle again")
        if self.plan.profiles:
            self.plan.profile_for(shapes)  # or the provider would build another engine
        return OrtPass(self.plan, self.session, shapes, addresses, self._device)

    def close(self) -> None:
        """Let go of the session; passes have to be gone."""
        self.session = None


class OrtPass:
    """A pass with fixed shapes and addresses: run it as often as wanted.

    Attributes:
        nodes: Of its CUDA graph, which it has none of.
        uncaptured: Why not, where one was wanted.
    """

    def __init__(
        self,
        plan: Plan,
        session: ort.OrtSession,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        device: int,
    ) -> None:
        self._file = plan.file
        self._session = session.native
        self._binding = self._session.io_binding()
        self.nodes = 0
        self.uncaptured = ""
        with self._saying(f"does not take device memory for {plan.file}"):
            for ports, bind in (
                (plan.inputs, self._binding.bind_input),
                (plan.outputs, self._binding.bind_output),
            ):
                for port in ports:
                    number, shape = _ONNX_TYPES[port.dtype], list(shapes[port.name])
                    bind(port.name, "cuda", device, number, shape, addresses[port.name])

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        try:
            yield
        except ort.failures() as err:
            raise BackendError(f"ONNX Runtime {what}: {ort.first_line(err)}") from err

    def run(self, graphs: bool = True) -> None:
        """Run it in the order of its stream; ONNX Runtime waits for the end of it.

        Args:
            graphs: Not looked at.

        Raises:
            BackendError: where the run fails.
        """
        with self._saying(f"failed in a run of {self._file}"):
            self._session.run_with_iobinding(self._binding)

    def close(self) -> None:
        """Let go of binding and session; nothing may still run."""
        self._binding = self._session = None
