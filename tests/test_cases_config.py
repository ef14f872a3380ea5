"""Cases CF and TK: every legal shape works like the reference, every other is refused in numbers.

What published configs say about them stands in tests/export/test_checkpoint_published.py.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from one_op import run_op
from reference_model import ReferenceModel
from sample_models import ATTENTION, MAMBA, MODELS, mamba_layer, model
from scan_inputs import scan_inputs
from scripted import ScriptedEngine, decode, noise_table, one_hot, small_spec
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fixedstate.bundle import Bundle
from fixedstate.errors import CheckpointError, SpecError, UsageError
from fixedstate.export.checkpoint import load_checkpoint, random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import export_bundle
from fixedstate.plugins.torch_ops import PLAIN
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.text import Text
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba1Sizes, Mamba2Sizes, ModelSpec
from fixedstate.state import StateSpec

ROOT = Path(__file__).resolve().parent.parent
RIGHT = 1e-4  # float32 against float64
SAME = 1e-5  # two orders of float32 sums

State = dict[str, torch.Tensor]


def tokens_of(spec: ModelSpec, *shape: int, seed: int = 0) -> np.ndarray:
    """Random real tokens."""
    return np.random.default_rng(seed).integers(0, spec.vocab_size, shape)


def commit(denoiser: Denoiser, state: State, ids: np.ndarray, past: int) -> State:
    """The state after a row's tokens, whatever their number; noise behind them."""
    length = denoiser.spec.block_len
    blocks = -(-len(ids) // length)
    padded = tokens_of(denoiser.spec, 1, blocks * length, seed=99)
    padded[0, : len(ids)] = ids
    made = denoiser.commit(
        torch.from_numpy(padded), state, torch.tensor([past]), torch.tensor([len(ids)])
    )
    state = dict(state)
    for port in denoiser.state_spec.ports:
        if port.update == "swap":
            state[port.suffix] = made[port.suffix]
        else:
            new = made[port.suffix][:, :, : len(ids)]
            state[port.suffix] = torch.cat([state[port.suffix][:, :, :past], new], 2)
    return state


def assert_equals_the_loops(spec: ModelSpec, cuts: tuple[int, ...], seed: int = 3) -> None:
    """States and logits of the torch denoiser, its row committed in one or two pieces."""
    tensors = random_tensors(spec, seed=seed)
    denoiser, judge = Denoiser(spec, tensors), ReferenceModel(spec, tensors)
    for cut in cuts:
        row, canvas = tokens_of(spec, 20, seed=cut), tokens_of(spec, spec.block_len, seed=1)
        state = denoiser.zero_state(1)
        for part, past in ((row[:cut], 0), (row[cut:], cut)):
            state = commit(denoiser, state, part, past)
        expected, states = judge.run(np.concatenate([row, canvas]), clean=len(row))
        past = torch.tensor([len(row)])
        logits = denoiser.denoise(torch.from_numpy(canvas)[None], state, past)[0]
        np.testing.assert_allclose(logits, expected[-spec.block_len :], atol=RIGHT)
        for suffix, value in states.items():
            np.testing.assert_allclose(state[suffix][0], value, atol=RIGHT, err_msg=suffix)


# --- one exported model of odd sizes, many widths of convolution and an irregular pattern --------

MIXED_MAMBA = [
    Mamba2Sizes(40, 8, 5, 6, groups, taps, bias=bias, conv_bias=conv_bias)
    for groups, taps, bias, conv_bias in (
        (1, 1, True, True),
        (2, 5, True, False),
        (4, 8, False, True),
        (8, 2, False, False),
    )
]
MIXED_ATTENTION = [
    AttentionSizes(3, kv_heads, 5, 4, qkv_bias=qkv_bias, out_bias=out_bias)
    for kv_heads, qkv_bias, out_bias in (
        (1, True, True),
        (3, True, False),
        (1, False, True),
        (3, False, False),
    )
]
PATTERN = "MAMMAMAA"


def irregular() -> ModelSpec:
    """Width 20, 8 heads of 5, state 6: nothing a multiple of 8; layers M A M M A M A A."""
    mamba, attention = iter(MIXED_MAMBA), iter(MIXED_ATTENTION)
    layers = [
        LayerSpec("mamba2", next(mamba), "forward")
        if letter == "M"
        else LayerSpec("attention", next(attention), "forward")
        for letter in PATTERN
    ]
    return model(*layers, width=20)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[SessionEngine, ReferenceModel]:
    """That model on ONNX Runtime, and its judge."""
    spec = irregular()
    tensors = random_tensors(spec, seed=5)
    root = tmp_path_factory.mktemp("odd")
    save_checkpoint(root / "c", spec, tensors)
    report = export_bundle(root / "c", root / "odd.bundle", fused=False)
    return open_engine(report.bundle, threads=1, slots=2), ReferenceModel(spec, tensors)


def commit_row(engine: SessionEngine, ids: np.ndarray, row: int = 0) -> None:
    spec = engine.spec
    padded = tokens_of(spec, row + 1, -(-len(ids) // spec.block_len) * spec.block_len, seed=9)
    padded[row, : len(ids)] = ids
    lengths = np.zeros(row + 1, np.int64)
    lengths[row] = len(ids)
    engine.commit(padded, lengths)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 8, 19])
def test_CF_05_06_10_an_odd_model_on_onnx_runtime(
    odd: tuple[SessionEngine, ReferenceModel], cut: int
) -> None:
    """Taps 1, 2, 5 and 8, all four pairs of biases, odd sizes: any cut equals the loops."""
    engine, judge = odd
    engine.reset(0)
    row, canvas = tokens_of(engine.spec, 20, seed=cut), tokens_of(engine.spec, 8, seed=1)
    commit_row(engine, row[:cut])
    commit_row(engine, row[cut:])
    expected, states = judge.run(np.concatenate([row, canvas]), clean=len(row))
    np.testing.assert_allclose(engine.denoise(canvas[None])[0], expected[-8:], atol=RIGHT)
    found = engine.read(0)
    assert found.keys() == states.keys()
    for suffix, value in states.items():
        np.testing.assert_allclose(found[suffix], value, atol=RIGHT, err_msg=suffix)


# --- CF-01, CF-03: numbers and rules --------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Mamba2Sizes(32, 1, 64, 8, 1, 4),
            ("d_inner 32", "heads x head_dim", "1 x 64 = 64"),
        ),
        (lambda: Mamba2Sizes(32, 4, 8, 8, 3, 4), ("heads 4", "multiple of groups 3")),
        (lambda: replace(ATTENTION, heads=4, kv_heads=3), ("heads 4", "kv_heads 3")),
        (lambda: replace(ATTENTION, rotary_dim=12), ("rotary_dim 12", "head_dim 8")),
    ],
)
def test_CF_01_the_rule_that_failed_and_its_numbers(
    make: Callable[[], object], words: tuple[str, ...]
) -> None:
    """An error says which fields disagree, with their values."""
    with pytest.raises(SpecError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


def test_CF_03_own_configs_are_checked_against_their_weights(tmp_path: Path) -> None:
    """A config of inner width 80 over weights of 96: the tensor, what it has and what was asked."""
    weights = model(mamba_layer("forward", Mamba2Sizes(96, 3, 32, 8, 1, 4)), width=40)
    config = model(mamba_layer("forward", Mamba2Sizes(80, 10, 8, 8, 1, 4)), width=40)
    save_checkpoint(tmp_path / "w", weights, random_tensors(weights))
    save_checkpoint(tmp_path / "c", config, random_tensors(config))
    (tmp_path / "c" / "model.safetensors").write_bytes(
        (tmp_path / "w" / "model.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "c")
    message = str(caught.value)
    assert (
        "tensor layers.0.mixer.in_proj.weight of model.safetensors has shape (211, 40)" in message
    )
    assert "config.json asks for (186, 40)" in message


# --- CF-04: groups --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torch", "onnx"])
@pytest.mark.parametrize("silent", [0, 1, 2])
def test_CF_04_each_group_serves_its_own_neighbouring_heads(form: str, silent: int) -> None:
    """6 heads in 3 groups are 0,0,1,1,2,2: B and C of one group at zero silence its two heads."""
    inputs = scan_inputs(np.random.default_rng(silent), 2, 16, 6, 3)
    inputs["b"][:, :, silent] = 0
    inputs["c"][:, :, silent] = 0
    given = {key: value.astype(np.float32) for key, value in inputs.items()}
    if form == "onnx":
        y = run_op("SsdBlockCommit", given, 16)[0]
    else:
        tensors = {key: torch.from_numpy(value) for key, value in given.items()}
        y = PLAIN.ssd_commit(**tensors, block_len=16)[0].numpy()
    skip = given["x"] * given["d"][:, None]
    gap = np.abs(y - skip).max(axis=(0, 1, 3))
    quiet = [head for head in range(6) if gap[head] < 1e-6]
    assert quiet == [2 * silent, 2 * silent + 1]
    assert min(np.delete(gap, quiet)) > 0.1


# --- CF-05, CF-06, CF-10: shapes ------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_CF_05_every_width_of_convolution(kind: str, taps: int) -> None:
    """1 to 8 taps, one without any window to carry; cuts fall inside and outside the window."""
    sizes = Mamba1Sizes(24, 5, 3, taps) if kind == "mamba1" else replace(MAMBA, d_conv=taps)
    spec = model(LayerSpec(kind, sizes, "forward"), LayerSpec(kind, sizes, "forward"))
    names = {port.suffix for port in StateSpec.of(spec).ports}
    assert ("conv_state_000" in names) == (taps > 1)
    assert_equals_the_loops(spec, (1, 2, 3, 4, 8, 19))


@pytest.mark.parametrize("taps", [0, 9])
def test_CF_05_other_widths_are_refused(taps: int) -> None:
    """By the number and the range."""
    with pytest.raises(SpecError, match=f"d_conv must be .*; got {taps}"):
        replace(MAMBA, d_conv=taps)


ODD = {
    "mamba2": Mamba2Sizes(40, 8, 5, 6, 1, 4),
    "one head": Mamba2Sizes(7, 1, 7, 1, 1, 3),
    "mamba1": Mamba1Sizes(21, 3, 1, 4),
    "attention": AttentionSizes(5, 5, 3, 2),
}


@pytest.mark.parametrize("name", ODD)
def test_CF_06_sizes_that_are_no_multiple_of_eight(name: str) -> None:
    """Width 20, 8 heads of 5, state 6, and smaller: plain operators take any size."""
    sizes = ODD[name]
    kind = {"Mamba1Sizes": "mamba1", "Mamba2Sizes": "mamba2", "AttentionSizes": "attention"}
    layer = LayerSpec(kind[type(sizes).__name__], sizes, "forward", mlp="gated", mlp_width=11)
    assert_equals_the_loops(model(layer, layer, width=20), (1, 5, 19))


@pytest.mark.parametrize(
    ("kind", "bias", "conv_bias"),
    list(itertools.product(("mamba1", "mamba2"), (False, True), (False, True))),
)
def test_CF_10_every_pair_of_biases(kind: str, bias: bool, conv_bias: bool) -> None:
    """Projection bias and convolution bias on and off, with random values."""
    sizes: Mamba1Sizes | Mamba2Sizes = MAMBA if kind == "mamba2" else Mamba1Sizes(24, 5, 3, 4)
    layer = LayerSpec(kind, replace(sizes, bias=bias, conv_bias=conv_bias), "forward")
    tensors = random_tensors(model(layer))
    assert ("layers.0.mixer.in_proj.bias" in tensors) == bias
    assert ("layers.0.mixer.conv1d.bias" in tensors) == conv_bias
    assert_equals_the_loops(model(layer, layer), (4,))


# --- CF-07: words and patterns --------------------------------------------------------------------


@pytest.mark.parametrize("word", ["m2", "mamba", "full_attention", "", "Mamba2", "ssm"])
def test_CF_07_an_unknown_mixer_lists_the_known_ones(word: str) -> None:
    """The own format has one word for each mixer."""
    with pytest.raises(SpecError) as caught:
        LayerSpec(word, None)
    assert "use one of attention, linear_attention, mamba1, mamba2, none" in str(caught.value)


def test_CF_07_a_hybrid_without_any_mamba_layer(bundle_path: Callable[[str], Path]) -> None:
    """Attention alone comes out of the same exporter, with no recurrent state anywhere."""
    bundle = Bundle.open(bundle_path("F4"))
    assert {port.kind for port in bundle.state.ports} == {"key", "value"}
    names = {port.name for graph in bundle.graphs.values() for port in graph.inputs}
    assert not any("ssm" in name or "conv" in name for name in names)


# --- CF-08: whose state is whose ------------------------------------------------------------------


def test_CF_08_names_carry_the_true_layer_index() -> None:
    """M A M M A M A A: Mamba states at 0, 2, 3 and 5, keys and values at 1, 4, 6 and 7."""
    found: dict[str, list[int]] = {}
    for port in StateSpec.of(irregular()).ports:
        found.setdefault(port.kind, []).append(port.layer)
        assert port.suffix.endswith(f"_{port.layer:03}")
    assert found["ssm"] == [0, 2, 3, 5]
    assert found["conv"] == [2, 3, 5]  # layer 0 has one tap
    assert found["key"] == found["value"] == [1, 4, 6, 7]


def test_CF_08_a_marker_stays_in_its_own_layer(
    odd: tuple[SessionEngine, ReferenceModel],
) -> None:
    """A pass that commits nothing gives every layer its own marker back, byte for byte."""
    engine, _ = odd
    engine.reset(0)
    commit_row(engine, tokens_of(engine.spec, 8))
    marked = {
        suffix: np.full_like(array, 1 + index)
        for index, (suffix, array) in enumerate(engine.read(0).items())
    }
    engine.write(0, marked, 8)
    engine.commit(tokens_of(engine.spec, 1, 16), np.array([0]))
    for suffix, array in engine.read(0).items():
        assert array.tobytes() == marked[suffix].tobytes(), suffix


@pytest.mark.parametrize("layer", [0, 2, 3, 5])
def test_CF_08_a_state_moves_nothing_before_its_layer(
    odd: tuple[SessionEngine, ReferenceModel], layer: int
) -> None:
    """Another state of one layer changes that layer's next state and none of an earlier layer."""
    engine, _ = odd
    row, more = tokens_of(engine.spec, 8), tokens_of(engine.spec, 8, seed=4)

    def after(marker: float) -> dict[str, np.ndarray]:
        engine.reset(0)
        commit_row(engine, row)
        state = engine.read(0)
        state[f"ssm_state_{layer:03}"] = state[f"ssm_state_{layer:03}"] + np.float32(marker)
        engine.write(0, state, 8)
        commit_row(engine, more)
        return engine.read(0)

    plain, marked = after(0.0), after(1.0)
    changed = {suffix for suffix in plain if plain[suffix].tobytes() != marked[suffix].tobytes()}
    assert f"ssm_state_{layer:03}" in changed
    assert not [suffix for suffix in changed if int(suffix[-3:]) < layer]


# --- CF-09: the cut into chunks -------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_CF_09_the_cut_into_blocks_and_chunks_changes_nothing(form: str) -> None:
    """How many tokens a scan takes at a time is internal: every cut gives the same values."""
    inputs = scan_inputs(np.random.default_rng(2), 2, 240, 4, 2)
    given = {key: value.astype(np.float32) for key, value in inputs.items()}
    tensors = {key: torch.from_numpy(value) for key, value in given.items()}
    found = []
    for length in (4, 5, 16, 30, 60, 80, 120, 240):
        if form == "onnx":
            found.append(run_op("SsdBlockCommit", given, length))
        else:
            found.append([t.numpy() for t in PLAIN.ssd_commit(**tensors, block_len=length)])
    for y, state in found[1:]:
        np.testing.assert_allclose(y, found[0][0], atol=RIGHT)
        np.testing.assert_allclose(state, found[0][1], atol=RIGHT)


# --- TK-01: special ids ---------------------------------------------------------------------------


def test_TK_01_mask_against_the_other_special_ids() -> None:
    """None is asked for; a mask that also ends or begins a text is refused with the id."""
    layer = mamba_layer()
    with pytest.raises(SpecError, match="needs a mask id; give --mask-id"):
        model(layer, mask_id=None)
    with pytest.raises(SpecError, match=r"mask_id 2 is also a stop id \(2,\)"):
        model(layer, mask_id=2)
    with pytest.raises(SpecError, match="mask_id 1 is also the bos_id"):
        model(layer, mask_id=1, bos_id=1)
    with pytest.raises(SpecError, match=r"mask_id 40 is outside 0..39"):
        model(layer, mask_id=40)
    model(layer, mask_id=39, bos_id=2, stop_ids=(2,))  # begin may be end, mask may be padding


def test_TK_01_a_request_cannot_make_the_mask_an_end() -> None:
    """Stop ids of a request are checked like those of the model."""
    engine = ScriptedEngine(small_spec())
    with pytest.raises(UsageError, match="stop ids: id 36 at place 0 is the mask"):
        decode(engine, max_new_tokens=8, stop_ids=(36,))
    with pytest.raises(UsageError, match=r"stop ids: id 37 at place 0 is outside .* 0..36"):
        decode(engine, max_new_tokens=8, stop_ids=(37,))
    assert engine.denoised == 0


# --- TK-03: rows that are no tokens ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_TK_03_padded_rows_are_never_produced(temperature: float) -> None:
    """37 tokens in 40 rows, row 38 at +100: the best real id, and only real ids when sampling."""
    spec = small_spec(stop_ids=())

    def table(history: list[int], ids: np.ndarray) -> np.ndarray:
        out = one_hot(spec, np.arange(8), gain=3.0)
        out[:, 38] = 100.0
        return out

    for seed in range(10):
        found = decode(
            ScriptedEngine(spec, table), max_new_tokens=16, temperature=temperature, seed=seed
        )
        assert len(found.token_ids) == 16
        assert all(token < 36 for token in found.token_ids)  # 36 is the mask
        if not temperature:
            assert found.token_ids == (*range(8), *range(8))


# --- TK-04: masks from lengths --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F2", "F3", "F4"])
def test_TK_04_an_end_inside_a_prompt_is_a_token_like_any_other(
    bundle_path: Callable[[str], Path], name: str
) -> None:
    """Rows full of the end id beside shorter ones: each decodes as it does alone."""
    decoder = load(bundle_path(name), threads=1, slots=3)
    settings = Settings(max_new_tokens=16, stop_ids=())
    prompts = [[5, 2, 7, 2, 2, 9, 2, 2, 2, 11, 2], [2] * 16, [4, 6]]
    requests = [Request(prompt, settings) for prompt in prompts]
    together = decoder.generate(requests)
    for request, result in zip(requests, together, strict=True):
        assert result.token_ids == decoder.generate([request])[0].token_ids


@pytest.mark.parametrize("name", ["F3", "F4"])
def test_TK_04_an_end_inside_a_row_is_attended_to(
    bundle_path: Callable[[str], Path], checkpoint_path: Callable[[str], Path], name: str
) -> None:
    """Judged by the loops, which know no special ids."""
    spec = MODELS[name]
    engine = open_engine(Bundle.open(bundle_path(name)), threads=1, slots=1)
    judge = ReferenceModel(spec, load_checkpoint(checkpoint_path(name)).tensors)
    row, canvas = tokens_of(spec, 16), tokens_of(spec, 8, seed=1)
    row[[2, 3, 9, 15]] = spec.stop_ids[0]
    commit_row(engine, row)
    expected, _ = judge.run(np.concatenate([row, canvas]), clean=16)
    np.testing.assert_allclose(engine.denoise(canvas[None])[0], expected[-8:], atol=RIGHT)


# --- TK-05: begin tokens --------------------------------------------------------------------------

BEGIN = 1


def word_tokenizer() -> Tokenizer:
    """A word-level tokenizer that puts <s> in front of every text."""
    words = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "hello", "you"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>", "<user>", "<assistant>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return made


@pytest.mark.parametrize(
    "text",
    ["hello you", "<s> hello you", "<s> <user> hello </s> <assistant>", "<user> hello <assistant>"],
)
def test_TK_05_exactly_one_begin_token(text: str) -> None:
    """Plain text and chat templates that begin with it themselves."""
    ids = Text(word_tokenizer(), small_spec(bos_id=BEGIN, stop_ids=(2,))).encode(text)
    assert ids.count(BEGIN) == 1
    assert ids[0] == BEGIN


@pytest.mark.parametrize("prompt", [[5, 6], [1, 5, 6], [1, 1, 5, 6, 1, 1, 1, 1]])
def test_TK_05_token_ids_are_left_alone(prompt: list[int]) -> None:
    """None is added to explicit ids and none taken away."""
    engine = ScriptedEngine(small_spec(bos_id=BEGIN))
    decode(engine, prompt, max_new_tokens=16)
    assert engine.rows[0][: len(prompt)] == prompt


# --- TK-06: whose mask ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [5, 36])
def test_TK_06_the_mask_id_is_the_models(mask: int) -> None:
    """Open slots hold this model's mask, and no result does, though its logit is the highest."""
    spec = small_spec(mask_id=mask, stop_ids=())
    noise = noise_table(spec)

    def table(history: list[int], ids: np.ndarray) -> np.ndarray:
        out = noise(history, ids)
        out[:, mask] = 50.0
        return out

    engine = ScriptedEngine(spec, table)
    found = decode(engine, [3, 4, 6], max_new_tokens=13)
    assert [canvas[3:].tolist() for _, canvas in engine.log[0]] == [[mask] * 5]
    assert mask not in found.token_ids
    other = 36 if mask == 5 else 5
    free = decode(
        ScriptedEngine(spec, lambda history, ids: one_hot(spec, [other] * 8)), max_new_tokens=8
    )
    assert free.token_ids == (other,) * 8  # another model's mask is a token here


def test_TK_06_no_source_names_a_special_id() -> None:
    """Special ids are never compared with, set to or defaulted to a number in our sources."""
    special = ("mask_id", "eos", "stop_id", "bos_id", "pad_id", "pad_token", "mask_token")

    def named(node: ast.AST) -> bool:
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", "")
        return any(word in str(name).lower() for word in special)

    def number(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Constant) and type(node.value) is int

    found = []
    for folder in ("export", "runtime", "plugins", "calib", "src/fixedstate"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                pairs: list[tuple[ast.AST, ast.AST | None]] = []
                if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                    pairs = [(node.left, other) for other in node.comparators]
                    pairs += [(other, node.left) for other in node.comparators]
                elif isinstance(node, ast.Assign):
                    pairs = [(target, node.value) for target in node.targets]
                elif isinstance(node, ast.AnnAssign):
                    pairs = [(node.target, node.value)]
                elif isinstance(node, ast.keyword):
                    pairs = [(node, node.value)]
                found += [
                    f"{file.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
                    for left, right in pairs
                    if named(left) and number(right)
                ]
    assert not found
