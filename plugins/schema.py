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
"""Attributes of every node: where a plugin is looked up, and L in tokens."""


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
_SSD = ("x", "dt", "a", "b", "c", "d")

OPS: dict[str, OpSchema] = {
    op.name: op
    for op in (
        OpSchema("CausalConvDenoise", "conv_denoise", (*_CONV, "state"), ("y",)),
        OpSchema(
            "CausalConvCommit", "conv_commit", (*_CONV, "state", "length"), ("y", "new_state")
        ),
        OpSchema("CausalConvReverse", "conv_reverse", _CONV, ("y",)),
        OpSchema("SsdBlockDenoise", "ssd_denoise", (*_SSD, "state"), ("y",)),
        OpSchema("SsdBlockCommit", "ssd_commit", (*_SSD, "state"), ("y", "new_state")),
        OpSchema("SsdBlockReverse", "ssd_reverse", _SSD, ("y",)),
    )
}
"""Every operator by name. Shapes: :mod:`fixedstate.plugins.reference`."""

FLOAT32_INPUTS = ("dt", "a", "d")
"""Inputs that are float32 whatever the io dtype."""
