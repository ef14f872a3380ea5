"""A stand-in for ONNX Runtime's sessions on a card, over the CUDA driver's stand-in.

Numbers come from a real session on the CPU; memory is that of :mod:`trt_runtime_stand_in`, which
does a stream's work late. It is stricter than the real one where that would be silent, and does
what the real one does where that is a trap:

- every port is bound to device memory of one allocation, by its own type, and never twice;
- no output lies over an input or another output;
- without our stream a run is not in the order of our copies;
- an input that the session wants elsewhere is copied when it is bound, and that copy is read ever
  after (``IOBinding::BindInput`` in ONNX Runtime's ``IOBinding.cc``);
- nodes are placed as the CUDA provider places them: what computes sizes is on the CPU.

It cannot show what a provider really computes, takes, or does with its options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from cuda_stand_in import from_bits, to_bits
from trt_runtime_stand_in import Broken, Cuda

from fixedstate.bundle import Bundle
from fixedstate.ports import DTYPES, numpy_dtype
from fixedstate.runtime import ortdevice
from fixedstate.runtime.devicememory import DeviceDriver

CPU = "CPUExecutionProvider"
SIZES = frozenset({"Concat", "Squeeze", "Min", "Max"})  # a part of what is placed on the CPU
TYPES = {1: "float32", 2: "uint8", 3: "int8", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}
NAMES = {"float32": "float"}


class Card(Cuda):
    """The driver, which also counts what its other copies bring to the host.

    Attributes:
        read: Bytes that copies of lines and copies that wait brought to the host.
    """

    def __init__(self) -> None:
        self.read = 0
        super().__init__()

    def _cuMemcpy2DAsync_v2(self, order: Any, stream: Any) -> None:
        if order[0].dstMemoryType == 1:
            self.read += order[0].WidthInBytes * order[0].Height
        super()._cuMemcpy2DAsync_v2(order, stream)

    def _cuMemcpyDtoH_v2(self, target: int, source: int, nbytes: int) -> None:
        self.read += nbytes
        super()._cuMemcpyDtoH_v2(target, source, nbytes)


class Provider:
    """What stands in the place of ONNX Runtime's module-level functions.

    Attributes:
        card: The driver.
        name: ONNX Runtime's name of the provider.
        available: Names that this ONNX Runtime has.
        sessions: Every session that was made for a card.
        starts: Whether sessions begin on the provider; else ONNX Runtime takes the CPU.
        on_cpu: Operators that it places on the CPU.
        on_host: Ports that it wants on the host.
        tells: Whether it says where it places nodes.
        copies: Whether it takes our memory for that of another device.
        bias: Added to every number that is no integer.
        twin: Folder of the graphs that compute, where those of a bundle cannot on the CPU.
    """

    def __init__(self, name: str = "CUDAExecutionProvider") -> None:
        self.card = Card()
        self.name = name
        self.available = [name, CPU]
        self.sessions: list[Session] = []
        self.starts = self.tells = True
        self.on_cpu = SIZES
        self.on_host: frozenset[str] = frozenset()
        self.copies = False
        self.bias = 0.0
        self.twin: Path | None = None

    def install(self, patch: Any) -> None:
        """Let ``fixedstate.runtime.ort`` and ``ortdevice`` find it."""
        self._real = onnxruntime.InferenceSession
        patch.setattr(onnxruntime, "InferenceSession", self._session)
        patch.setattr(onnxruntime, "get_available_providers", lambda: list(self.available))
        patch.setattr(ortdevice, "DeviceDriver", partial(DeviceDriver, library=self.card))

    def _session(
        self, source: str | bytes, options: Any, enable_fallback: int = 1, **where: Any
    ) -> Any:
        if enable_fallback:
            raise Broken("ONNX Runtime would take the CPU by itself")
        providers = where.get("providers")
        if providers == [CPU]:
            return self._real(source, options, **where)
        if options.get_session_config_entry("session.record_ep_graph_assignment_info") != "1":
            raise Broken("nobody will know where nodes are")
        made = Session(self, source, options, providers)
        self.sessions.append(made)
        return made


class Session:
    """One session on the card.

    Attributes:
        providers: As they were asked for: names, and options of those on a card.
        bindings: That were made.
        runs: Runs so far.
    """

    def __init__(self, provider: Provider, source: Any, options: Any, providers: Any) -> None:
        self.provider = provider
        self.providers = providers
        self.bindings: list[Binding] = []
        self.runs = 0
        file = Path(source)
        self.inputs, self.outputs = self._ports(file) if provider.twin else ((), ())
        if provider.twin:
            file = provider.twin / file.name
        self.real = provider._real(str(file), options, providers=[CPU])
        if not provider.twin:
            self.inputs = tuple(map(_described, self.real.get_inputs()))
            self.outputs = tuple(map(_described, self.real.get_outputs()))
        self.ports = {port.name: port for port in (*self.inputs, *self.outputs)}

    def _ports(self, file: Path) -> tuple[tuple[Any, ...], ...]:
        """As the manifest of the bundle says, whose graphs a twin computes."""
        graphs = Bundle.open(file.parent, verify_weights=False).graphs.values()
        (graph,) = (graph for graph in graphs if graph.file == file.name)
        return tuple(
            tuple(
                SimpleNamespace(
                    name=port.name,
                    dtype=port.dtype,
                    type=f"tensor({NAMES.get(port.dtype, port.dtype)})",
                    shape=port.shape,
                )
                for port in ports
            )
            for ports in (graph.inputs, graph.outputs)
        )

    def get_providers(self) -> list[str]:
        return [self.provider.name, CPU] if self.provider.starts else [CPU]

    def get_inputs(self) -> tuple[Any, ...]:
        return self.inputs

    def get_outputs(self) -> tuple[Any, ...]:
        return self.outputs

    def _infos(self, ports: tuple[Any, ...]) -> list[Any]:
        on_host = self.provider.on_host
        return [SimpleNamespace(name="Cpu" if p.name in on_host else "Cuda") for p in ports]

    def get_input_memory_infos(self) -> list[Any]:
        return self._infos(self.inputs)

    def get_output_memory_infos(self) -> list[Any]:
        return self._infos(self.outputs)

    @property
    def get_provider_graph_assignment_info(self) -> Callable[[], list[Any]]:
        if not self.provider.tells:
            raise AttributeError("ONNX Runtime 1.23 has no such thing")
        return self._assigned

    def _assigned(self) -> list[Any]:
        found = []
        for part in self.real.get_provider_graph_assignment_info():
            for node in part.get_nodes():
                name = CPU if node.op_type in self.provider.on_cpu else self.provider.name
                found.append(SimpleNamespace(ep_name=name, get_nodes=partial(list, [node])))
        return found

    def settings(self) -> Mapping[str, str]:
        """The options of the provider."""
        return dict(self.providers[0][1])

    def io_binding(self) -> Binding:
        self.bindings.append(Binding(self))
        return self.bindings[-1]

    def run(self, names: list[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        self.runs += 1
        return self.real.run(names, feeds)

    def run_with_iobinding(self, binding: Binding) -> None:
        if binding.session is not self:
            raise Broken("the binding is another session's")
        if missing := sorted(self.ports.keys() - binding.bound.keys()):
            raise Broken(f"a run without {missing}")
        binding.check_overlaps()
        self.runs += 1
        options, card = self.settings(), self.provider.card
        if options.get("has_user_compute_stream") == "1":
            card.put(int(options["user_compute_stream"]), binding.compute)
            card.flush()  # ONNX Runtime waits at the end of a run
        else:
            binding.compute()  # in a stream of its own, which waits for nobody


class Binding:
    """Device memory at every port.

    Attributes:
        session: Whose.
        bound: Element type, shape and address by port.
        copied: What was copied when it was bound, by input.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.bound: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self.copied: dict[str, np.ndarray] = {}

    def bind_input(
        self, name: str, device: str, number: int, kind: int, shape: Any, address: int
    ) -> None:
        self._bind(name, self.session.inputs, device, number, kind, shape, address)
        provider = self.session.provider
        if provider.copies or name in provider.on_host:
            self.copied[name] = self._array(name).copy()

    def bind_output(
        self, name: str, device: str, number: int, kind: int, shape: Any, address: int
    ) -> None:
        self._bind(name, self.session.outputs, device, number, kind, shape, address)

    def _bind(
        self,
        name: str,
        ports: tuple[Any, ...],
        device: str,
        number: int,
        kind: int,
        shape: Any,
        address: int,
    ) -> None:
        port = next((port for port in ports if port.name == name), None)
        if port is None:
            raise RuntimeError(f"no such port {name}")
        if (device, number) != ("cuda", 0):
            raise RuntimeError(f"There's no data transfer registered from {device} {number}")
        if name in self.bound:
            raise Broken(f"{name} was bound twice")
        if TYPES[kind] != port.dtype or len(shape) != len(port.shape):
            raise RuntimeError(f"{name} is {port.dtype} {port.shape}, not {TYPES[kind]} {shape}")
        self.bound[name] = TYPES[kind], tuple(shape), address
        self._array(name)  # all of it in one allocation

    def _nbytes(self, name: str) -> int:
        dtype, shape, _ = self.bound[name]
        return prod(shape) * DTYPES[dtype]

    def _array(self, name: str) -> np.ndarray:
        dtype, shape, address = self.bound[name]
        raw = self.session.provider.card.view(address, self._nbytes(name))
        return raw.view(numpy_dtype(dtype)).reshape(shape)

    def check_overlaps(self) -> None:
        spans = {name: (at, at + self._nbytes(name)) for name, (_, _, at) in self.bound.items()}
        for output in self.session.outputs:
            begin, end = spans[output.name]
            for name, (first, last) in spans.items():
                if name != output.name and begin < last and first < end:
                    raise Broken(f"output {output.name} lies over {name}")

    def compute(self) -> None:
        feeds = {}
        for port, meta in zip(self.session.inputs, self.session.real.get_inputs(), strict=True):
            values = self.copied.get(port.name, self._array(port.name))
            wanted = _described(meta).dtype
            feeds[port.name] = np.array(from_bits(values, port.dtype), numpy_dtype(wanted))
        names = [port.name for port in self.session.outputs]
        with np.errstate(all="ignore"):
            found = self.session.real.run(names, feeds)
        for port, values in zip(self.session.outputs, found, strict=True):
            if values.dtype.kind == "f":
                values += values.dtype.type(self.session.provider.bias)
            self._array(port.name)[...] = to_bits(values, port.dtype)


def _described(meta: Any) -> Any:
    """A port of a real session with the name of its dtype."""
    kind = meta.type.removeprefix("tensor(").removesuffix(")")
    dtype = next((name for name, other in NAMES.items() if other == kind), kind)
    return SimpleNamespace(name=meta.name, dtype=dtype, type=meta.type, shape=meta.shape)
