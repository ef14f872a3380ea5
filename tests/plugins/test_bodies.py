"""The ONNX function bodies equal the float64 loops, run by ONNX Runtime, over the whole grid."""

from __future__ import annotations

import numpy as np
import pytest
from one_op import run_op, single
from scan_inputs import scan_inputs, selective_inputs, without_state

from fixedstate.plugins import reference
from fixedstate.plugins.bodies import function_body

TOLERANCE = 1e-4

SSD_OPS = ("SsdBlockDenoise", "SsdBlockCommit", "SsdBlockReverse")


@pytest.mark.parametrize("block_len", [4, 16, 33, 64, 65, 80, 128, 256])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (6, 3), (3, 3)])
def test_ssd_bodies_equal_the_loop(block_len: int, heads: int, groups: int) -> None:
    """Denoise, commit over 1 to 3 blocks, and reverse, for every cut into chunks."""
    rng = np.random.default_rng(block_len)
    model = {"one_group": groups == 1}
    for blocks in (1, 2, 3):
        inputs = single(scan_inputs(rng, 2, block_len * blocks, heads, groups))
        expected, final = reference.ssd(**inputs)
        y, state = run_op("SsdBlockCommit", inputs, block_len, **model)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
        np.testing.assert_allclose(state, final, atol=TOLERANCE)
        free = {key: value for key, value in inputs.items() if key != "state"}
        (y,) = run_op("SsdBlockReverse", inputs, block_len, **model)
        expected = reference.ssd_reverse(**free, block_len=block_len)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
        if blocks == 1:
            (y,) = run_op("SsdBlockDenoise", inputs, block_len, **model)
            np.testing.assert_allclose(y, reference.ssd(**inputs)[0], atol=TOLERANCE)


