"""Quantised graphs compute what their stored weights and scales say, in every role alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fixedstate.bundle import Bundle
from fixedstate.calib.apply import VALUES, quantize_graph, stored
from fixedstate.calib.formats import FORMATS, Format
from fixedstate.calib.sites import DEFAULT_KINDS, Site, find_sites, load_graphs, products

RUN_HERE = ("int8", "int8-weights", "int4:32", "fp8")
"""What ONNX Runtime's CPU computes; it has no kernels for the four-bit floats."""


class Quantised:
    """A bundle's graphs with every default product in one format."""

    def __init__(self, bundle: Bundle, chosen: Format, folder: Path) -> None:
        self.bundle, self.folder = bundle, folder
        self.graphs = load_graphs(bundle)
        self.sites = find_sites(self.graphs)
        self.formats = {
            name: chosen
            for name, site in self.sites.items()
            if site.kind in DEFAULT_KINDS and not chosen.refusal(site.rows, site.columns)
        }
        self.scales = {self.sites[name].input: 0.05 for name in self.formats}
        self.weights = {
            name: value.const_value.numpy()  # type: ignore[union-attr]
            for model in self.graphs.values()
            for name, value in model.graph.initializers.items()
        }
        self.stored = {
            name: stored(self.weights[name], self.sites[name], chosen) for name in self.formats
        }

    def model(self, role: str) -> ir.Model:
        """The quantised graph of a role, its weights inside."""
        made = self.graphs[role].clone()

        def values(dtype: ir.DataType, shape: ir.Shape, name: str) -> ir.TensorProtocol:
            held = self.stored[name.rpartition(".")[0]]
            tensor = ir.tensor(held.values if name.endswith(VALUES) else held.scales, name=name)
            assert (tensor.dtype, tensor.shape) == (dtype, shape)
            return tensor

        quantize_graph(made, self.sites, self.formats, self.scales, values)
        self.inline(made)
        return made

    def multiplied_out(self, role: str) -> ir.Model:
        """The float graph with the weights that the quantised one stands for."""
        made = self.graphs[role].clone()
        for product in list(products(made)):
            held = self.stored.get(product.weight)
            if held is not None and not product.turned:  # tokens are looked up in the embedding
                name = f"{product.weight}.instead"
                if name not in made.graph.initializers:
                    tensor = ir.tensor(held.dequantized(), name=name)
                    value = ir.Value(name=name, const_value=tensor)
                    made.graph.register_initializer(value)
                product.node.replace_input_with(1, made.graph.initializers[name])
        self.inline(made)
        return made

    def inline(self, model: ir.Model) -> None:
        for name, value in list(model.graph.initializers.items()):
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = ir.tensor(value.const_value.numpy().copy(), name=name)

    def feeds(self, role: str, rows: int = 2) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        found = {}
        for port in self.bundle.graph(role).inputs:
            shape = port.resolve(B=rows, n=2, m=1, C=32)
            if port.name == "input_ids":
                found[port.name] = rng.integers(0, self.bundle.spec.vocab_size, shape)
            elif port.dtype == "int64":
                found[port.name] = np.full(shape, 8 if port.name == "past_length" else 0)
            else:
                found[port.name] = rng.standard_normal(shape).astype(np.float32)
        if "commit_length" in found and role == "commit":
            found["commit_length"][:] = found["input_ids"].shape[1]
        return found


def run(
    model: ir.Model, feeds: dict[str, np.ndarray], level: str = "ENABLE_ALL"
) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, feeds)


@pytest.fixture(scope="module")
def bundle(bundle_path: Callable[..., Path]) -> Bundle:
    """Its width is a multiple of 32, and its head is tied."""
    return Bundle.open(bundle_path("tiny-hybrid", fused=True))


@pytest.fixture(scope="module")
def made(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Quantised]:
    folder = tmp_path_factory.mktemp("quantised")
    cache: dict[str, Quantised] = {}
    return lambda name: cache.setdefault(name, Quantised(bundle, FORMATS[name], folder))


@pytest.mark.parametrize("role", ["denoise", "commit"])
@pytest.mark.parametrize("name", ["int8-weights", "int4:32"])
def test_stored_weights_alone_give_the_numbers_of_what_they_stand_for(
    made: Callable[[str], Quantised], name: str, role: str
) -> None:
    quantised = made(name)
    feeds = quantised.feeds(role)
    right = run(quantised.multiplied_out(role), feeds)
    for found, expected in zip(run(quantised.model(role), feeds), right, strict=True):
        scale = max(1.0, float(np.abs(expected).max()))
        assert np.abs(found.astype(np.float64) - expected).max() < 2e-5 * scale


