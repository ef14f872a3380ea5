"""The only door through which engines run: TensorRT and TensorRT-RTX behind one adapter.

An engine is compared with this machine before anything of it is read; then its plugin libraries
and creators are registered, then its plans are loaded, then their tensors are compared with
engine.json. What NVIDIA's page "CUDA Graphs" advises is followed: one execution context for each
captured graph, all of them on one memory for what a pass takes inside.

The CUDA driver is reached through :mod:`fixedstate.plugins.driver`, so that nothing but the
TensorRT package has to be installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fixedstate.bundle import write_atomic
from fixedstate.errors import BackendError, BundleError, UsageError
from fixedstate.plugins import library
from fixedstate.plugins.driver import Graph, Memory, Stream
from fixedstate.ports import Port, resolve_dim
from fixedstate.runtime.deviceengine import DeviceEngine, check_slots
from fixedstate.runtime.devicememory import ALIGNMENT, DeviceDriver
from fixedstate.runtime.devicesequences import DeviceSequences
from fixedstate.runtime.enginefile import EngineFolder, Plan, check_aliases, refit_graph
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.identity import (
    PRODUCTS,
    STRIP_PLAN,
    VERSION_COMPATIBLE,
    Card,
    Here,
    Identity,
    os_text,
)
from fixedstate.runtime.memory import LEAN_ABOVE, MODES
from fixedstate.runtime.requests import check_decodable
from fixedstate.state import HEADS, head_role, split_role

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT64": "int64",
    "BOOL": "bool",
}
_NAMED = 3  # weights that a message names
_OWN_RUNTIME = "EXCLUDE_LEAN_RUNTIME"  # flag of TensorRT: the plan does not bring code of its own


def open_engine(
    engine: EngineFolder | str | os.PathLike[str],
    *,
    slots: int = 1,
    limit: int | None = None,
    capacity: int = 0,
    memory: str | None = None,
    head: str = "logits",
    device: int = 0,
    graphs: bool = True,
    runtime_cache: Path | None = None,
    module: Any = None,
    cuda: Any = None,
) -> DeviceEngine | FullEngine:
    """Load an engine on a card; the same decode loop drives it as a bundle on ONNX Runtime.

    Of a model of objective ``full`` it is a :class:`fixedstate.runtime.full.FullEngine`, which has
    one plan and carries nothing: no memory mode, capacity or head can be chosen for it.

    Args:
        engine: An opened engine, or its folder.
        slots: Rows at most, no more than it was built for.
        limit: Committed tokens per row at most, or of a model of objective ``full`` tokens of its
            whole sequence; None for what it was built for.
        capacity: Columns of keys and values at first.
        memory: ``lean`` loads the plan ``commit_denoise`` alone, so that the weights are on the
            device once; ``fast`` a plan for denoise passes beside it. None for ``lean`` above 1 GB.
        head: What the passes give, one of :data:`fixedstate.state.HEADS`.
        device: Number of the card as the driver counts them.
        graphs: Whether passes become CUDA graphs at their second run; without, every kernel is
            launched anew.
        runtime_cache: Folder in which TensorRT-RTX keeps what it compiles for this card; None
            compiles it in every process. TensorRT compiles nothing here and takes none.
        module: Stands in for the Python module of TensorRT or TensorRT-RTX.
        cuda: Stands in for the CUDA driver's library.

    Raises:
        BackendError: where it cannot run here, or its plans are not what engine.json says.
        BundleError: for a damaged engine.
        CapacityError: where the device's memory is too small.
        UsageError: for a setting that the engine does not allow.
    """
    folder = engine if isinstance(engine, EngineFolder) else EngineFolder.open(engine)
    roles = plan_roles(folder, memory, head)
    whole = folder.spec.objective == "full"
    if whole:
        check_decodable(folder.spec)
        if capacity:
            raise UsageError(
                f"capacity {capacity} was asked for; {folder.path} is of a model of objective "
                "'full', which keeps no keys and values: leave it out"
            )
    if runtime_cache is not None and folder.identity.product != "tensorrt-rtx":
        raise UsageError(
            f"a cache in {runtime_cache} was asked for, but {folder.path} is of "
            f"{PRODUCTS[folder.identity.product]}, whose plans hold all their kernels: leave it out"
        )
    with ExitStack() as stack:
        trt, driver = _prepare(folder, device, module, cuda, stack)
        runner = _Runner(folder, trt, driver, runtime_cache)
        stack.callback(runner.close)
        loaded = {role: runner.load(folder.plan(role)) for role in roles}
        provider = f"{folder.identity.product} {folder.identity.version} on {driver.name}"
        if whole:
            check_slots([loaded["full"].plan], slots)
            sequences = DeviceSequences(loaded["full"], driver, provider=provider, graphs=graphs)
            stack.callback(sequences.close)
            most = sequences.lengths[1]
            limit = most if limit is None else min(limit, most)
            full = FullEngine(folder.spec, {"full": sequences}, slots=slots, limit=limit)
            sequences.on_close(stack.pop_all().close)
            return full
        made = DeviceEngine(
            folder.spec,
            folder.state,
            loaded,
            driver,
            slots=slots,
            limit=limit,
            capacity=capacity,
            weights=folder.identity.weights,
            provider=provider,
            graphs=graphs,
        )
        made.on_close(stack.pop_all().close)
        return made


def plan_roles(folder: EngineFolder, memory: str | None, head: str) -> tuple[str, ...]:
    """The plans that are loaded for a memory mode and a head.

    Raises:
        UsageError: for a mode or head that is none or that the engine has no plans for.
    """
    if memory is not None and memory not in MODES:
        raise UsageError(f"memory {memory!r} is unknown; use one of {', '.join(MODES)}")
    if head not in HEADS:
        raise UsageError(f"head {head!r} is unknown; use one of {', '.join(HEADS)}")
    has = folder.plans
    if folder.spec.objective == "full":
        if memory is not None:
            raise UsageError(
                f"memory {memory!r} cannot be chosen: an engine of objective 'full' has one plan "
                "and holds its weights once; leave the choice out"
            )
        if head != "logits":
            raise UsageError(
                f"{folder.path} has no head {head!r}: models of objective 'full' give all scores; "
                "load it without a head"
            )
        return ("full",)
    heads = sorted({split_role(role)[1] for role in has} - {"logits"})
    denoise, fused = head_role("denoise", head), head_role("commit_denoise", head)
    if head != "logits" and head not in heads:
        raise UsageError(
            f"{folder.path} has no head {head!r} (it has {', '.join(heads) or 'none'}): build it "
            "from a bundle with that head, or load it without a head"
        )
    if memory is None:
        large = fused in has and folder.loaded_bytes(fused) > LEAN_ABOVE
        memory = "lean" if fused in has and (large or denoise not in has) else "fast"
    if memory == "lean":
        wanted: tuple[str, ...] = (fused,)
    else:
        wanted = (denoise, "commit" if "commit" in has and fused not in has else fused)
    missing = [role for role in wanted if role not in has]
    if missing:
        raise UsageError(
            f"memory {memory!r} runs on the plan {missing[0]!r}, which {folder.path} lacks (it has "
            f"{', '.join(sorted(has))}): build it again with that role"
        )
    return wanted


# --- may it run here -----------------------------------------------------------------------------


def why_not_here(
    engine: EngineFolder, *, device: int = 0, module: Any = None, cuda: Any = None
) -> str | None:
    """Why an engine cannot run on this machine; None where nothing speaks against it.

    Nothing of a plan is read. Its plugins are registered, as :func:`open_engine` does.

    Args:
        engine: An opened engine.
        device: Number of the card as the driver counts them.
        module: Stands in for the Python module of TensorRT or TensorRT-RTX.
        cuda: Stands in for the CUDA driver's library.
    """
    with ExitStack() as stack:
        try:
            _prepare(engine, device, module, cuda, stack)
        except BackendError as err:
            return str(err)
    return None


def _prepare(
    folder: EngineFolder, device: int, module: Any, cuda: Any, stack: ExitStack
) -> tuple[Any, DeviceDriver]:
    """The module and the driver to run an engine with, its plugins registered.

    Raises:
        BackendError: where anything speaks against it; nothing of a plan was read.
    """
    identity = folder.identity
    trt, why = _module(identity.product, module)
    driver, cards, no_driver = _driver(device, cuda, stack)
    here = Here(
        product=identity.product,
        version=str(getattr(trt, "__version__", "")),
        os=os_text(),
        cards=cards,
        device=device,
    )
    if reason := folder.refusal(here):
        raise BackendError(reason) from (no_driver or why)
    if trt is None or driver is None:
        raise BackendError(f"{folder.path} cannot run here: {why or no_driver}")
    _register(folder, trt, device, is_real=module is None)
    here = replace(here, creators=_creators(trt), texts=_texts(identity))
    if reason := folder.refusal(here):
        raise BackendError(reason)
    return trt, driver


def _module(product: str, given: Any) -> tuple[Any, BackendError | None]:
    """The Python module of a product, or why there is none."""
    if given is not None:
        return given, None
    try:
        return (library.tensorrt() if product == "tensorrt" else library.tensorrt_rtx()), None
    except BackendError as err:
        return None, err


def _driver(
    device: int, cuda: Any, stack: ExitStack
) -> tuple[DeviceDriver | None, tuple[Card, ...], BackendError | None]:
    """The driver for a card, and all cards there are; the driver is None without that card."""
    for number in dict.fromkeys((device, 0)):
        try:
            driver = DeviceDriver(number, library=cuda)
        except BackendError as err:
            failed = err
            continue
        cards = tuple(Card(*card) for card in driver.cards())
        if number == device:
            stack.callback(driver.close, quiet=True)
            return driver, cards, None
        driver.close()
        return None, cards, failed
    return None, (), failed


def _register(folder: EngineFolder, trt: Any, device: int, *, is_real: bool) -> None:
    """Load the plugin libraries that the engine names, and register the plugins of this package."""
    plugins = folder.identity.plugins
    registry = trt.get_plugin_registry()
    known = _creators(trt)
    for name in dict.fromkeys(p.library for p in plugins if p.library and p.id not in known):
        path = folder.path / name
        if registry.load_library(str(path)) is None:
            raise BackendError(
                f"plugin library {path} could not be loaded: was it built for this system and for "
                f"{PRODUCTS[folder.identity.product]} {folder.identity.version}?"
            )
    if is_real and any(plugin.kind == "python" for plugin in plugins):
        library.register_rtx(device)


def _creators(trt: Any) -> dict[str, str]:
    """Version of every registered creator by ``namespace::name``."""
    return {
        f"{creator.plugin_namespace}::{creator.name}": str(creator.plugin_version)
        for creator in trt.get_plugin_registry().all_creators
    }


def _texts(identity: Identity) -> dict[str, str] | None:
    """sha256 of the kernels of this package, where the engine launches any of them."""
    if not any(plugin.kind == "python" for plugin in identity.plugins):
        return None
    from fixedstate.plugins import ptx

    return {name: str(entry["sha256"]) for name, entry in ptx.index()["texts"].items()}


# --- plans ---------------------------------------------------------------------------------------


class _Runner:
    """What the plans of one engine share: the runtime, its messages, the memory inside a pass."""

    def __init__(
        self, folder: EngineFolder, trt: Any, driver: DeviceDriver, cache: Path | None
    ) -> None:
        self.folder = folder
        self.trt = trt
        self.driver = driver
        self.messages: list[str] = []
        self._logger = _logger(trt, self.messages)
        self._runtime = trt.Runtime(self._logger)
        flags = folder.identity.flags
        if flags.get(VERSION_COMPATIBLE) and not flags.get(_OWN_RUNTIME):
            self._runtime.engine_host_code_allowed = True  # the plan brings its own runtime
        self._inner: Memory | None = None
        self._roles: list[TrtRole] = []
        self._cache = cache

    def load(self, plan: Plan) -> TrtRole:
        """A plan on the device.

        Raises:
            BackendError: where the runtime refuses it, or its tensors are not those of engine.json.
        """
        file = self.folder.path / plan.file
        try:
            content = file.read_bytes()
        except OSError as err:
            raise BundleError(f"{file} cannot be read: {err.strerror or err}") from err
        engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise BackendError(
                f"{PRODUCTS[self.folder.identity.product]} does not load {file}: {self.said()}: "
                f"build it again: `{self.folder.identity.rebuild()}`"
            )
        check_engine(self.trt, engine, plan)
        if self.folder.identity.is_stripped:
            self._refit(engine, plan)
        role = TrtRole(self, plan, engine)
        self._roles.append(role)
        return role

    def _refit(self, engine: Any, plan: Plan) -> None:
        """Put the weights beside a plan into it; their hashes were checked when it was opened.

        Raises:
            BackendError: where any of its weights is not put in.
        """
        trt, graph = self.trt, self.folder.path / refit_graph(plan.role)
        missing: list[str] = []
        said = ""
        try:
            refitter = trt.Refitter(engine, self._logger)
            reader = trt.OnnxParserRefitter(refitter, self._logger)
            # true only where every weight was found; TensorRT-RTX does not list all missing ones
            done = reader.refit_from_file(str(graph))
            missing = sorted(refitter.get_missing_weights())
            if done and not missing and refitter.refit_cuda_engine():
                return
            if reader.num_errors:
                said = str(reader.get_error(0).desc())
        except (TypeError, RuntimeError) as err:  # what its bindings raise for a null pointer
            said = self.said() if self.messages else str(err)
        said = said or self.said()
        if missing:
            said += f"; it lacks {', '.join(map(repr, missing[:_NAMED]))}"
            said += f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise BackendError(
            f"{PRODUCTS[self.folder.identity.product]} does not put the weights of {graph} into "
            f"{plan.file}: {said}: build the engine again without {STRIP_PLAN}: "
            f"`{self.folder.identity.rebuild()}`"
        )

    def said(self) -> str:
        """What TensorRT said last."""
        return self.messages[-1] if self.messages else "it gave no reason"

    def inner(self, nbytes: int) -> int:
        """Address of the memory that passes take inside; they run one after the other.

        Raises:
            BackendError: where it would have to grow: contexts hold its address.
        """
        if self._inner is None:
            largest = max(role.inner_bytes for role in self._roles)
            self._inner = self.driver.allocate(max(largest, nbytes, ALIGNMENT))
        if nbytes > self._inner.nbytes:
            raise BackendError(
                f"a pass takes {nbytes} bytes inside, {self._inner.nbytes} are there"
            )
        return self._inner.address

    def cache_file(self, role: str) -> Path | None:
        """Where TensorRT-RTX keeps what it compiled for a plan; None where it does not."""
        identity = self.folder.identity
        if self._cache is None or identity.product != "tensorrt-rtx":
            return None
        capability = ".".join(map(str, self.driver.compute_capability))
        name = Path(identity.runtime_cache(capability))
        return self._cache / f"{name.stem}-{role}{name.suffix}"

    def close(self) -> None:
        """Let go of engines and memory; contexts and graphs have to be gone."""
        roles, self._roles = self._roles, []
        for role in roles:
            role.close()
        if self._inner is not None:
            self._inner.free()
            self._inner = None


def _logger(trt: Any, messages: list[str]) -> Any:
    """A logger that keeps errors, for the message of what failed."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                messages.append(" ".join(text.split())[:300])
                del messages[:-20]

    return Log()