@pytest.mark.parametrize("block_len", [4, 65])
@pytest.mark.parametrize("groups", [1, 2])
def test_one_commit_of_many_blocks_equals_many_of_one(block_len: int, groups: int) -> None:
    """Law 3 and the loop, over more chunks than a block has."""
    blocks, model = 16, {"one_group": groups == 1}
    rng = np.random.default_rng(block_len)
    inputs = single(scan_inputs(rng, 2, block_len * blocks, 4, groups, scale=0.01))
    y, state = run_op("SsdBlockCommit", inputs, block_len, **model)
    expected, final = reference.ssd(**inputs)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=TOLERANCE)
    np.testing.assert_allclose(state, final, rtol=1e-4, atol=TOLERANCE)
    step = dict(inputs)
    for start in range(0, block_len * blocks, block_len):
        step.update({k: inputs[k][:, start : start + block_len] for k in ("x", "dt", "b", "c")})
        one, step["state"] = run_op("SsdBlockCommit", step, block_len, **model)
        cut = y[:, start : start + block_len]
        np.testing.assert_allclose(cut, one, rtol=1e-4, atol=TOLERANCE)
    np.testing.assert_allclose(state, step["state"], rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize("block_len", [16, 33, 80])
@pytest.mark.parametrize("groups", [1, 2])
def test_ssd_steps_of_zero_behind_a_block_change_no_byte(block_len: int, groups: int) -> None:
    """A block committed beside one that is not, whatever that holds: the bytes of it alone."""
    model = {"one_group": groups == 1}
    inputs = single(scan_inputs(np.random.default_rng(2), 2, 2 * block_len, 4, groups))
    inputs["dt"][:, block_len:] = 0
    y, state = run_op("SsdBlockCommit", inputs, block_len, **model)
    cut = {key: inputs[key][:, :block_len] for key in ("x", "dt", "b", "c")}
    alone, expected = run_op("SsdBlockCommit", {**inputs, **cut}, block_len, **model)
    np.testing.assert_array_equal(state, expected)
    np.testing.assert_array_equal(y[:, :block_len], alone)


@pytest.mark.parametrize("name", SSD_OPS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("block_len", "blocks"), [(16, 1), (16, 3), (80, 1), (80, 2)])
def test_ssd_rows_have_the_same_bytes_alone(
    name: str, groups: int, block_len: int, blocks: int
) -> None:
    """Law 4: a row alone and in a batch, byte for byte."""
    blocks = 1 if name == "SsdBlockDenoise" else blocks
    model = {"one_group": groups == 1}
    inputs = single(scan_inputs(np.random.default_rng(6), 3, block_len * blocks, 4, groups))
    together = run_op(name, inputs, block_len, **model)
    for row in range(3):
        alone = {k: v if k in ("a", "d") else v[row : row + 1] for k, v in inputs.items()}
        for one, all_ in zip(run_op(name, alone, block_len, **model), together, strict=True):
            np.testing.assert_array_equal(one[0], all_[row])


@pytest.mark.parametrize("block_len", [0, 16, 80])
def test_ssd_state_is_read_by_products_alone(block_len: int) -> None:
    """Nothing copies, turns or stacks the state, and only a commit makes another."""
    for name in ("SsdBlockDenoise", "SsdBlockCommit"):
        body = function_body(name, block_len, "float32", one_group=True)
        (state,) = (value for value in body.inputs if value.name == "state")
        readers = sorted(node.op_type for node, _ in state.uses())
        assert readers == (["MatMul", "Mul"] if name == "SsdBlockCommit" else ["MatMul"])


@pytest.mark.parametrize("name", SSD_OPS)
@pytest.mark.parametrize("block_len", [0, 16, 80])
def test_ssd_bodies_hold_no_node_without_use(name: str, block_len: int) -> None:
    """ONNX Runtime would run it: every value is read or is an output."""
    for one_group in (False, True):
        body = function_body(name, block_len, "float32", one_group=one_group)
        outputs = list(body.outputs)
        for node in body.all_nodes():
            assert any(value.uses() or value in outputs for value in node.outputs), node


@pytest.mark.parametrize("wide_skip", [False, True])
@pytest.mark.parametrize("name", SSD_OPS)
def test_skip_per_head_and_per_channel(name: str, wide_skip: bool) -> None:
    """D as [H] and as [H, P]; one body may serve both shapes."""
    inputs = scan_inputs(np.random.default_rng(1), 2, 16, 4, 1)
    shapes = [(4, 8), (4,)] if wide_skip else [(4,)]
    for shape in shapes:
        inputs["d"] = np.random.default_rng(2).standard_normal(shape)
        given = single(inputs)
        y = run_op(name, given, 16, wide_skip=wide_skip)[0]
        if name == "SsdBlockReverse":
            free = {key: value for key, value in given.items() if key != "state"}
            expected = reference.ssd_reverse(**free, block_len=16)
        else:
            expected = reference.ssd(**given)[0]
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2, 1e4, 1e6])
def test_any_decay_is_finite_and_right(scale: float) -> None:
    """No exponent is ever positive, whatever the size of the decays."""
    inputs = single(scan_inputs(np.random.default_rng(5), 1, 300, 4, 2, scale))
    y, state = run_op("SsdBlockCommit", inputs, 75)
    expected, final = reference.ssd(**inputs)
    np.testing.assert_allclose(y, expected, atol=1e-3)
    np.testing.assert_allclose(state, final, atol=1e-3)


@pytest.mark.parametrize("taps", [2, 3, 4, 5, 8])
def test_conv_bodies_equal_the_loop(taps: int) -> None:
    """Every number of taps, alone and beside layers that have more."""
    rng = np.random.default_rng(taps)
    inputs = single(
        {
            "x": rng.standard_normal((3, 32, 12)),
            "weight": rng.standard_normal((12, taps)),
            "bias": rng.standard_normal(12),
            "state": rng.standard_normal((3, 12, taps - 1)),
        }
    )
    inputs["length"] = np.array([0, 5, 32])
    expected, window = reference.causal_conv(*inputs.values())
    reverse = reference.causal_conv_reverse(
        inputs["x"], inputs["weight"], inputs["bias"], block_len=16
    )
    for others in ([taps], [taps, 8], [2, taps, 8]):
        for channels in (None, 12):
            model = {"taps": others, "channels": channels}
            y, new = run_op("CausalConvCommit", inputs, 16, **model)
            np.testing.assert_allclose(y, expected, atol=TOLERANCE)
            np.testing.assert_array_equal(new, window.astype(np.float32))
            (y,) = run_op("CausalConvDenoise", inputs, 32, **model)
            np.testing.assert_allclose(y, expected, atol=TOLERANCE)
            (y,) = run_op("CausalConvReverse", inputs, 16, **model)
            np.testing.assert_allclose(y, reverse, atol=TOLERANCE)


