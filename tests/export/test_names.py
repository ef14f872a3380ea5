"""Graphs under the port names of other runtimes: names, layouts, numbers, and what is refused."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from sample_models import MODELS, attention_layer, mamba_layer, model, selective_layer

from fixedstate.bundle import Bundle, DecodeDefaults, Source
from fixedstate.cli import cli
from fixedstate.errors import BundleError, ExportError, ParityError, UsageError
from fixedstate.export import portnames
from fixedstate.export.checkpoint import load_checkpoint, random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import write_bundle
from fixedstate.export.portnames import SCHEMES, check_covered, renamed_state
from fixedstate.export.renamed import export_names, write_renamed
from fixedstate.export.stored import StoredWeights
from fixedstate.export.trace import without_weights
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.runtime.decoder import open_engine
from fixedstate.spec import (
    AttentionSizes,
    LayerSpec,
    LinearAttentionSizes,
    Mamba2Sizes,
    ModelSpec,
)
from fixedstate.state import Precision, StateSpec

Arrays = dict[str, np.ndarray]
L = 8
PROMPT = np.array([5, 11, 17, 3, 29, 8, 8, 21, 14, 33, 6], np.int64)


def causal(*layers: LayerSpec, **changes: object) -> ModelSpec:
    return model(*layers, **{"objective": "causal", "mask_id": None, **changes})


HYBRID = causal(mamba_layer("forward"), attention_layer("forward"))


# --- names ----------------------------------------------------------------------------------------

TABLE = {
    ("genai", "F2"): (
        ("past_key_values.0.conv_state", "present.0.conv_state", ("B", 96, 3)),
        ("past_key_values.0.recurrent_state", "present.0.recurrent_state", ("B", 8, 8, 8)),
        ("past_key_values.1.conv_state", "present.1.conv_state", ("B", 96, 3)),
        ("past_key_values.1.recurrent_state", "present.1.recurrent_state", ("B", 8, 8, 8)),
    ),
    ("mobius", "F2"): (
        ("past_states.0.conv_state", "present.0.conv_state", ("B", 96, 3)),
        ("past_states.0.ssm_state", "present.0.ssm_state", ("B", 8, 8, 8)),
        ("past_states.1.conv_state", "present.1.conv_state", ("B", 96, 3)),
        ("past_states.1.ssm_state", "present.1.ssm_state", ("B", 8, 8, 8)),
    ),
    ("mobius", "F1"): (
        ("past_states.0.conv_state", "present.0.conv_state", ("B", 32, 3)),
        ("past_states.0.ssm_state", "present.0.ssm_state", ("B", 32, 4)),
        ("past_states.1.conv_state", "present.1.conv_state", ("B", 32, 3)),
        ("past_states.1.ssm_state", "present.1.ssm_state", ("B", 32, 4)),
    ),
    ("mobius", "F3"): (
        ("past_key_values.0.conv_state", "present.0.conv_state", ("B", 96, 3)),
        ("past_key_values.0.ssm_state", "present.0.ssm_state", ("B", 8, 8, 8)),
        ("past_key_values.1.key", "present.1.key", ("B", 2, "P", 8)),
        ("past_key_values.1.value", "present.1.value", ("B", 2, "P", 8)),
        ("past_key_values.2.conv_state", "present.2.conv_state", ("B", 96, 3)),
        ("past_key_values.2.ssm_state", "present.2.ssm_state", ("B", 8, 8, 8)),
    ),
    ("hf", "F3"): (
        *(
            (f"input.cache.layers.0.{name}", f"output.cache.layers.0.{name}", shape)
            for name, shape in (
                ("conv_states.0", ("B", 96, 4)),
                ("recurrent_states.0", ("B", 8, 8, 8)),
            )
        ),
        ("input.cache.layers.1.keys", "output.cache.layers.1.keys", ("B", 2, "P", 8)),
        ("input.cache.layers.1.values", "output.cache.layers.1.values", ("B", 2, "P", 8)),
        *(
            (f"input.cache.layers.2.{name}", f"output.cache.layers.2.{name}", shape)
            for name, shape in (
                ("conv_states.0", ("B", 96, 4)),
                ("recurrent_states.0", ("B", 8, 8, 8)),
            )
        ),
    ),
    ("hf", "F1"): (
        ("input.cache.layers.0.conv_states.0", "output.cache.layers.0.conv_states.0", ("B", 32, 4)),
        (
            "input.cache.layers.0.recurrent_states.0",
            "output.cache.layers.0.recurrent_states.0",
            ("B", 32, 4),
        ),
        ("input.cache.layers.1.conv_states.0", "output.cache.layers.1.conv_states.0", ("B", 32, 4)),
        (
            "input.cache.layers.1.recurrent_states.0",
            "output.cache.layers.1.recurrent_states.0",
            ("B", 32, 4),
        ),
    ),
}
"""Names as the other side publishes them; F1 Mamba-1, F2 Mamba-2, F3 with attention."""


@pytest.mark.parametrize(("scheme", "name"), TABLE, ids="-".join)
def test_names_and_shapes_are_the_published_ones(scheme: str, name: str) -> None:
    spec = MODELS[name]
    found = renamed_state(SCHEMES[scheme], spec, StateSpec.of(spec)).values()
    assert (
        tuple((past.name, present.name, past.shape) for past, present in found)
        == TABLE[scheme, name]
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_stand_in_the_order_of_the_graph(scheme: str) -> None:
    """Sorted by name, layer 10 would come before layer 2."""
    spec = model(*(mamba_layer("forward") for _ in range(12)))
    pairs = renamed_state(SCHEMES[scheme], spec, StateSpec.of(spec)).values()
    layers = [
        int(next(part for part in past.name.split(".") if part.isdigit())) for past, _ in pairs
    ]
    assert layers == [index for index in range(12) for _ in range(2)]
    assert len({one.name for pair in pairs for one in pair}) == 48


# --- numbers --------------------------------------------------------------------------------------


def traced(spec: ModelSpec, source: Path, folder: Path, *roles: str) -> Bundle:
    """A bundle as the exporter writes it, not compared with PyTorch: its own tests do that."""
    folder.mkdir()
    given, chosen = load_checkpoint(source, block_len=L).tensors, Precision()
    return write_bundle(
        folder,
        without_weights(spec, lambda tensors: Denoiser(spec, tensors, chosen, TRACED)),
        StoredWeights(given, chosen),
        list(roles),
        lambda _: None,
        decode=DecodeDefaults(),
        files={},
        source=Source(),
    )


def written(bundle: Bundle, folder: Path, scheme: str) -> Path:
    folder.mkdir()
    _, compared = write_renamed(bundle, folder, SCHEMES[scheme])
    assert compared
    assert all(one.passed for one in compared)
    return folder


def run(file: Path, feeds: Arrays) -> Arrays:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(file), options)
    names = [output.name for output in session.get_outputs()]
    fed = {one.name: feeds[one.name] for one in session.get_inputs()}
    return dict(zip(names, session.run(names, fed), strict=True))


def theirs(array: np.ndarray, layout: str) -> np.ndarray:
    if layout == "turned":
        return array.swapaxes(-1, -2)
    if layout == "window":  # what the first column holds does not matter
        return np.concatenate([np.full_like(array[..., :1], 7.0), array], axis=-1)
    return array


@pytest.mark.parametrize("scheme", ["mobius", "hf"])
@pytest.mark.parametrize("name", ["tiny-attention", "tiny-mamba", "tiny-hybrid"])
def test_a_renamed_graph_gives_what_the_bundles_gives(
    bundle_path: Callable[..., Path], tmp_path: Path, name: str, scheme: str
) -> None:
    """From any state: the same numbers, to the last digits, under the names in names.json."""
    bundle = Bundle.open(bundle_path(name))
    folder = written(bundle, tmp_path / "out", scheme)
    content = json.loads((folder / "names.json").read_text())
    block, rng, rows, past = bundle.spec.block_len, np.random.default_rng(3), 2, 5
    ours: Arrays = {
        port.past.name: rng.standard_normal(port.past.resolve(B=rows, C=past)).astype(np.float32)
        for port in bundle.state.committed
    }
    ours["past_length"] = np.full(rows, past)
    for role, tokens in (("denoise", block), ("commit", 2 * block)):
        ours["input_ids"] = rng.integers(3, 200, (rows, tokens))
        ours["commit_length"] = np.full(rows, tokens)
        graph = content["graphs"][f"{role}.onnx"]
        feeds = {one["name"]: theirs(ours[one["ours"]], one["layout"]) for one in graph["inputs"]}
        found = run(folder / f"{role}.onnx", feeds)
        right = run(bundle.path / f"{role}.onnx", ours)
        assert [one["ours"] for one in graph["outputs"]] == list(right)
        for one in graph["outputs"]:
            expected, got = right[one["ours"]], found[one["name"]]
            if one["layout"] == "whole":
                before = ours[one["ours"].replace("present_", "past_")]
                expected = np.concatenate([before, expected], axis=2)
            if one["layout"] == "window":
                assert not got[..., 0].any()
                got = got[..., 1:]
            else:
                expected = theirs(expected, one["layout"])
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6, err_msg=one["name"])


def test_a_length_that_would_be_wrong_fails(
    bundle_path: Callable[..., Path], tmp_path: Path
) -> None:
    """A commit pass that looks ahead inside a block has whole blocks only."""
    bundle = Bundle.open(bundle_path("tiny-mamba"))
    folder = written(bundle, tmp_path / "out", "mobius")
    content = json.loads((folder / "names.json").read_text())
    assert content["tokens"] == "a multiple of 16"
    feeds: Arrays = {
        one["name"]: np.zeros([1, *one["shape"][1:]], np.float32)
        for one in content["graphs"]["commit.onnx"]["inputs"][1:]
    }
    run(folder / "commit.onnx", {**feeds, "input_ids": np.zeros((1, 32), np.int64)})
    for tokens in (1, 15, 17, 40):
        with pytest.raises(Exception, match=r"Reshape"):
            run(folder / "commit.onnx", {**feeds, "input_ids": np.zeros((1, tokens), np.int64)})


# --- against transformers, whose layouts these are ------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SimpleNamespace]:
    """A model of transformers with random weights, its folder, and a bundle of that."""
    from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

    root = tmp_path_factory.mktemp("published")
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "conv_kernel": 4}

    @functools.cache
    def make(kind: str) -> SimpleNamespace:
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kernels that are not there; a config written for them
            if kind == "mamba2":
                two = Mamba2Config(**sizes, num_heads=8, head_dim=8, state_size=4, n_groups=2)
                oracle = Mamba2ForCausalLM(two)
            else:
                oracle = MambaForCausalLM(MambaConfig(**sizes, state_size=4, time_step_rank=2))
            with torch.no_grad():
                for parameter in oracle.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            oracle.save_pretrained(root / kind)
        spec = load_checkpoint(root / kind, block_len=L).spec
        assert (spec.objective, spec.vocab_size) == ("causal", 40)
        roles = ["denoise", "commit"] + (["commit_denoise"] if kind == "mamba2" else [])
        bundle = traced(spec, root / kind, root / f"{kind}.bundle", *roles)
        return SimpleNamespace(model=oracle.eval(), folder=root / kind, bundle=bundle)

    return make


def cached(oracle: torch.nn.Module, ids: np.ndarray) -> tuple[np.ndarray, Arrays]:
    """Logits of all tokens, and the cache behind them as transformers' exporters name its parts."""
    from transformers.exporters.utils import get_leaf_tensors

    with torch.no_grad():
        made = oracle(input_ids=torch.from_numpy(ids), use_cache=True)
    leaves = get_leaf_tensors({"cache": made.cache})
    return made.logits.numpy(), {name: value.numpy() for name, value in leaves.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_cache_of_transformers_goes_in_as_it_is(
    published: Callable[[str], SimpleNamespace], tmp_path: Path, kind: str
) -> None:
    """Its own cache after 11 tokens into our graphs, and ours after 5 more is its own again."""
    case = published(kind)
    folder = written(case.bundle, tmp_path / "out", "hf")
    ids = np.stack([np.arange(3, 22), np.arange(3, 22)[::-1]]).astype(np.int64)
    _, before = cached(case.model, ids[:, :11])
    feeds: Arrays = {f"input.{name}": array for name, array in before.items()}
    graph = json.loads((folder / "names.json").read_text())["graphs"]["commit.onnx"]
    assert {one["name"] for one in graph["inputs"]} == {"input_ids", *feeds}

    logits, _ = cached(case.model, ids)
    found = run(folder / "denoise.onnx", {**feeds, "input_ids": ids[:, 11:]})["logits"]
    np.testing.assert_allclose(found, logits[:, 11:], atol=1e-4)

    _, after = cached(case.model, ids[:, :16])
    found = run(folder / "commit.onnx", {**feeds, "input_ids": ids[:, 11:16]})
    assert set(found) == {f"output.{name}" for name in after}
    for name, expected in after.items():
        got = found[f"output.{name}"]
        assert got.shape == expected.shape
        if ".conv_states." in name:  # K - 1 of its K columns are read
            got, expected = got[..., 1:], expected[..., 1:]
        np.testing.assert_allclose(got, expected, atol=1e-4, err_msg=name)


# --- onnxruntime-genai ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def genai():
    """The package, where there is one for this Python."""
    package = pytest.importorskip("onnxruntime_genai")
    package.disable_telemetry_events()
    return package


@pytest.fixture(scope="module")
def genai_folder(
    published: Callable[[str], SimpleNamespace], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The Mamba-2 bundle, written for onnxruntime-genai."""
    return written(published("mamba2").bundle, tmp_path_factory.mktemp("genai") / "out", "genai")


def generator(genai, folder: Path, model=None, length: int = 100):
    model = model or genai.Model(str(folder))
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=length, do_sample=False)
    return genai.Generator(model, params)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_genai_generates_what_transformers_computes(
    genai, published: Callable[[str], SimpleNamespace], genai_folder: Path
) -> None:
    """A prompt of 11 tokens, then one token a pass; each beside a recompute of the whole text."""
    oracle = published("mamba2").model
    loop = generator(genai, genai_folder)
    loop.append_tokens(PROMPT[None].astype(np.int32))
    text = list(PROMPT)
    for _ in range(24):
        right = cached(oracle, np.array([text]))[0][0, -1]
        np.testing.assert_allclose(loop.get_logits().reshape(-1), right, atol=1e-4)
        loop.generate_next_token()
        text.append(int(loop.get_next_tokens()[0]))
        assert text[-1] == right.argmax()
    assert list(loop.get_sequence(0)) == text


def test_genai_carries_blocks_as_our_runtime_does(
    genai, published: Callable[[str], SimpleNamespace], genai_folder: Path
) -> None:
    """Three blocks, twice over with one model: the second text starts from an empty state."""
    bundle = published("mamba2").bundle
    state = renamed_state(SCHEMES["genai"], bundle.spec, bundle.state)
    loaded = genai.Model(str(genai_folder))
    engine = open_engine(bundle, threads=1)
    for turn in range(2):
        loop = generator(genai, genai_folder, loaded)
        engine.reset(0)
        for block in np.random.default_rng(turn).integers(3, 40, (3, L)):
            right = engine.denoise(block[None]).copy()[0, -1]  # causal: the last sees the block
            engine.commit(block[None], np.array([L]))
            loop.append_tokens(block[None].astype(np.int32))
            np.testing.assert_allclose(loop.get_logits().reshape(-1), right, atol=1e-4)
        for suffix, kept in engine.buffers.read(0).items():
            name = state[suffix][1].name
            np.testing.assert_allclose(loop.get_output(name)[0], kept, atol=1e-4, err_msg=name)


def test_genai_runs_rows_side_by_side(genai, genai_folder: Path) -> None:
    """A batch of texts of one length; each goes its own way."""
    loaded = genai.Model(str(genai_folder))
    texts = np.stack([PROMPT, PROMPT[::-1], PROMPT * 7 % 40]).astype(np.int32)
    params = genai.GeneratorParams(loaded)
    params.set_search_options(max_length=20, do_sample=False, batch_size=3)
    loop = genai.Generator(loaded, params)
    loop.append_tokens(texts)
    together = []
    for _ in range(5):
        loop.generate_next_token()
        together.append(list(loop.get_next_tokens()))
    for row, text in enumerate(texts):
        alone = generator(genai, genai_folder, loaded, length=20)
        alone.append_tokens(text[None])
        for step in together:
            alone.generate_next_token()
            assert alone.get_next_tokens()[0] == step[row]


def test_genai_keeps_keys_and_values_too(genai, tmp_path: Path) -> None:
    """Mamba-2 and attention in one model: cached equals recomputed."""
    spec = HYBRID
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=7))
    bundle = traced(spec, tmp_path / "c", tmp_path / "b", "denoise", "commit", "commit_denoise")
    folder = written(bundle, tmp_path / "out", "genai")
    loaded = genai.Model(str(folder))
    loop = generator(genai, folder, loaded)
    loop.append_tokens(PROMPT[None].astype(np.int32))
    for _ in range(12):
        loop.generate_next_token()
        again = generator(genai, folder, loaded)
        again.append_tokens(np.asarray(loop.get_sequence(0))[None])
        fresh = np.array(again.get_logits())
        loop_logits = np.array(loop.get_logits())
        np.testing.assert_allclose(loop_logits, fresh, atol=1e-4)
    names = [
        one.name for one in onnx.load(folder / "model.onnx", load_external_data=False).graph.input
    ]
    assert names == [
        "input_ids",
        "past_key_values.0.conv_state",
        "past_key_values.0.recurrent_state",
        "past_key_values.1.key",
        "past_key_values.1.value",
    ]


def test_genai_may_write_the_state_over_itself(genai_folder: Path, tmp_path: Path) -> None:
    """It binds one memory as past and present: each state is read once, by a copy, before it.

    A copy that an optimiser takes out again would be none.
    """
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(str(genai_folder / "model.onnx"), options)
    graph = onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph
    states = [one.name for one in graph.input if one.name != "input_ids"]
    assert len(states) == 4
    made_by = {output: node for node in graph.node for output in node.output}
    for name in states:
        readers = [node for node in graph.node if name in node.input]
        assert [node.op_type for node in readers] == ["Slice"], name
        seen, behind = set(), [name.replace("past_key_values", "present")]
        while behind:  # everything that the new state is made of
            node = made_by.get(behind.pop())
            if node is not None and node.name not in seen:
                seen.add(node.name)
                behind += node.input
        assert readers[0].name in seen, f"{name} may be read behind its new value"


def test_the_config_names_what_the_graph_has(genai_folder: Path) -> None:
    """A wrong name would show in a run only."""
    config = json.loads((genai_folder / "genai_config.json").read_text())
    model, decoder = config["model"], config["model"]["decoder"]
    graph = onnx.load(genai_folder / decoder["filename"], load_external_data=False).graph
    names = {one.name for one in (*graph.input, *graph.output)}
    assert decoder["inputs"]["input_ids"] in names
    for side, key in (("inputs", "past_key_names"), ("outputs", "present_key_names")):
        for suffix in ("conv_state", "recurrent_state"):  # it derives these names from that one
            assert decoder[side][key].removesuffix("key") % 1 + suffix in names
    logits = next(one for one in graph.output if one.name == decoder["outputs"]["logits"])
    assert [dim.dim_value for dim in logits.type.tensor_type.shape.dim[1:]] == [
        1,
        model["vocab_size"],
    ]


# --- refused --------------------------------------------------------------------------------------

WINDOW = AttentionSizes(heads=4, kv_heads=2, head_dim=8, rotary_dim=8, window=8)
ONE_TAP = Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=1)
LINEAR = LayerSpec(
    "linear_attention",
    LinearAttentionSizes(heads=2, kv_heads=2, head_dim=16, rotary_dim=16),
)
UNCOVERED = {
    "window": (("mobius", "hf"), model(attention_layer(sizes=WINDOW)), "past_key_000"),
    "window-causal": (("genai",), causal(attention_layer("forward", WINDOW)), "past_key_000"),
    "linear": (("mobius", "hf"), model(mamba_layer(), LINEAR), "past_ssm_state_001"),
    "one-tap": (tuple(SCHEMES), causal(mamba_layer("forward", ONE_TAP)), "layer 0 .*one tap"),
    "step": (
        ("mobius", "hf"),
        model(mamba_layer(), self_conditioning_width=8),
        "step_in_soft_embedding_000",
    ),
    "full": (("mobius", "hf", "genai"), model(mamba_layer(), objective="full"), "no state"),
    "no-stop": (("genai",), causal(mamba_layer("forward"), stop_ids=()), "--stop-id"),
    "sizes": (
        ("genai",),
        causal(mamba_layer("forward"), selective_layer("forward")),
        "the size that the first one has",
    ),
    "block": (("genai",), model(mamba_layer()), "objective 'block'.*fixedstate generate"),
}


@pytest.mark.parametrize(
    ("scheme", "spec", "words"),
    [(name, spec, words) for names, spec, words in UNCOVERED.values() for name in names],
    ids=[f"{case}-{name}" for case, (names, _, _) in UNCOVERED.items() for name in names],
)
def test_what_has_no_name_there_is_refused_by_name(
    scheme: str, spec: ModelSpec, words: str
) -> None:
    with pytest.raises(ExportError, match=rf"--names {scheme}: .*{words}"):
        check_covered(SCHEMES[scheme], spec, StateSpec.of(spec))


def test_it_is_refused_before_anything_is_traced(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="fixedstate generate"):
        export_names("tiny-mamba", tmp_path / "out", "genai")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        ("genai", {"fused": False}, "--no-fused"),
        ("hf", {"head": "top_k"}, "--head top_k"),
        ("onnx", {}, "genai, mobius, hf"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, names: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        export_names("tiny-mamba", tmp_path / "out", names, **options)
    with pytest.raises(UsageError, match="module of your own"):
        export_names("some.module:build", tmp_path / "out", "hf")


def test_a_wrong_layout_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, bundle_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Heads of 8 channels and 8 states: turned or not, the shape is the same."""
    bundle = Bundle.open(bundle_path("F2"))
    monkeypatch.setattr(portnames, "_turned", lambda renamed: list(range(len(renamed.shape))))
    (tmp_path / "out").mkdir()
    with pytest.raises(ParityError, match=r"commit\.onnx, pass 1.*recurrent_states"):
        write_renamed(bundle, tmp_path / "out", SCHEMES["hf"])
    assert not (tmp_path / "out" / "names.json").exists()


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One run of the command on a small Mamba-1 model, with what it printed."""
    root = tmp_path_factory.mktemp("command")
    spec = model(selective_layer("forward"))
    save_checkpoint(root / "checkpoint", spec, random_tensors(spec, seed=7))
    target = root / "made" / "out"
    target.parent.mkdir()
    words = ["export", str(root / "checkpoint"), "--names", "mobius", "-o", str(target), "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return SimpleNamespace(folder=target, words=words, printed=json.loads(done.stdout))


def test_the_folder_holds_what_the_other_runtime_needs(exported: SimpleNamespace) -> None:
    files = sorted(path.name for path in exported.folder.iterdir())
    assert files == [
        "commit.onnx",
        "denoise.onnx",
        "names.json",
        "parity.json",
        "weights.safetensors",
    ]
    assert [path.name for path in exported.folder.parent.iterdir()] == ["out"]
    content = json.loads((exported.folder / "names.json").read_text())
    assert exported.printed == {
        "path": str(exported.folder),
        **content,
        "parity": json.loads((exported.folder / "parity.json").read_text()),
    }
    assert exported.printed["parity"]["passed"] is True
    assert all(one["passed"] for one in exported.printed["parity"]["names"])
    for file, graph in content["graphs"].items():
        read = onnx.load(exported.folder / file)
        onnx.checker.check_model(read)
        for side, values in (("inputs", read.graph.input), ("outputs", read.graph.output)):
            assert [one["name"] for one in graph[side]] == [value.name for value in values]


def test_it_is_no_bundle_and_says_what_it_is(exported: SimpleNamespace) -> None:
    with pytest.raises(BundleError, match=r"another runtime .*without --names"):
        Bundle.open(exported.folder)
    done = CliRunner().invoke(cli, ["inspect", str(exported.folder)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1


def test_what_is_there_stays_without_force(exported: SimpleNamespace) -> None:
    before = {path.name: path.read_bytes() for path in exported.folder.iterdir()}
    done = CliRunner().invoke(cli, exported.words)
    assert done.exit_code == 2
    assert "--force" in done.stderr
    assert {path.name: path.read_bytes() for path in exported.folder.iterdir()} == before
