"""The operators of domain ``fixedstate``: names, ports and attributes, one table for everyone.

A node of this domain carries the attributes by which a TensorRT parser finds a registered plugin;
a model-local function of the same name serves everyone else. Every attribute is always written.
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "fixedstate"
VERSION = 1

OPSET = 21
"""Opset of the standard operators beside and inside these, in every portable file."""

CHUNK = 64
"""Most tokens in one chunk of the scan's matrix form."""

ATTRIBUTES = ("plugin_namespace", "plugin_version", "block_len")
"""Attributes of every node: where a plugin is looked up, and L in tokens.

``block_len`` 0 says that the whole sequence is one block of any length, which starts from the given
state, or from zero at its right edge.
"""


@dataclass(frozen=True, slots=True)
class OpSchema:
    """One operator.

    Attributes:
        name: ONNX op_type, function name and plugin name; equal to no built-in operator.
        torch_name: Name of the torch custom operator that becomes this node.
        inputs: Input names in order; none is optional.
        outputs: Output names in order.
    """

    name: str
    torch_name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_CONV = ("x", "weight", "bias")
_SCAN = ("x", "dt", "a", "b", "c", "d")

OPS: dict[str, OpSchema] = {
    op.name: op
    for op in (
        OpSchema("CausalConvDenoise", "conv_denoise", (*_CONV, "state"), ("y",)),
        OpSchema(
            "CausalConvCommit", "conv_commit", (*_CONV, "state", "length"), ("y", "new_state")
        ),
        OpSchema("CausalConvReverse", "conv_reverse", _CONV, ("y",)),
        OpSchema("SsdBlockDenoise", "ssd_denoise", (*_SCAN, "state"), ("y",)),
        OpSchema("SsdBlockCommit", "ssd_commit", (*_SCAN, "state"), ("y", "new_state")),
        OpSchema("SsdBlockReverse", "ssd_reverse", _SCAN, ("y",)),
        OpSchema("SelectiveScanDenoise", "scan_denoise", (*_SCAN, "state"), ("y",)),
        OpSchema("SelectiveScanCommit", "scan_commit", (*_SCAN, "state"), ("y", "new_state")),
        OpSchema("SelectiveScanReverse", "scan_reverse", _SCAN, ("y",)),
    )
}
"""Every operator by name. Shapes: :mod:`fixedstate.plugins.reference`."""

FLOAT32_INPUTS = ("dt", "a", "d")
"""Inputs that are float32 whatever the io dtype."""