@pytest.mark.parametrize("name", SSD_OPS)
def test_half_precision_computes_in_float32_inside(name: str) -> None:
    """fp16 io: only what enters and leaves is rounded."""
    inputs = single(scan_inputs(np.random.default_rng(8), 2, 16, 4, 2))
    for key in ("x", "b", "c"):
        inputs[key] = inputs[key].astype(np.float16)
    found = run_op(name, inputs, 16, io="float16")
    free = {key: value for key, value in inputs.items() if key != "state"}
    if name == "SsdBlockReverse":
        expected = [reference.ssd_reverse(**free, block_len=16)]
    else:
        expected = list(reference.ssd(**inputs))
    assert found[0].dtype == np.float16
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-3)
    if name == "SsdBlockCommit":
        assert found[1].dtype == np.float32
        np.testing.assert_allclose(found[1], expected[1], atol=TOLERANCE)


def test_one_body_serves_layers_of_two_sizes() -> None:
    """Sizes come from Shape: the same function, two widths."""
    for heads, groups in ((4, 2), (6, 1), (2, 2)):
        inputs = single(scan_inputs(np.random.default_rng(heads), 1, 16, heads, groups))
        (y,) = run_op("SsdBlockDenoise", inputs, 16)
        np.testing.assert_allclose(y, reference.ssd(**inputs)[0], atol=TOLERANCE)


SCAN_OPS = ("SelectiveScanDenoise", "SelectiveScanCommit", "SelectiveScanReverse")


@pytest.mark.parametrize("block_len", [4, 32, 65])
@pytest.mark.parametrize(("width", "inner"), [(1, 7), (4, 32), (16, 33), (128, 5)])
@pytest.mark.parametrize("rows", [1, 3])
def test_selective_scan_bodies_equal_the_loop(
    block_len: int, width: int, inner: int, rows: int
) -> None:
    """Denoise, commit over lengths around each count of blocks, and reverse."""
    rng = np.random.default_rng(block_len + width)
    for tokens in (1, block_len - 1, block_len, 2 * block_len, 3 * block_len):
        inputs = single(selective_inputs(rng, rows, tokens, inner, width))
        expected, final = reference.selective_scan(**inputs)
        y, state = run_op("SelectiveScanCommit", inputs, block_len)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
        np.testing.assert_allclose(state, final, atol=TOLERANCE)
        (again,) = run_op("SelectiveScanDenoise", inputs, block_len)
        np.testing.assert_array_equal(again, y)
        if tokens % block_len == 0:
            (y,) = run_op("SelectiveScanReverse", inputs, block_len)
            free = without_state(inputs)
            expected = reference.selective_scan_reverse(**free, block_len=block_len)
            np.testing.assert_allclose(y, expected, atol=TOLERANCE)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e6])
def test_selective_scan_with_any_decay_is_finite_and_right(scale: float) -> None:
    """Nothing is divided by a decay product, and no exponent is positive."""
    inputs = single(selective_inputs(np.random.default_rng(5), 1, 96, 8, 4, scale))
    y, state = run_op("SelectiveScanCommit", inputs, 32)
    expected, final = reference.selective_scan(**inputs)
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    np.testing.assert_allclose(state, final, atol=TOLERANCE)


@pytest.mark.parametrize("name", SCAN_OPS)
def test_selective_scan_in_half_precision_computes_in_float32_inside(name: str) -> None:
    """fp16 io: only what enters and leaves is rounded."""
    inputs = single(selective_inputs(np.random.default_rng(8), 2, 16, 9, 4))
    for key in ("x", "b", "c"):
        inputs[key] = inputs[key].astype(np.float16)
    found = run_op(name, inputs, 8, io="float16")
    if name == "SelectiveScanReverse":
        expected = [reference.selective_scan_reverse(**without_state(inputs), block_len=8)]
    else:
        expected = list(reference.selective_scan(**inputs))
    assert found[0].dtype == np.float16
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-3)
    if name == "SelectiveScanCommit":
        assert found[1].dtype == np.float32
        np.testing.assert_allclose(found[1], expected[1], atol=TOLERANCE)


