"""A bundle with toy graphs: every kind of port, integer arithmetic, so all laws hold exactly.

The graphs are ONNX text. Keys hold the token itself; the scan state is the sum of all tokens modulo
97, the conv state their number modulo 7. A slot's best token is a sum of all of that modulo 35.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np

from fixedstate.bundle import MANIFEST, WEIGHTS, Bundle, DecodeDefaults, Graph, Source
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba2Sizes, ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports

ELEMENTS = {"float32": "float", "float16": "float16", "int64": "int64"}
MAMBA = Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=4)
ATTENTION = AttentionSizes(heads=2, kv_heads=1, head_dim=2, rotary_dim=2)

BASE = """
  two = Constant <value_float = 2.0> ()
  zero = Constant <value_float = 0.0> ()
  capacity = Shape <start = 2, end = 3> (past_key_000)
  start = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  flat = Constant <value_ints = [-1]> ()
  empty = Constant <value_ints = [0]> ()
  stop = Squeeze (capacity)
  columns = Range (start, stop, one)
  lengths = Unsqueeze (past_length, flat)
  valid0 = Less (columns, lengths)
  inner = Constant <value_ints = [1, 3]> ()
  valid = Unsqueeze (valid0, inner)
  kept = Where (valid, past_key_000, zero)
  kept2 = Where (valid, past_value_000, zero)
  axes = Constant <value_ints = [1, 2, 3]> ()
  keysum = ReduceSum <keepdims = 0> (kept, axes)
  valuesum = ReduceSum <keepdims = 0> (kept2, axes)
"""
LOGITS = """
  ssm_mean = ReduceMean <keepdims = 0> ({ssm}, axes)
  conv_axes = Constant <value_ints = [1, 2]> ()
  conv_mean = ReduceMean <keepdims = 0> ({conv}, conv_axes)
  keys = Div (keysum, two)
  sum1 = Add (keys, valuesum)
  sum2 = Add (sum1, ssm_mean)
  sum3 = Add (sum2, conv_mean)
  base = Unsqueeze (sum3, flat)
  x = Cast <to = 1> ({ids})
  slots = Constant <value_floats = [{slots}]> ()
  t1 = Add (x, base)
  t2 = Add (t1, slots)
  modulus = Constant <value_float = 35.0> ()
  t3 = Mod <fmod = 1> (t2, modulus)
  target = Unsqueeze (t3, flat)
  vocab = Constant <value_floats = [{vocab}]> ()
  gap = Sub (vocab, target)
  square = Mul (gap, gap)
  scaled = Mul (square, scale)
  logits = Neg (scaled)
"""
COMMIT = """
  nshape = Shape <start = 1, end = 2> (input_ids)
  ntokens = Squeeze (nshape)
  places = Range (start, ntokens, one)
  limits = Unsqueeze (commit_length, flat)
  real = Less (places, limits)
  ids_f = Cast <to = 1> (input_ids)
  real_ids = Where (real, ids_f, zero)
  token_axis = Constant <value_ints = [1]> ()
  total = ReduceSum <keepdims = 0> (real_ids, token_axis)
  total4 = Unsqueeze (total, axes)
  modulus97 = Constant <value_float = 97.0> ()
  ssm1 = Add (past_ssm_state_001, total4)
  ssm2 = Mod <fmod = 1> (ssm1, modulus97)
  count = Cast <to = 1> (commit_length)
  conv_axes2 = Constant <value_ints = [1, 2]> ()
  count3 = Unsqueeze (count, conv_axes2)
  modulus7 = Constant <value_float = 7.0> ()
  conv1 = Add (past_conv_state_001, count3)
  conv2 = Mod <fmod = 1> (conv1, modulus7)
  any0 = Greater (commit_length, start)
  any4 = Unsqueeze (any0, axes)
  any3 = Unsqueeze (any0, conv_axes2)
  present_ssm_state_001 = Where (any4, ssm2, past_ssm_state_001)
  present_conv_state_001 = Where (any3, conv2, past_conv_state_001)
  column_axes = Constant <value_ints = [1, 3]> ()
  column = Unsqueeze (ids_f, column_axes)
  pair_shape = Constant <value_ints = [1, 1, 1, 2]> ()
  pair0 = Expand (column, pair_shape)
  present_key_000 = Identity (pair0)
  present_value_000 = Mul (pair0, unit)
  unit = Constant <value_float = 1.0> ()