class TrtRole:
    """One loaded plan.

    Attributes:
        plan: What engine.json says about it.
        inner_bytes: What a pass of it takes inside.
    """

    def __init__(self, runner: _Runner, plan: Plan, engine: Any) -> None:
        self._runner = runner
        self.plan = plan
        self._engine = engine
        self.inner_bytes = int(engine.device_memory_size_v2)
        self._config, self._cached = self._configure()

    def _configure(self) -> tuple[Any, Any]:
        """TensorRT-RTX's settings for contexts, and its runtime cache; None for TensorRT.

        Kernels for a shape are compiled at its first pass and not behind its back: with others from
        some pass on, the same state would give other bytes.
        """
        trt, engine = self._runner.trt, self._engine
        if self._runner.folder.identity.product != "tensorrt-rtx":
            return None, None
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        config.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        cache, file = None, self._runner.cache_file(self.plan.role)
        if file is not None:
            cache = config.create_runtime_cache()
            if file.is_file():
                cache.deserialize(file.read_bytes())
            config.set_runtime_cache(cache)
        return config, cache

    def bind(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        stream: Stream,
    ) -> TrtPass:
        """An execution context of its own for these shapes and addresses, set once and for all.

        Args:
            shapes: Of every port.
            addresses: Likewise; multiples of :data:`ALIGNMENT`.
            stream: That it runs in.

        Raises:
            CapacityError: where no profile takes the shapes.
            BackendError: where TensorRT refuses a setting.
        """
        plan, trt = self.plan, self._runner.trt
        index = plan.profile_for(shapes)
        if self._config is not None:
            context = self._engine.create_execution_context(self._config)
        else:
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self._engine.create_execution_context(strategy)
        if context is None:
            raise BackendError(f"no execution context for {plan.file}: {self._runner.said()}")
        if self.inner_bytes:
            context.set_device_memory(self._runner.inner(self.inner_bytes), self.inner_bytes)
        if plan.profiles and not context.set_optimization_profile_async(index, stream.handle):
            raise BackendError(f"{plan.file} has no profile {index}: {self._runner.said()}")
        stream.synchronize()
        for port in plan.inputs:
            if not context.set_input_shape(port.name, shapes[port.name]):
                raise BackendError(
                    f"{plan.file} refuses {port.name} of shape {list(shapes[port.name])}: "
                    f"{self._runner.said()}"
                )
        if unknown := list(context.infer_shapes()):
            raise BackendError(f"{plan.file} wants more to be known of {', '.join(unknown)}")
        for port in plan.outputs:
            found = tuple(context.get_tensor_shape(port.name))
            if found != shapes[port.name]:
                raise BackendError(
                    f"{plan.file} gives {port.name} as {list(found)}; engine.json makes it "
                    f"{list(shapes[port.name])}: build the engine again"
                )
        for port in (*plan.inputs, *plan.outputs):
            address = addresses[port.name]
            if address % ALIGNMENT or not context.set_tensor_address(port.name, address):
                raise BackendError(
                    f"{plan.file} refuses address {address:#x} for {port.name} (multiples of "
                    f"{ALIGNMENT} are taken): {self._runner.said()}"
                )
        return TrtPass(plan.file, context, stream, self._runner.said)

    def close(self) -> None:
        """Let go of the engine, after keeping what was compiled for this card."""
        file = self._runner.cache_file(self.plan.role)
        if self._cached is not None and file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, bytes(self._cached.serialize()))
        self._config = self._cached = self._engine = None


