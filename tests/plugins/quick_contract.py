"""Drives the quick-deployable plugins through NVIDIA's package and prints what came out, as JSON.

A program of its own, since each version of the package (and the numpy it works with) needs a
process of its own: ``quick_contract.py FOLDER VERSION``. `test_quick.py` judges the output.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any

import numpy as np
import trt_stand_in as stand_in
from trt_stand_in import DataType, Node, QuickPluginCreationRequest

from fixedstate.plugins.quick import register
from fixedstate.plugins.schema import DOMAIN, KERNEL_IO, OPS, KernelSpec

TYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.HALF,
    "bfloat16": DataType.BF16,
    "int64": DataType.INT64,
}
Sizes = dict[str, Any]
Profile = dict[str, "tuple[int, int, int]"]
ROWS = (1, 2, 8)


def models(spec: KernelSpec) -> list[Sizes]:
    """Sizes of a few models; together they need every compiled form."""
    if "C" in spec.multiples:
        return [{"C": 5376, "K": 4}, {"C": 48, "K": 2}, {"C": 1536, "K": 8}]
    widths = sorted({tile.widest_state for tile in spec.tiles if tile.widest_state})
    step = spec.multiples.get("N", 1)
    states = sorted({*widths, *(width - step for width in widths if width > step)})
    if "E" in spec.multiples:
        return [{"E": 5120 - 16 * (n % 3), "N": n} for n in states]
    paper: list[Sizes] = [{"H": 80, "P": 64, "G": 1, "W": 1, "N": n} for n in states]
    return [*paper, {"H": 6, "P": 80, "G": 3, "W": 80, "N": 48}]


def blocks(spec: KernelSpec) -> list[int]:
    """Block lengths: around every form's longest, the largest, and a whole sequence."""
    longest = {tile.longest_block for tile in spec.tiles if tile.longest_block}
    near = {one + step for one in longest for step in (0, 1)}
    return sorted({0, 4, 32, 33, 256} | near)


def cases(spec: KernelSpec) -> Iterator[tuple[Sizes, int, Profile]]:
    for sizes in models(spec):
        for block_len in blocks(spec):
            profile: Profile = {"B": ROWS}
            tokens: int | str = "T"
            if not block_len:
                profile["T"] = (1, 32, 999)
            elif spec.single_block:
                tokens = block_len
            else:
                profile["T"] = (block_len, 2 * block_len, 16 * block_len)
            yield {**sizes, "B": "B", "T": tokens}, block_len, profile


def inputs(spec: KernelSpec, sizes: Mapping[str, Any], io: str) -> list[tuple[DataType, list[Any]]]:
    """Types and shapes of a node's inputs; a dynamic size is a name."""
    given = []
    for port in spec.inputs:
        letters = port.shapes[-1] if port.name == "d" and sizes.get("W", 1) != 1 else port.shape
        shape = [sizes[one] for one in letters]
        if port.name == "state":
            known = isinstance(sizes.get("K"), int)
            shape = [sizes[one] - 1 if one == "K" and known else sizes[one] for one in port.shape]
        given.append((TYPES[port.dtype_for(io)], shape))
    return given


def node(spec: KernelSpec, sizes: Mapping[str, Any], io: str, block_len: int, **more: Any) -> Node:
    return Node(spec.name, DOMAIN, inputs(spec, sizes, io), {"block_len": block_len}, **more)


def points(profile: Profile) -> list[dict[str, int]]:
    """The profile's three bounds."""
    return [{name: bounds[i] for name, bounds in profile.items()} for i in range(3)]


