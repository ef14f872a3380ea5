"""Engine folders for tests: true manifests, stand-in plans that no TensorRT could read.

Nothing that is tested with them runs a plan or parses a graph, so both are a line of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fixedstate.bundle import MANIFEST as BUNDLE_MANIFEST
from fixedstate.bundle import WEIGHTS, Bundle, DecodeDefaults, Graph, Source
from fixedstate.ports import Port
from fixedstate.runtime.enginefile import MANIFEST, EngineFolder, Plan, plan_ports, write_engine
from fixedstate.runtime.identity import Identity, PluginUse, Profile
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba2Sizes, ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports

HYBRID = ModelSpec(
    vocab_size=37,
    vocab_rows=40,
    width=32,
    layers=(
        LayerSpec("attention", AttentionSizes(heads=2, kv_heads=1, head_dim=2, rotary_dim=2)),
        LayerSpec(
            "mamba2",
            Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=4),
        ),
        LayerSpec("attention", AttentionSizes(heads=2, kv_heads=1, head_dim=2, rotary_dim=2)),
    ),
    block_len=8,
    mask_id=36,
    stop_ids=(35,),
)
"""Every kind of port: keys, values, conv and scan state."""

ROLES = ("denoise", "commit", "commit_denoise", "denoise_top_k")
LEVELS = (
    {"B": 1, "n": 1, "m": 1, "C": 8, "R": 1, "T": 8},
    {"B": 1, "n": 1, "m": 2, "C": 256, "R": 8, "T": 64},
    {"B": 8, "n": 16, "m": 2, "C": 4096, "R": 8, "T": 512},
)
"""Sizes of a profile: least, usual, most."""

HALF = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
CHECK = {"kind": "stand-in", "worst": "present_ssm_state_001", "error": 0.001, "tolerance": 0.02}
PTX = {"ssd_denoise.float16.n128.ptx": "1" * 64}
AOT = PluginUse("SsdBlockDenoise", "fixedstate", "1", "aot", texts=PTX)
PYTHON = replace(AOT, kind="python")
LIBRARY = PluginUse("SsdBlockDenoise", "fixedstate", "1", "library", "libplugins.so")


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_placeholder_bundle(
    folder: Path,
    spec: ModelSpec = HYBRID,
    roles: Sequence[str] = ROLES,
    graphs: str = "graph",
    weights: bytes = b"weights",
) -> Bundle:
    """A bundle that opens, with lines of text for graphs and weights."""
    folder.mkdir(parents=True)
    state, made = StateSpec.of(spec), {}
    for role in roles:
        content = f"{graphs} of {role}".encode()
        (folder / f"{role}.onnx").write_bytes(content)
        ports = graph_ports(spec, state, role)
        made[role] = Graph(role, f"{role}.onnx", sha(content), "1.20.0", *ports)
    files = {"tokenizer.json": b'{"tokens": []}\n', "LICENSE": b"as you like\n"}
    for name, content in {**files, WEIGHTS: weights}.items():
        (folder / name).write_bytes(content)
    bundle = Bundle(
        path=folder,
        spec=spec,
        precision=Precision(),
        state=state,
        graphs=made,
        weights=sha(weights),
        decode=DecodeDefaults(steps=4, prefill_blocks=3),
        files={name: sha(content) for name, content in sorted(files.items())},
        source=Source("sample", "1", "as you like"),
    )
    (folder / BUNDLE_MANIFEST).write_bytes(bundle.manifest())
    return Bundle.open(folder)


def precision_of(name: str) -> Precision:
    return Precision(HALF[name], "float32", HALF[name])


def profile_of(inputs: Sequence[Port], levels: Sequence[Mapping[str, int]] = LEVELS) -> Profile:
    """Bounds of the dynamic inputs at three sets of sizes."""
    return {
        port.name: tuple(port.resolve(**sizes) for sizes in levels)
        for port in inputs
        if any(isinstance(dim, str) for dim in port.shape)
    }


def identity_of(bundle: Bundle, roles: Sequence[str] = (), /, **changes) -> Identity:
    """What an engine of all roles of a bundle is made of."""
    roles = roles or tuple(bundle.graphs)
    values = {
        "product": "tensorrt-rtx",
        "version": "1.7.1.116",
        "package": "0.1.0",
        "os": "linux-x86_64",
        "capabilities": ("8.9", "12.0"),
        "bundle": bundle.digest,
        "weights": bundle.weights,
        "graphs": {role: bundle.graphs[role].sha256 for role in roles},
        "precision": "fp16",
        "flags": {"strongly_typed": True, "optimization_level": 3},
        "profiles": {role: (profile_of(bundle.graphs[role].inputs),) for role in roles},
        "plugins": (),
    }
    return Identity(**{**values, **changes})


def plans_of(bundle: Bundle, identity: Identity, **aliases: Mapping[str, str]) -> list[Plan]:
    """The plans of an identity, without hash and profiles."""
    state = StateSpec.of(bundle.spec, precision_of(identity.precision))
    plans = []
    for role in identity.graphs:
        pairs = dict(aliases.get(role, {}))
        ports = plan_ports(bundle.spec, state, role, pairs, bundle.graphs[role].top_k)
        plans.append(Plan(role, f"{role}.plan", "", *ports, aliases=pairs))
    return plans


def fill_engine(
    folder: Path,
    bundle: Bundle,
    identity: Identity,
    *,
    check: Mapping = CHECK,
    filler: int = 0,
    **aliases,
) -> EngineFolder:
    """Put stand-in plans, of so many bytes more, and a manifest into an empty folder."""
    libraries = []
    for plugin in identity.plugins:
        if plugin.library:
            libraries.append(bundle.path / plugin.library)
            libraries[-1].write_bytes(b"stand-in library")
    plans = plans_of(bundle, identity, **aliases)
    for plan in plans:
        content = f"stand-in plan of {plan.role} for {identity.key}".encode()
        (folder / plan.file).write_bytes(content + bytes(filler))
    precision = precision_of(identity.precision)
    return write_engine(
        folder, bundle, identity, precision, plans, check=check, libraries=libraries
    )


def sealed(data: Mapping) -> bytes:
    """A manifest with a right seal, as a writer of another version would leave it."""
    rest = {key: value for key, value in data.items() if key != "sha256"}
    digest = sha(json.dumps(rest, indent=1, ensure_ascii=False).encode())
    text = json.dumps({**rest, "sha256": digest}, indent=1, ensure_ascii=False)
    return (text + "\n").encode()


def edit(folder: Path, change) -> None:
    """Change engine.json and seal it again."""
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_bytes(sealed(data))