@pytest.mark.parametrize("name", RUN_HERE)
def test_QU_07_every_level_of_optimisation_gives_the_same(
    made: Callable[[str], Quantised], name: str
) -> None:
    quantised = made(name)
    feeds = quantised.feeds("denoise")
    plain = run(quantised.model("denoise"), feeds, "DISABLE_ALL")[0]
    spread = np.abs(run(quantised.model("denoise"), feeds)[0] - plain).max() / np.abs(plain).max()
    # a value in the middle between two steps may round to either, and moves what comes behind it
    assert spread < (2e-2 if FORMATS[name].activations else 2e-5)


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_fused_pass_rounds_as_a_denoise_pass_does(
    made: Callable[[str], Quantised], name: str
) -> None:
    quantised = made(name)
    feeds = quantised.feeds("denoise")
    (alone,) = run(quantised.model("denoise"), feeds)
    names = [port.name for port in quantised.bundle.graph("commit_denoise").outputs]
    fused = run(quantised.model("commit_denoise"), feeds | {"commit_length": np.zeros(2, np.int64)})
    found = dict(zip(names, fused, strict=True))["logits"]
    assert np.abs(found - alone).max() < 2e-2 * np.abs(alone).max()


@pytest.mark.parametrize("role", ["denoise", "commit", "commit_denoise"])
def test_only_weights_and_what_they_are_multiplied_with_are_quantised(
    made: Callable[[str], Quantised], role: str
) -> None:
    quantised = made("int8")
    model = quantised.model(role)
    before = {product.weight for product in products(quantised.graphs[role])}
    kinds = {
        "QuantizeLinear": [node for node in model.graph if node.op_type == "QuantizeLinear"],
        "DequantizeLinear": [node for node in model.graph if node.op_type == "DequantizeLinear"],
    }
    uses = len(list(products(quantised.graphs[role])))
    assert len(kinds["QuantizeLinear"]) == uses
    assert len(kinds["DequantizeLinear"]) == uses + len(before)
    for node in kinds["DequantizeLinear"]:
        assert {use.node.op_type for use in node.outputs[0].uses()} == {"MatMul"}
        source = node.inputs[0]
        assert source is not None
        is_weight = source.name in model.graph.initializers
        assert is_weight or source.producer().op_type == "QuantizeLinear"  # type: ignore[union-attr]
    for node in kinds["QuantizeLinear"]:
        zero = node.inputs[2].const_value.numpy()  # type: ignore[union-attr]
        assert (zero.dtype, int(zero)) == (np.int8, 0)
        assert node.inputs[0].name not in model.graph.initializers  # type: ignore[union-attr]
    # what a plugin or its body computes is left alone
    ours = [node.op_type for node in model.graph if node.domain == "fixedstate"]
    assert ours == [n.op_type for n in quantised.graphs[role].graph if n.domain == "fixedstate"]


@pytest.mark.parametrize("name", list(FORMATS))
def test_ports_stay_as_they_are(made: Callable[[str], Quantised], name: str) -> None:
    quantised = made(name)
    for role, graph in quantised.graphs.items():
        model = quantised.model(role) if name in RUN_HERE else None
        if model is None:
            continue
        for side in ("inputs", "outputs"):
            before = [(v.name, v.dtype, v.shape) for v in getattr(graph.graph, side)]
            assert [(v.name, v.dtype, v.shape) for v in getattr(model.graph, side)] == before


def test_a_weight_without_a_format_is_the_one_it_was(bundle: Bundle) -> None:
    graphs = load_graphs(bundle)
    sites = find_sites(graphs)
    model = graphs["denoise"].clone()
    quantize_graph(model, sites, {}, {}, lambda *_: pytest.fail("nothing is to be stored"))
    assert [n.op_type for n in model.graph] == [n.op_type for n in graphs["denoise"].graph]


def test_a_tied_head_is_stored_turned_round() -> None:
    embedding = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    site = Site("embedding.weight", "head", None, 32, 64, "embedding.weight")
    held = stored(embedding, site, FORMATS["int8"])
    assert held.values.shape == (32, 64)
    assert np.abs(held.dequantized().T - embedding).max() < np.abs(embedding).max() / 127