"""


def toy_spec(**changes) -> ModelSpec:
    """One attention and one Mamba-2 layer, 37 tokens in 40 rows, blocks of 8."""
    layers = (LayerSpec("attention", ATTENTION), LayerSpec("mamba2", MAMBA))
    values = {"layers": layers, "block_len": 8, "mask_id": 36, "stop_ids": (35,)}
    return ModelSpec(**{"vocab_size": 37, "vocab_rows": 40, "width": 32, **values, **changes})


def _body(spec: ModelSpec, role: str) -> str:
    numbers = {
        "slots": ", ".join(f"{i}.0" for i in range(spec.block_len)),
        "vocab": ", ".join(f"{i}.0" for i in range(spec.vocab_rows)),
    }
    commit = "\n".join(sorted(COMMIT.strip().splitlines(), key=lambda line: "unit =" not in line))
    past = {"ssm": "past_ssm_state_001", "conv": "past_conv_state_001", "ids": "input_ids"}
    if role == "denoise":
        return BASE + LOGITS.format(**past, **numbers)
    if role == "commit":
        return BASE + commit
    return (
        BASE.replace("keysum = ", "past_sum = ").replace("valuesum = ", "past_sum2 = ")
        + commit
        + "\n  twice = Mul (total, two)\n  keysum = Add (past_sum, twice)"
        + "\n  valuesum = Add (past_sum2, twice)\n  last = Constant <value_ints = [-8]> ()"
        + "\n  end = Constant <value_ints = [1000000]> ()"
        + "\n  last_ids = Slice (input_ids, last, end, token_axis)"
        + LOGITS.format(
            ssm="present_ssm_state_001",
            conv="present_conv_state_001",
            ids="last_ids",
            **numbers,
        )
    )


def _dim(dim: int | str) -> str:
    """A dimension as the text form wants it: `8n` is no name there."""
    return f"tokens{dim[-1]}" if isinstance(dim, str) and dim[0].isdigit() else str(dim)


def _graph_bytes(spec: ModelSpec, state: StateSpec, role: str, ir_version: int) -> bytes:
    def ports(group):
        return ", ".join(
            f"{ELEMENTS[p.dtype]}[{','.join(_dim(d) for d in p.shape)}] {p.name}" for p in group
        )

    inputs, outputs = graph_ports(spec, state, role)
    text = (
        f'<ir_version: 10, opset_import: ["": 21]>\n'
        f"toy ({ports(inputs)}) => ({ports(outputs)}) {{{_body(spec, role)}}}"
    )
    import onnx.parser  # here: the values above serve environments without onnx

    model = onnx.parser.parse_model(text)
    model.ir_version = ir_version
    if role != "commit":
        scale = model.graph.initializer.add()
        scale.name, scale.data_type = "scale", 1
        scale.dims.append(1)
        scale.data_location = 1
        for key, value in (("location", WEIGHTS), ("offset", str(OFFSET)), ("length", "4")):
            entry = scale.external_data.add()
            entry.key, entry.value = key, value
    return model.SerializeToString()


def _weights() -> bytes:
    header = json.dumps({"scale": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    header += " " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header.encode() + np.float32(1.0).tobytes()


OFFSET = len(_weights()) - 4


def write_toy_bundle(
    folder: Path,
    *,
    roles: tuple[str, ...] = ("denoise", "commit"),
    precision: Precision | None = None,
    min_onnxruntime: str = "1.20.0",
    ir_version: int = 10,
    files: dict[str, bytes] | None = None,
    **changes,
) -> Path:
    """Write the bundle and return its folder; `changes` go into the model."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = toy_spec(**changes)
    made = StateSpec.of(spec)
    graphs = {}
    for role in roles:
        content = _graph_bytes(spec, made, role, ir_version)
        (folder / f"{role}.onnx").write_bytes(content)
        state = StateSpec.of(spec, precision)
        digest = hashlib.sha256(content).hexdigest()
        ports = graph_ports(spec, state, role)
        graphs[role] = Graph(role, f"{role}.onnx", digest, min_onnxruntime, *ports)
    (folder / WEIGHTS).write_bytes(_weights())
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
    bundle = Bundle(
        path=folder,
        spec=spec,
        precision=precision or Precision(),
        state=StateSpec.of(spec, precision),
        graphs=graphs,
        weights=hashlib.sha256(_weights()).hexdigest(),
        decode=DecodeDefaults(prefill_blocks=3),
        files={k: hashlib.sha256(v).hexdigest() for k, v in (files or {}).items()},
        source=Source(),
    )
    (folder / MANIFEST).write_bytes(bundle.manifest())
    return folder