def test_selective_scan_step_of_zero_leaves_the_state_alone() -> None:
    """dt 0 behind a row's own length: the state is the one after its last real token."""
    inputs = single(selective_inputs(np.random.default_rng(3), 3, 24, 9, 4))
    lengths = (0, 7, 24)
    for row, length in enumerate(lengths):
        inputs["dt"][row, length:] = 0
    _, state = run_op("SelectiveScanCommit", inputs, 8)
    for row, length in enumerate(lengths):
        cut = {key: inputs[key][row : row + 1, :length] for key in ("x", "dt", "b", "c")}
        alone = {**inputs, **cut, "state": inputs["state"][row : row + 1]}
        _, expected = reference.selective_scan(**alone)
        np.testing.assert_allclose(state[row], expected[0], atol=TOLERANCE)


def test_selective_scan_reverse_sees_nothing_of_later_blocks() -> None:
    """The bytes of a block do not depend on what stands in another."""
    inputs = single(selective_inputs(np.random.default_rng(4), 2, 24, 9, 4))
    (before,) = run_op("SelectiveScanReverse", inputs, 8)
    for key in ("x", "dt", "b", "c"):
        inputs[key][:, 16:] += 1
    (after,) = run_op("SelectiveScanReverse", inputs, 8)
    np.testing.assert_array_equal(after[:, :16], before[:, :16])
    assert (after[:, 16:] != before[:, 16:]).all()


@pytest.mark.parametrize("name", SCAN_OPS)
@pytest.mark.parametrize("inner", [32, 33])
def test_selective_scan_rows_have_the_same_bytes_alone(name: str, inner: int) -> None:
    """Law 4: a row alone and in a batch, byte for byte."""
    inputs = single(selective_inputs(np.random.default_rng(6), 3, 16, inner, 5))
    together = run_op(name, inputs, 8)
    for row in range(3):
        alone = {k: v if k in ("a", "d") else v[row : row + 1] for k, v in inputs.items()}
        for one, all_ in zip(run_op(name, alone, 8), together, strict=True):
            np.testing.assert_array_equal(one[0], all_[row])


@pytest.mark.parametrize("name", SCAN_OPS)
def test_selective_scan_is_one_scan_whatever_the_block_length(name: str) -> None:
    """No node per token or per block."""
    shapes = []
    for block_len in (4, 64, 256):
        body = function_body(name, block_len, "float32")
        shapes.append([node.op_type for node in body.all_nodes()])
        assert shapes[-1].count("Scan") == 1
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 200])
def test_block_length_0_is_the_whole_sequence(tokens: int) -> None:
    """Every operator takes 0 for one block of any length, known at run time."""
    rng = np.random.default_rng(tokens)
    for groups in (1, 2):
        model = {"one_group": groups == 1}
        inputs = single(scan_inputs(rng, 2, tokens, 4, groups))
        expected, final = reference.ssd(**inputs)
        y, state = run_op("SsdBlockCommit", inputs, 0, **model)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
        np.testing.assert_allclose(state, final, atol=TOLERANCE)
        (y,) = run_op("SsdBlockDenoise", inputs, 0, **model)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
        (y,) = run_op("SsdBlockReverse", inputs, 0, **model)
        expected = reference.ssd_reverse(**without_state(inputs), block_len=tokens)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    inputs = single(selective_inputs(rng, 2, tokens, 9, 4))
    (y,) = run_op("SelectiveScanDenoise", inputs, 0)
    np.testing.assert_allclose(y, reference.selective_scan(**inputs)[0], atol=TOLERANCE)
    (y,) = run_op("SelectiveScanReverse", inputs, 0)
    expected = reference.selective_scan_reverse(**without_state(inputs), block_len=tokens)
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    conv = single(
        {
            "x": rng.standard_normal((2, tokens, 6)),
            "weight": rng.standard_normal((6, 4)),
            "bias": rng.standard_normal(6),
            "state": np.zeros((2, 6, 3)),
        }
    )
    forward = reference.causal_conv(*conv.values())[0]
    reverse = reference.causal_conv_reverse(*list(conv.values())[:3], block_len=tokens)
    for taps, channels in (([4], 6), ([4], None), ([2, 4], None)):
        (y,) = run_op("CausalConvDenoise", conv, 0, taps=taps, channels=channels)
        np.testing.assert_allclose(y, forward, atol=TOLERANCE)
        (y,) = run_op("CausalConvReverse", conv, 0, taps=taps, channels=channels)
        np.testing.assert_allclose(y, reverse, atol=TOLERANCE)
