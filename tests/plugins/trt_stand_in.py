"""A stand-in for the C++ half of TensorRT, under NVIDIA's own ``tensorrt.plugin`` package.

`install` makes a module ``tensorrt`` that holds what the pure-Python package ``tensorrt.plugin``
touches (the package itself is NVIDIA's, unchanged), and `Node` calls a plugin in the order in which
TensorRT does: parser (creator, fields, output types and shapes), then per profile formats,
configuration, tactics and launch parameters, then the kernel of the chosen tactic. It proves what a
plugin hands over, not what TensorRT does with it: nothing here runs a kernel.
"""

from __future__ import annotations

import copy
import enum
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

INT32, INT64 = range(-(2**31), 2**31), range(-(2**63), 2**63)


class DataType(enum.IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


class TensorFormat(enum.IntEnum):
    LINEAR = 0
    CHW32 = 5
    HWC = 8


class DimensionOperation(enum.IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    SUB = 4
    EQUAL = 5
    LESS = 6
    FLOOR_DIV = 7
    CEIL_DIV = 8


class PluginFieldType(enum.IntEnum):
    FLOAT16 = 0
    FLOAT32 = 1
    FLOAT64 = 2
    INT8 = 3
    INT16 = 4
    INT32 = 5
    CHAR = 6
    DIMS = 7
    UNKNOWN = 8
    BF16 = 9
    INT64 = 10


class TensorRTPhase(enum.IntEnum):
    BUILD = 0
    RUNTIME = 1


class PluginCapabilityType(enum.IntEnum):
    CORE = 0
    BUILD = 1
    RUNTIME = 2


class QuickPluginCreationRequest(enum.IntEnum):
    UNKNOWN = 0
    PREFER_JIT = 1
    PREFER_AOT = 2
    STRICT_JIT = 3
    STRICT_AOT = 4


class PluginArgType(enum.IntEnum):
    INT = 0


class PluginArgDataType(enum.IntEnum):
    INT8 = 0
    INT16 = 1
    INT32 = 2


_COMPUTE = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
    DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.EQUAL: lambda a, b: int(a == b),
    DimensionOperation.LESS: lambda a, b: int(a < b),
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class IDimensionExpr:
    """A constant (int), a dimension of the network (str), or an operation on two of these."""

    def __init__(self, value: Any, operands: tuple[IDimensionExpr, ...] = ()) -> None:
        self.value, self.operands = value, operands

    def is_constant(self) -> bool:
        return not self.operands and isinstance(self.value, int)

    def is_size_tensor(self) -> bool:
        return False

    def get_constant_value(self) -> int:
        assert self.is_constant()
        return int(self.value)

    def evaluate(self, sizes: Mapping[str, int], values: range = INT32) -> int:
        """Its value; OverflowError where a step on the way is none of the values."""
        if self.operands:
            first, second = (one.evaluate(sizes, values) for one in self.operands)
            result = int(_COMPUTE[self.value](first, second))
        else:
            result = sizes[self.value] if isinstance(self.value, str) else int(self.value)
        if result not in values:
            raise OverflowError(f"{self.value} gives {result}, which is not in {values}")
        return result


class IExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(int(value))

    def operation(
        self, op: DimensionOperation, first: IDimensionExpr, second: IDimensionExpr
    ) -> IDimensionExpr:
        assert isinstance(first, IDimensionExpr), first
        assert isinstance(second, IDimensionExpr), second
        result = IDimensionExpr(op, (first, second))
        if first.is_constant() and second.is_constant():
            return IDimensionExpr(result.evaluate({}))
        return result


class _Sequence(list[Any]):
    def __init__(self, given: Any = ()) -> None:
        super().__init__([0] * given if isinstance(given, int) else given)


class Dims(_Sequence):
    MAX_DIMS = 8


class DimsExprs(_Sequence):
    pass


class PluginTensorDesc:
    def __init__(self) -> None:
        self.dims, self.type, self.format, self.scale = Dims(), None, TensorFormat.LINEAR, 1.0


class DynamicPluginTensorDesc:
    def __init__(self) -> None:
        self.desc = PluginTensorDesc()
        self.min, self.opt, self.max = Dims(), Dims(), Dims()


class PluginField:
    def __init__(self, name: str, data: Any = None, type: Any = None) -> None:
        if isinstance(data, bytes):
            data = np.frombuffer(data, np.uint8)
        self.name, self.data, self.type = name, data, type


class PluginFieldCollection(list[PluginField]):
    pass


class _Interface:
    def __init__(self, *_: object) -> None:
        pass


class IPluginV3(_Interface):
    pass


class IPluginV3QuickCore(_Interface):
    pass


class IPluginV3QuickBuild(_Interface):
    pass


class IPluginV3QuickAOTBuild(_Interface):
    pass


class IPluginV3QuickRuntime(_Interface):
    pass


class IPluginCreatorV3Quick(_Interface):
    pass


class ISymExpr(_Interface):
    pass


class ITensor:
    pass


class Logger:
    WARNING = 2

    def __init__(self, *_: object) -> None:
        self.lines: list[str] = []

    def log(self, _: int, line: str) -> None:
        self.lines.append(line)


class Registry:
    """Creators by name, version and namespace."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name, creator.plugin_version, namespace] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


REGISTRY = Registry()


def get_plugin_registry() -> Registry:
    return REGISTRY


def install(package: Path, version: str) -> tuple[types.ModuleType, types.ModuleType]:
    """Modules ``tensorrt``, this stand-in, and ``tensorrt.plugin``, NVIDIA's from a folder."""
    trt = types.ModuleType("tensorrt")
    public = {name: one for name, one in globals().items() if isinstance(one, type)}
    names = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "bool": "BOOL"}
    names |= {name: name.upper() for name in ("int8", "int32", "uint8", "fp8", "int64", "int4")}
    vars(trt).update(public, **{name: DataType[member] for name, member in names.items()})
    vars(trt).update(get_plugin_registry=get_plugin_registry, __version__=version)
    trt.__path__ = [str(package.parent)]
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    trtp = importlib.util.module_from_spec(spec)
    sys.modules |= {"tensorrt": trt, "tensorrt.plugin": trtp}
    trt.plugin = trtp  # type: ignore[attr-defined]
    spec.loader.exec_module(trtp)
    return trt, trtp


class _LaunchParams:
    """IKernelLaunchParams: attributes set by the plugin."""


class _SymExprs(dict[int, Any]):
    """ISymExprs: a count, and expressions by index."""

    nbSymExprs = 0  # noqa: N815 - TensorRT's name


@dataclass
class Kernel:
    """What one tactic hands over for one profile."""

    tactic: int
    entry: str
    text: bytes
    grid: tuple[Any, Any, Any]
    block: tuple[Any, Any, Any]
    shared: Any
    arguments: list[Any]
    types: list[Any]
    plugin: Any


Shape = Sequence["int | str"]
Profile = Mapping[str, "tuple[int, int, int]"]


class Node:
    """One node of a network, whose dimensions are ints or names.

    Args:
        name: Its op_type.
        namespace: Its attribute ``plugin_namespace``.
        inputs: Type and shape of each input.
        attributes: INT attributes.
        request: What the attribute ``aot`` or a network flag asks for; nothing by default.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        inputs: Sequence[tuple[DataType, Shape]],
        attributes: Mapping[str, int],
        request: QuickPluginCreationRequest = QuickPluginCreationRequest.UNKNOWN,
    ) -> None:
        creator = REGISTRY.get_creator(name, "1", namespace)
        assert creator is not None, f"no plugin {namespace}::{name}"
        # the parser fills the creator's fields from the node and skips what the node lacks
        fields = PluginFieldCollection(
            PluginField(one.name, np.array([attributes[one.name]], np.int32), PluginFieldType.INT32)
            for one in creator.field_names
            if one.name in attributes
        )
        self.plugin = creator.create_plugin(name, namespace, fields, TensorRTPhase.BUILD, request)
        for kind in (PluginCapabilityType.CORE, PluginCapabilityType.BUILD):
            assert self.plugin.get_capability_interface(kind) is self.plugin
        self.types = [one for one, _ in inputs]
        self.shapes = [DimsExprs(IDimensionExpr(size) for size in shape) for _, shape in inputs]
        ranks = [len(shape) for shape in self.shapes]
        self.out_types = self.plugin.get_output_data_types(list(self.types), ranks)
        assert len(self.out_types) == self.plugin.get_num_outputs()
        self.out_shapes = self.plugin.get_output_shapes(self.shapes, [], IExprBuilder())
        assert len(self.out_shapes) == len(self.out_types)
        self.aliased = [self.plugin.get_aliased_input(i) for i in range(len(self.out_types))]

    def _desc(self, shape: Sequence[Any], type: Any, profile: Profile) -> DynamicPluginTensorDesc:
        desc = DynamicPluginTensorDesc()
        desc.desc.dims = Dims(e.get_constant_value() if e.is_constant() else -1 for e in shape)
        desc.desc.type = type
        for index, bound in enumerate(("min", "opt", "max")):
            sizes = {name: bounds[index] for name, bounds in profile.items()}
            setattr(desc, bound, Dims(e.evaluate(sizes, INT64) for e in shape))
        return desc

    def candidates(self, profile: Profile) -> list[tuple[list[Any], list[int]]]:
        """Type combinations that fit the network, each with its tactics."""
        ports = [*zip(self.shapes, self.types, strict=True)]
        ports += [*zip(self.out_shapes, self.out_types, strict=True)]
        descs = [self._desc(shape, type, profile) for shape, type in ports]
        # asked twice: once for the number, once for the combinations
        self.plugin.get_supported_format_combinations(descs, len(self.types))
        flat = self.plugin.get_supported_format_combinations(descs, len(self.types))
        assert flat
        assert len(flat) % len(descs) == 0
        found = []
        for start in range(0, len(flat), len(descs)):
            combination = flat[start : start + len(descs)]
            assert all(one.format == TensorFormat.LINEAR for one in combination)
            if [one.type for one in combination] != [type for _, type in ports]:
                continue  # strongly typed: the network's own types or none
            chosen = []
            for desc, one in zip(descs, combination, strict=True):
                chosen.append(copy.deepcopy(desc))
                chosen[-1].desc.type, chosen[-1].desc.format = one.type, one.format
            self.plugin.configure_plugin(chosen[: len(self.types)], chosen[len(self.types) :])
            found.append((chosen, self.plugin.get_valid_tactics() or [0]))
        return found

    def launch(self, plugin: Any, descs: list[Any], tactic: int) -> Kernel:
        """Launch parameters and kernel of one tactic, as timed and as put into the engine."""
        count = len(self.types)
        plugin.set_tactic(tactic)
        params, extra = _LaunchParams(), _SymExprs()
        plugin.get_launch_params(self.shapes, descs, count, params, extra, IExprBuilder())
        values = vars(params)
        assert all(one.dtype == PluginArgDataType.INT32 for one in values.values())
        entry, text = self.kernel(plugin, descs)
        return Kernel(
            tactic,
            entry,
            text,
            tuple(values[f"grid_{axis}"].expr for axis in "xyz"),
            tuple(values[f"block_{axis}"].expr for axis in "xyz"),
            values["shared_mem"].expr,
            [extra[index].expr for index in range(extra.nbSymExprs)],
            [one.desc.type for one in descs],
            plugin,
        )

    def kernel(self, plugin: Any, descs: list[Any]) -> tuple[str, bytes]:
        """Entry and text of the tactic that was set last."""
        plain = [one.desc for one in descs]
        entry, text = plugin.get_kernel(plain[: len(self.types)], plain[len(self.types) :])
        assert isinstance(entry, str)
        assert isinstance(text, bytes)
        return entry, text

    def build(self, profile: Profile) -> list[Kernel]:
        """Every candidate of one profile, each from its own clone."""
        kernels = []
        for descs, tactics in self.candidates(profile):
            for tactic in tactics:
                clone = self.plugin.clone()
                assert clone.get_timing_cache_id() == ""
                kernels.append(self.launch(clone, descs, tactic))
        return kernels
