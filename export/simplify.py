"""Graph simplification that changes no number: what the usual optimiser does, exact rules only.

The optimiser of onnxscript takes a constant within 1e-8 of 0 for 0 and one within 1e-5 of 1 for 1,
and so drops the epsilon of a norm if it is small. Here only the very 1 is 1.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules import common as rules


def _times(op: Any, x: Any, factor: Any) -> Any:
    return op.Mul(x, factor)


def _divided(op: Any, x: Any, factor: Any) -> Any:
    return op.Div(x, factor)


def _same(op: Any, x: Any, **_: Any) -> Any:
    return op.Identity(x)


def _is_one(context: Any, factor: ir.Value, **_: Any) -> bool:
    tensor = factor.const_value
    return tensor is not None and tensor.shape.rank() == 0 and tensor.numpy().item() == 1


_ROUNDS = 2  # one rule's result is another's start
_LARGEST_FOLDED = 512  # elements of 8 bytes at most: wide masks are computed, not stored

_EXACT = (
    *(pattern.RewriteRule(target, _same, _is_one) for target in (_times, _divided)),
    rules.two_reshapes_matmul_reshape_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.min_min_rule,
    rules.max_max_rule,
    rules.min_max_rule,
    rules.max_min_rule,
    rules.successive_relu_rule,
    rules.successive_clip_rule,
    rules.successive_relu_clip_rule,
    rules.successive_clip_relu_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.flatten_to_reshape_rule,
    rules.reshape_reshape_rule,
    rules.slice_split_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.no_op_dynamic_scatter_nd_rule,
)


def simplify(model: ir.Model) -> None:
    """Fold constants, drop what is double or not used, undo what undoes itself; in place.

    Args:
        model: A traced graph. Constants without a value are not looked at.
    """
    common.InlinePass()(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(
            model, onnx_shape_inference=True, output_size_limit=_LARGEST_FOLDED
        )
        rewriter.rewrite(model, _EXACT)
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