def kernel_facts(kernel: stand_in.Kernel, at: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    return {
        "tactic": kernel.tactic,
        "entry": kernel.entry,
        "sha256": hashlib.sha256(kernel.text).hexdigest(),
        "nul": b"\0" in kernel.text,
        "launches": [
            {
                "grid": [one.evaluate(sizes) for one in kernel.grid],
                "arguments": [one.evaluate(sizes) for one in kernel.arguments],
            }
            for sizes in at
        ],
        "block": [one.get_constant_value() for one in kernel.block],
        "shared": kernel.shared.get_constant_value(),
        "aot": not hasattr(kernel.plugin, "enqueue"),
        "types": [one.name for one in kernel.types],
    }


def node_facts(one: Node, at: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    return {
        "out_types": [t.name for t in one.out_types],
        "out_shapes": [
            [[e.evaluate(sizes) for e in shape] for shape in one.out_shapes] for sizes in at
        ],
        "aliased": one.aliased,
    }


def all_builds() -> Iterator[dict[str, Any]]:
    """Every operator, io dtype and tactic, over the sizes above."""
    for spec in OPS.values():
        for io in KERNEL_IO:
            for sizes, block_len, profile in cases(spec):
                one = node(spec, sizes, io, block_len)
                at = points(profile)
                kernels = one.build(profile)
                yield {
                    "op": spec.name,
                    "io": io,
                    "block_len": block_len,
                    "sizes": [{**sizes, **point} for point in at],
                    "tactics": [kernel_facts(kernel, at) for kernel in kernels],
                    **node_facts(one, at),
                }


def one_network() -> dict[str, Any]:
    """Two sizes of one operator side by side, two profiles of each, kernels asked for last."""
    spec = OPS["SsdBlockCommit"]
    small = {"H": 8, "P": 32, "G": 2, "W": 1, "N": 64, "B": "B", "T": "T"}
    large = {"H": 80, "P": 64, "G": 1, "W": 1, "N": 128, "B": "B", "T": "T"}
    profiles: list[Profile] = [
        {"B": (1, 1, 1), "T": (32, 32, 32)},
        {"B": (1, 4, 8), "T": (32, 256, 512)},
    ]
    nodes = {name: node(spec, s, "float16", 32) for name, s in (("small", small), ("large", large))}
    timed = {
        (name, index): one.build(profile)
        for index, profile in enumerate(profiles)
        for name, one in nodes.items()
    }
    facts: dict[str, Any] = {}
    for (name, index), kernels in timed.items():
        at = points(profiles[index])
        rows = []
        for kernel in kernels:
            clone = kernel.plugin.clone()
            descs = nodes[name].candidates(profiles[index])[0][0]
            again = nodes[name].kernel(clone, descs)
            assert again == (kernel.entry, kernel.text), "a clone has another kernel"
            rows.append(kernel_facts(kernel, at))
        facts[f"{name} {index}"] = {
            "sizes": [{**(small if name == "small" else large), **point} for point in at],
            "tactics": rows,
        }
    return facts


def requests() -> dict[str, Any]:
    """What the attribute ``aot`` or a network flag changes."""
    spec = OPS["CausalConvDenoise"]
    sizes = {"C": 64, "K": 4, "B": "B", "T": 32}
    return {
        request.name: outcome(lambda r=request: node(spec, sizes, "float16", 32, request=r))
        for request in QuickPluginCreationRequest
    }


def outcome(call: Callable[[], Any]) -> str:
    """``ok``, or the error's type and text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def refusals() -> dict[str, str]:
    """What cannot be built, and how it ends; the first word of a label is the stage."""
    conv, ssd, scan = (
        OPS[n] for n in ("CausalConvCommit", "SsdBlockCommit", "SelectiveScanCommit")
    )
    c: Sizes = {"C": 64, "K": 4, "B": "B", "T": "T"}
    s: Sizes = {"H": 8, "P": 64, "G": 1, "W": 1, "N": 128, "B": "B", "T": "T"}
    e: Sizes = {"E": 64, "N": 16, "B": "B", "T": "T"}
    tokens = (32, 64, 128)
    profile: Profile = {"B": (1, 2, 8), "T": tokens}

    def parse(spec: KernelSpec, sizes: Sizes, io: str = "float16", block_len: int = 32) -> Any:
        return lambda: node(spec, sizes, io, block_len)

    def build(spec: KernelSpec, sizes: Sizes, bounds: Profile, block_len: int = 32) -> Any:
        made = node(spec, sizes, "float16", block_len)
        return lambda: made.build(bounds)

    def retyped(spec: KernelSpec, sizes: Sizes, port: str, dtype: str) -> Any:
        given = inputs(spec, sizes, "float16")
        index = spec.input_names.index(port)
        given[index] = (TYPES[dtype], given[index][1])
        return lambda: Node(spec.name, DOMAIN, given, {"block_len": 32})

    def stale() -> None:
        made = node(ssd, s, "float16", 32)
        (descs, offered), *_ = made.candidates(profile)
        other = next(number for tile in ssd.tiles if (number := ssd.tactic(tile)) not in offered)
        made.launch(made.plugin.clone(), descs, other)

    calls: dict[str, Callable[[], Any]] = {
        "parse fp32": parse(conv, c, "float32"),
        "parse fp32 ssd": parse(ssd, s, "float32"),
        "parse odd channels": parse(conv, {**c, "C": 50}),
        "parse odd head": parse(ssd, {**s, "P": 40}),
        "parse odd state": parse(ssd, {**s, "N": 24}),
        "parse wide ssd": parse(ssd, {**s, "N": 512}),
        "parse wide scan": parse(scan, {**e, "N": 1024}),
        "parse dynamic channels": parse(conv, {**c, "C": "C"}),
        "parse dynamic taps": parse(conv, {**c, "K": "K"}),
        "parse dynamic state": parse(ssd, {**s, "N": "N"}),
        "parse dt float16": retyped(ssd, s, "dt", "float16"),
        "parse state float16": retyped(ssd, s, "state", "float16"),
        "parse length int32": lambda: Node(
            conv.name,
            DOMAIN,
            [*inputs(conv, c, "float16")[:-1], (DataType.INT32, ["B"])],
            {"block_len": 32},
        ),
        "parse mixed io": retyped(ssd, s, "b", "bfloat16"),
        "parse no attribute": lambda: Node(ssd.name, DOMAIN, inputs(ssd, s, "float16"), {}),
        "parse long block": parse(ssd, s, block_len=257),
        "parse too few inputs": lambda: Node(
            ssd.name, DOMAIN, inputs(ssd, s, "float16")[:-1], {"block_len": 32}
        ),
        "parse rank": lambda: Node(
            conv.name,
            DOMAIN,
            [(DataType.HALF, ["B", "T"]), *inputs(conv, c, "float16")[1:]],
            {"block_len": 32},
        ),
        "parse groups": parse(ssd, {**s, "G": 3}),
        "launch many rows": build(conv, c, {"B": (1, 8, 65536), "T": tokens}),
        "launch many rows ssd": build(ssd, s, {"B": (1, 8, 65536), "T": tokens}),
        "launch long": build(conv, c, {"B": (1, 2, 8), "T": (32, 64, 32 * 2**20)}),
        "launch half block": build(ssd, s, {"B": (1, 2, 8), "T": (32, 64, 100)}),
        "launch half block at least": build(ssd, s, {"B": (1, 2, 8), "T": (16, 64, 128)}),
        "launch int32": build(scan, e, {"B": (1, 1, 1), "T": (32, 32, 2**31)}),
        "launch stale tactic": stale,
    }
    return {label: outcome(call) for label, call in calls.items()}


def traps(trtp: Any) -> dict[str, str]:
    """Mistakes of a plugin that the package itself refuses, and one plugin without any."""
    desc, params, exprs = trtp.TensorDesc, trtp.KernelLaunchParams, trtp.SymIntExprs
    returns = GenericAlias(tuple, (str, str, params, exprs))

    def signed(function: Callable[..., Any], given: Sequence[str], result: Any) -> Any:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        types = {"x": desc, "outputs": GenericAlias(tuple, (desc,))}
        made = [inspect.Parameter(n, kind, annotation=types.get(n, int)) for n in given]
        function.__signature__ = inspect.Signature(made, return_annotation=result)  # type: ignore[attr-defined]
        return function

    def outcome_of(name: str, arguments: Any, given: Sequence[str], result: Any = returns) -> str:
        identity = f"traps::{name}"
        every = ("x", "first", "second")

        def kernel(*passed: Any) -> Any:
            if len(passed) != len(given):
                raise TypeError(f"{len(passed)} arguments for {len(given)} parameters")
            return "entry", "text", params(), exprs.from_tuple(arguments())

        def call() -> None:
            trtp.register(identity)(signed(lambda x, **_: x.like(), every, desc))
            trtp.aot_impl(identity)(signed(kernel, given, result))
            made = Node(name, "traps", [(DataType.HALF, ["B"])], {"first": 1, "second": 2})
            made.plugin.set_tactic(0)  # no autotune function: the package offers no tactic
            made.build({"B": (1, 2, 3)})

        return outcome(call)

    given = ("x", "first", "second", "outputs", "tactic")
    nothing = inspect.Signature.empty
    return {
        "none": outcome_of("none", lambda: [trtp.SymInt32(3)], given),
        "bare int": outcome_of("bare", lambda: [3], given),
        "subset": outcome_of("subset", list, ("x", "second", "outputs", "tactic")),
        "no return type": outcome_of("untyped", list, given, nothing),
        "other name": outcome_of("renamed", list, ("y", *given[1:])),
    }


def main() -> None:
    folder, version = Path(sys.argv[1]), sys.argv[2]
    trt, trtp = stand_in.install(folder / "tensorrt_bindings" / "plugin", version)
    collected: list[str] = []
    names = register(trt, trtp, collected)
    creators = stand_in.REGISTRY.creators
    facts = {
        "numpy": np.__version__,
        "package": str(Path(str(trtp.__file__)).resolve().relative_to(folder.resolve())),
        "registered": names,
        "again": register(trt, trtp),
        "creators": [list(key) for key in creators],
        "fields": {key[0]: [f.name for f in one.field_names] for key, one in creators.items()},
        "builds": list(all_builds()),
        "network": one_network(),
        "requests": requests(),
        "refusals": refusals(),
        "collected": collected,
        "traps": traps(trtp),
    }
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    main()