class TrtPass:
    """A pass with fixed shapes and addresses: run it as often as wanted.

    Attributes:
        nodes: Of its CUDA graph; 0 before there is one.
        uncaptured: Why there is none although one was wanted; empty elsewhere.
    """

    def __init__(self, file: str, context: Any, stream: Stream, said: Callable[[], str]) -> None:
        self._file = file
        self._context = context
        self._stream = stream
        self._said = said
        self._graph: Graph | None = None
        self._ran = False
        self.nodes = 0
        self.uncaptured = ""

    def run(self, graphs: bool = True) -> None:
        """Put the pass into its stream.

        The first run is a plain one: TensorRT then does what it had put off since the shapes were
        set, which no capture may hold. The second run is captured and launched.

        Args:
            graphs: Whether to capture at all.

        Raises:
            BackendError: where TensorRT refuses to run.
        """
        if self._graph is None and graphs and self._ran and not self.uncaptured:
            self._capture()
        if self._graph is not None:
            self._graph.launch(self._stream)
            return
        self._enqueue()
        self._ran = True

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._stream.handle):
            raise BackendError(f"{self._file} did not run: {self._said()}")

    def _capture(self) -> None:
        capturable = getattr(self._context, "is_stream_capturable", None)
        if capturable is not None and not capturable(self._stream.handle):
            self.uncaptured = "TensorRT says that it cannot be captured"
            return
        self._stream.synchronize()
        try:
            with self._stream.capture() as graph:
                self._enqueue()
        except BackendError as err:
            self.uncaptured = str(err)
            return
        self._graph, self.nodes = graph, graph.nodes

    def close(self) -> None:
        """Let go of graph and context, in this order; nothing may still run."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.__exit__(None, None, None)
        self._context = None


# --- is it the engine that engine.json describes -------------------------------------------------


def check_engine(trt: Any, engine: Any, plan: Plan) -> None:
    """Refuse a loaded engine whose tensors, profiles or aliases are not those of engine.json.

    Raises:
        BackendError: naming everything that differs.
    """
    wrong: list[str] = []
    found: dict[str, list[str]] = {"INPUT": [], "OUTPUT": []}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        found[engine.get_tensor_mode(name).name].append(name)
    wanted = {"INPUT": plan.inputs, "OUTPUT": plan.outputs}
    for mode, ports in wanted.items():
        names = {port.name for port in ports}
        wrong += [f"{mode.lower()} {name} is missing" for name in sorted(names - {*found[mode]})]
        wrong += [f"{mode.lower()} {name} is unknown" for name in sorted({*found[mode]} - names)]
    fixed = _fixed(plan)
    for port in (*plan.inputs, *plan.outputs):
        if port.name in (*found["INPUT"], *found["OUTPUT"]):
            wrong += _tensor_differences(engine, port, fixed)
    wrong += _profile_differences(engine, plan)
    if wrong:
        raise BackendError(
            f"{plan.file} is not what engine.json says: {'; '.join(wrong)}: build the engine again"
        )
    aliased = getattr(engine, "get_aliased_input_tensor", None)
    pairs = {name: aliased(name) for name in found["OUTPUT"]} if aliased is not None else {}
    check_aliases(plan.role, plan.aliases, {name: to for name, to in pairs.items() if to})


def _fixed(plan: Plan) -> dict[str, int]:
    """Symbols that have one size in every profile."""
    sizes: dict[str, set[int]] = {}
    for profile in plan.profiles:
        for port in plan.inputs:
            for axis, dim in enumerate(port.shape):
                if not isinstance(dim, str):
                    continue
                symbol = dim[-1]
                factor = resolve_dim(dim, {symbol: 1})
                for shape in profile[port.name]:
                    sizes.setdefault(symbol, set()).add(shape[axis] // factor)
    return {symbol: found.pop() for symbol, found in sizes.items() if len(found) == 1}


def _tensor_differences(engine: Any, port: Port, fixed: Mapping[str, int]) -> list[str]:
    wrong = []
    dtype = _DTYPES.get(engine.get_tensor_dtype(port.name).name, "another")
    if dtype != port.dtype:
        wrong.append(f"{port.name} is {dtype}, not {port.dtype}")
    shape = tuple(engine.get_tensor_shape(port.name))
    if len(shape) != len(port.shape) or not all(
        _fits(size, dim, fixed) for size, dim in zip(shape, port.shape, strict=True)
    ):
        wrong.append(f"{port.name} has shape {list(shape)}, not {list(port.shape)}")
    if engine.get_tensor_location(port.name).name != "DEVICE":
        wrong.append(f"{port.name} is read on the host: its values decide on shapes")
    return wrong


def _fits(size: int, dim: int | str, fixed: Mapping[str, int]) -> bool:
    """Whether an engine's size of an axis is the port's; -1 stands for a dynamic one."""
    if isinstance(dim, int):
        return size == dim
    return size == -1 or (dim[-1] in fixed and size == resolve_dim(dim, fixed))


def _profile_differences(engine: Any, plan: Plan) -> list[str]:
    count = int(engine.num_optimization_profiles)
    if plan.profiles and count != len(plan.profiles):
        return [f"it has {count} profiles, not {len(plan.profiles)}"]
    wrong = []
    for index, profile in enumerate(plan.profiles):
        for name, bounds in profile.items():
            has = _bounds(engine.get_tensor_profile_shape(name, index))
            if has != bounds:
                wrong.append(f"profile {index} takes {name} {_range(has)}, not {_range(bounds)}")
    return wrong


def _bounds(shapes: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in shape) for shape in shapes)


def _range(bounds: Sequence[Sequence[int]]) -> str:
    return " by ".join(str(list(shape)) for shape in bounds)
