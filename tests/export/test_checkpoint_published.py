"""Published Mamba checkpoints: mamba_ssm and transformers folders as forward-only denoisers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sample_models import MAMBA, mamba_layer, model

from fixedstate.errors import CheckpointError
from fixedstate.export.checkpoint import Checkpoint, load_checkpoint, random_tensors
from fixedstate.export.published import pieces_of
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba1Sizes, ModelSpec
from fixedstate.state import StateSpec

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

EXPECTED = model(
    mamba_layer("forward"),
    mamba_layer("forward"),
    vocab_size=40,
    mask_id=None,
    objective="causal",
    residual_fp32=True,
    tied_embeddings=True,
)
"""F2 sizes as the published formats give them: forward, two layers, without a mask."""

HF: Config = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 2,
    "expand": 2,
    "conv_kernel": 4,
    "vocab_size": 40,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SSM: Config = {
    "d_model": 32,
    "n_layer": 2,
    "vocab_size": 40,
    "eos_token_id": 2,
    "ssm_cfg": {"layer": "Mamba2", "headdim": 8, "d_state": 8, "ngroups": 2},
}
MHA: Config = {
    "num_heads": 4,
    "num_heads_kv": 2,
    "head_dim": 8,
    "causal": True,
    "rotary_emb_dim": 8,
    "qkv_proj_bias": False,
    "out_proj_bias": False,
}


def published(spec: ModelSpec, tensors: Tensors, style: str) -> Tensors:
    """The tensors under published names, packed as there."""
    packed: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, piece in pieces_of(spec).items():
        packed.setdefault(piece.key, []).append((piece.start, tensors[name]))
    out = {}
    for key, parts in packed.items():
        name = key if key.startswith("lm_head.") else f"backbone.{key}"
        if style == "transformers":
            name = name.replace("backbone.embedding.", "backbone.embeddings.")
        out[name] = torch.cat([part for _, part in sorted(parts, key=lambda item: item[0])])
    return out


def write(
    folder: Path, config: Config, spec: ModelSpec = EXPECTED, tensors: Tensors | None = None
) -> Tensors:
    tensors = tensors or random_tensors(spec, seed=2)
    folder.mkdir(exist_ok=True)
    style = "transformers" if "model_type" in config else "mamba_ssm"
    save_file(published(spec, tensors, style), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def load(folder: Path, **options: Any) -> Checkpoint:
    return load_checkpoint(folder, **{"block_len": 8, **options})


def failure(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def same(left: Checkpoint, right: Tensors) -> bool:
    return list(left.tensors) == list(right) and all(
        torch.equal(left.tensors[name], right[name]) for name in right
    )


def ssm(**changes: Any) -> Config:
    return {**SSM, "ssm_cfg": {**SSM["ssm_cfg"], **changes}}


# --- the two formats -----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [HF, SSM], ids=["transformers", "mamba_ssm"])
def test_CK_06_both_styles_give_the_same_model(tmp_path: Path, config: Config) -> None:
    """The format is told from the keys, sizes come from the weights: one model, two spellings."""
    tensors = write(tmp_path / "c", config)
    found = load(tmp_path / "c")
    assert found.spec == EXPECTED
    assert same(found, tensors)


@pytest.mark.parametrize("config", [HF, SSM], ids=["transformers", "mamba_ssm"])
def test_either_spelling_of_the_embedding(tmp_path: Path, config: Config) -> None:
    """transformers renames it when it loads an original checkpoint; so do we, both ways."""
    tensors = write(tmp_path / "c", config)
    file = tmp_path / "c" / "model.safetensors"
    stored = load_file(file)
    for name in ("backbone.embedding.weight", "backbone.embeddings.weight", "embeddings.weight"):
        rest = {key: value for key, value in stored.items() if ".embedding" not in key}
        save_file({**rest, name: tensors["embedding.weight"]}, file)
        assert same(load(tmp_path / "c"), tensors)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_loads_by_name(tmp_path: Path, tied: bool) -> None:
    """An independent implementation writes the folder; every parameter arrives under its name."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Mamba2Config(
        num_heads=8,
        head_dim=8,
        vocab_size=40,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        n_groups=2,
        use_bias=True,
        layer_norm_epsilon=1e-6,
        time_step_limit=(0.001, 0.1) if tied else (0.0, float("inf")),
        tie_word_embeddings=tied,
    )
    oracle = transformers.Mamba2ForCausalLM(config)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    oracle.save_pretrained(tmp_path / "c")
    found = load(tmp_path / "c", mask_id=39)
    spec = found.spec
    expected = {
        name.removeprefix("backbone.")
        .replace("embeddings.", "embedding.")
        .replace("norm_f.", "norm.")
        .replace("lm_head.", "head."): tensor.detach()
        for name, tensor in oracle.named_parameters()
    }
    assert sorted(found.tensors) == sorted(expected)
    assert all(torch.equal(found.tensors[name], expected[name]) for name in expected)
    sizes = spec.layers[0].mamba2
    assert (sizes.norm_eps, spec.layers[0].norm_eps, spec.norm_eps) == (1e-6, 1e-6, 1e-6)
    assert (sizes.dt_min, sizes.dt_max) == ((0.001, 0.1) if tied else (0.0, None))
    assert (sizes.heads, sizes.head_dim, sizes.groups, sizes.d_state) == (8, 8, 2, 8)
    assert (sizes.bias, sizes.gated_norm) == (True, "after")
    assert (spec.tied_embeddings, spec.objective, spec.stop_ids) == (tied, "block", (2,))
    assert sorted(found.source.files) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("style", ["transformers", "mamba_ssm"])
def test_mamba_1_in_both_styles(tmp_path: Path, style: str) -> None:
    """Mamba-1 layers load as such; what can be done with them is the exporter's business."""
    sizes = Mamba1Sizes(d_inner=64, d_state=4, dt_rank=2, d_conv=4)
    layers = (LayerSpec("mamba1", sizes, "forward"),) * 2
    spec = model(
        *layers,
        vocab_size=40,
        mask_id=None,
        objective="causal",
        residual_fp32=True,
        tied_embeddings=True,
        stop_ids=(),
    )
    shared = {"vocab_size": 40}
    configs: dict[str, Config] = {
        "transformers": {
            **shared,
            "model_type": "mamba",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "time_step_rank": 2,
            "intermediate_size": 64,
            "expand": 2,
            # Converted folders repeat the original keys.
            "d_model": 32,
            "n_layer": 2,
            "ssm_cfg": {},
            "rms_norm": True,
        },
        "mamba_ssm": {**shared, "d_model": 32, "n_layer": 2, "ssm_cfg": {"dt_rank": "auto"}},
    }
    tensors = write(tmp_path / "c", configs[style], spec)
    found = load(tmp_path / "c")
    assert found.spec == spec
    assert same(found, tensors)


def test_a_hybrid_of_mamba_ssm(tmp_path: Path) -> None:
    """Packed queries, keys and values and packed gated MLPs are taken apart by rows."""
    attention = AttentionSizes(4, 2, 8, 8)
    mamba = LayerSpec("mamba2", MAMBA, "forward", mlp="gated", mlp_width=128)
    layers = (mamba, LayerSpec("attention", attention, "forward", "none", "gated", 128), mamba)
    spec = model(*layers, vocab_size=40, mask_id=39, residual_fp32=True)
    config = {
        **SSM,
        "n_layer": 3,
        "attn_layer_idx": [1],
        "attn_cfg": MHA,
        "d_intermediate": 100,
        "tie_embeddings": False,
    }
    tensors = write(tmp_path / "c", config, spec)
    file = tmp_path / "c" / "model.safetensors"
    stored = load_file(file)
    keys = stored["backbone.layers.1.mixer.in_proj.weight"][32:48]
    gate = stored["backbone.layers.0.mlp.fc1.weight"][128:]
    found = load(tmp_path / "c", mask_id=39)
    assert found.spec == spec
    assert same(found, tensors)
    assert torch.equal(found.tensors["layers.1.mixer.k_proj.weight"], keys)
    assert torch.equal(found.tensors["layers.0.mlp.gate_proj.weight"], gate)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_conv": 4}, "attn_cfg.d_conv 4"),
        ({"mlp_dim": 256}, "attn_cfg.mlp_dim 256"),
        ({"rotary_emb_interleaved": True}, "attn_cfg.rotary_emb_interleaved True"),
        ({"causal": False}, "attn_cfg.causal False"),
        ({"softmax_scale": 1.0}, "attn_cfg.softmax_scale 1.0"),
        ({"num_heads": 2}, "num_heads x head_dim"),
        ({"num_heads": None}, "attn_cfg.num_heads None"),
        ({"widow": 3}, "unknown keys ['widow'] in attn_cfg"),
    ],
)
def test_attention_that_is_not_plain_is_refused_by_name(
    tmp_path: Path, change: Config, words: str
) -> None:
    """A feature we would ignore changes every logit."""
    layer = LayerSpec("attention", AttentionSizes(4, 2, 8, 8), "forward")
    config = {**SSM, "n_layer": 1, "attn_layer_idx": [0], "attn_cfg": {**MHA, **change}}
    write(tmp_path / "c", config, model(layer, tied_embeddings=True))
    assert words in failure(tmp_path / "c")


def test_layer_norms_of_mamba_ssm(tmp_path: Path) -> None:
    """rms_norm false means LayerNorm with biases."""
    layer = LayerSpec("mamba2", MAMBA, "forward", norm="layer")
    spec = model(layer, tied_embeddings=True, norm="layer")
    tensors = write(tmp_path / "c", {**SSM, "n_layer": 1, "rms_norm": False}, spec)
    found = load(tmp_path / "c")
    assert same(found, tensors)
    assert found.spec.norm == found.spec.layers[0].norm == "layer"


@pytest.mark.parametrize(
    ("change", "gated_norm"),
    [({}, "after"), ({"norm_before_gate": True}, "before"), ({"rmsnorm": False}, "none")],
)
def test_gated_norms_of_mamba_ssm(tmp_path: Path, change: Config, gated_norm: str) -> None:
    """Three places of the gate, one of them without a weight."""
    layer = LayerSpec("mamba2", replace(MAMBA, gated_norm=gated_norm), "forward")
    config = {**ssm(**change), "n_layer": 1}
    write(tmp_path / "c", config, model(layer, tied_embeddings=True))
    assert load(tmp_path / "c").spec.layers[0].mamba2.gated_norm == gated_norm


def test_transformers_ignores_what_it_does_not_read(tmp_path: Path) -> None:
    """A published config states norm_before_gate; the model class gates first all the same."""
    write(tmp_path / "c", {**HF, "norm_before_gate": True})
    notes: list[str] = []
    assert load(tmp_path / "c", notes=notes.append).spec.layers[0].mamba2.gated_norm == "after"
    assert "norm_before_gate" in notes[0]


# --- ids and lengths -----------------------------------------------------------------------------


def test_a_block_length_is_never_guessed(tmp_path: Path) -> None:
    """No published config states one."""
    write(tmp_path / "c", HF)
    with pytest.raises(CheckpointError, match="expected --block-len: give one from 4 to 256"):
        load_checkpoint(tmp_path / "c")
    assert "block_len must be 4 to 256" in failure(tmp_path / "c", block_len=2)


def test_the_objective_follows_the_mask(tmp_path: Path) -> None:
    """Without a mask id nothing can be denoised."""
    write(tmp_path / "c", HF)
    assert load(tmp_path / "c").spec.objective == "causal"
    spec = load(tmp_path / "c", mask_id=39).spec
    assert (spec.objective, spec.mask_id) == ("block", 39)
    assert load(tmp_path / "c", mask_id=39, objective="causal").spec.objective == "causal"
    assert "give --mask-id" in failure(tmp_path / "c", objective="block")
    assert "expected block or causal" in failure(tmp_path / "c", objective="full")
    assert "mask_id 40 is outside 0..39" in failure(tmp_path / "c", mask_id=40)
    assert "also a stop id" in failure(tmp_path / "c", mask_id=2)


@pytest.mark.parametrize(
    ("config", "generation", "option", "expected"),
    [
        (2, None, None, (2,)),
        ([2, 3], None, None, (2, 3)),
        (None, None, None, ()),
        (2, 5, None, (5,)),
        (2, None, (), ()),
        (2, 5, (7,), (7,)),
    ],
)
def test_stop_ids(
    tmp_path: Path, config: object, generation: object, option: Any, expected: tuple[int, ...]
) -> None:
    """The generation config goes before the model config, an option before both."""
    write(tmp_path / "c", {**HF, "eos_token_id": config})
    if generation:
        file = tmp_path / "c" / "generation_config.json"
        file.write_text(json.dumps({"eos_token_id": generation}))
    assert load(tmp_path / "c", stop_ids=option).spec.stop_ids == expected


@pytest.mark.parametrize(
    ("stop", "words"), [(40, "stop_ids 40 is outside 0..39"), ("</s>", "expected an id")]
)
def test_stop_ids_that_do_not_exist(tmp_path: Path, stop: object, words: str) -> None:
    """A stop id outside the vocabulary would never stop."""
    write(tmp_path / "c", {**HF, "eos_token_id": stop})
    assert words in failure(tmp_path / "c")


@pytest.mark.parametrize("config", [HF, SSM], ids=["transformers", "mamba_ssm"])
@pytest.mark.parametrize("stated", [37, 40, None])
def test_CK_07_config_may_state_rows_or_tokens(
    tmp_path: Path, config: Config, stated: int | None
) -> None:
    """37 tokens in 40 rows: rows come from the weights, usable ids from what is stated."""
    write(tmp_path / "c", {**config, "vocab_size": stated})
    spec = load(tmp_path / "c").spec
    assert (spec.vocab_rows, spec.vocab_size) == (40, stated or 40)
    write(tmp_path / "c", {**config, "vocab_size": 41})
    message = failure(tmp_path / "c")
    assert "vocab_size 41" in message
    assert "40 rows" in message


# --- config against weights ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "both"),
    [
        ({**HF, "hidden_size": 48}, ("hidden_size 48", "32")),
        ({**HF, "num_hidden_layers": 3}, ("num_hidden_layers 3", "2 layers")),
        ({**HF, "num_heads": 4, "head_dim": 16}, ("num_heads 4", "8")),
        ({**HF, "conv_kernel": 3}, ("conv_kernel 3", "4")),
        ({**HF, "n_groups": 4}, ("n_groups x state_size 4 x 8", "16")),
        ({**HF, "state_size": 16}, ("n_groups x state_size 2 x 16", "16")),
        ({**HF, "n_groups": None, "state_size": None}, ("8 x 128", "16")),
        ({**HF, "d_model": 48}, ("d_model 48", "32")),
        ({**HF, "model_type": "mamba"}, ("model_type mamba", "mamba2")),
        ({**SSM, "d_model": 48}, ("d_model 48", "32")),
        ({**SSM, "n_layer": 3}, ("n_layer 3", "2 layers")),
        (ssm(headdim=16), ("ssm_cfg.headdim 16", "8")),
        (ssm(d_conv=3), ("ssm_cfg.d_conv 3", "4")),
        (ssm(layer="Mamba1"), ("ssm_cfg.layer Mamba1", "mamba2")),
        ({**SSM, "ssm_cfg": {"layer": "Mamba2"}}, ("1 x 128", "16")),
    ],
)
def test_CK_06_a_conflict_is_one_error_with_both_values(
    tmp_path: Path, config: Config, both: tuple[str, str]
) -> None:
    """Default sizes of another format must never stand in for the weights."""
    write(tmp_path / "c", config)
    message = failure(tmp_path / "c")
    for words in both:
        assert words in message


@pytest.mark.parametrize("dropped", ["num_heads", "head_dim", "n_groups", "state_size", "expand"])
def test_CK_06_what_the_config_leaves_out_is_in_the_weights(tmp_path: Path, dropped: str) -> None:
    """Any one size follows from the others and the shapes, never from a default."""
    write(tmp_path / "c", {key: value for key, value in HF.items() if key != dropped})
    assert load(tmp_path / "c").spec == EXPECTED


def test_CK_06_weights_of_another_format(tmp_path: Path) -> None:
    """Own names beside a published config, and the reverse."""
    tensors = write(tmp_path / "c", HF)
    file = tmp_path / "c" / "model.safetensors"
    stored = load_file(file)
    save_file(tensors, file)
    assert "hold norm.weight, a name of this package" in failure(tmp_path / "c")
    save_file(stored, file)
    own = {"format": "fixedstate", "model": EXPECTED.to_dict(), "decode": {}}
    (tmp_path / "c" / "config.json").write_text(json.dumps(own))
    assert "hold backbone.norm_f.weight" in failure(tmp_path / "c", block_len=None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ssm(layer="Mamba3"), "ssm_cfg.layer 'Mamba3'"),
        (ssm(layer=["Mamba2"]), "ssm_cfg.layer ['Mamba2']"),
        (ssm(expand=math.inf), "ssm_cfg.expand inf"),
        (ssm(d_ssm=32), "ssm_cfg.d_ssm 32"),
        (ssm(nheads=3), "unknown keys ['nheads'] in ssm_cfg"),
        (ssm(dt_limit=[0.1]), "ssm_cfg.dt_limit [0.1]"),
        (ssm(chunk_size=0), "ssm_cfg.chunk_size 0"),
        ({**SSM, "ssm_cfg": 3}, "ssm_cfg 3"),
        ({**SSM, "norm_epsilon": 1e-6}, "unknown keys ['norm_epsilon']"),
        ({**SSM, "attn_layer_idx": [2]}, "attn_layer_idx [2]"),
        ({**HF, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**HF, "use_bias": "no"}, "use_bias 'no'"),
        ({**HF, "num_heads": 0}, "num_heads 0"),
        ({**HF, "layer_norm_epsilon": "small"}, "layer_norm_epsilon 'small'"),
        ({**HF, "time_step_limit": [0.2, 0.1]}, "dt limits"),
        ({**HF, "model_type": "falcon_mamba"}, "model_type 'falcon_mamba'"),
    ],
)
def test_unsupported_features_are_refused_by_name(
    tmp_path: Path, config: Config, words: str
) -> None:
    """The key and its value stand in the message."""
    write(tmp_path / "c", config)
    assert words in failure(tmp_path / "c")


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"hidden_size": 16, "expand": 2, "head_dim": 64}, ("32", "head_dim 64")),
        ({"hidden_size": 16, "expand": 2, "n_groups": 3}, ("32", "n_groups 3")),
    ],
)
def test_CF_01_the_rule_that_failed_and_its_numbers(
    tmp_path: Path, config: Config, numbers: tuple[str, str]
) -> None:
    """Inner width 32 against heads of 64, and against 3 groups."""
    sizes = replace(MAMBA, d_inner=32, heads=4)
    write(
        tmp_path / "c",
        {"model_type": "mamba2", "tie_word_embeddings": True, **config},
        model(LayerSpec("mamba2", sizes, "forward"), width=16, tied_embeddings=True),
    )
    message = failure(tmp_path / "c")
    assert f"d_inner {numbers[0]} is not a multiple of {numbers[1]}" in message


@pytest.mark.parametrize(("inner", "loads"), [(96, True), (88, False), (80, False)])
def test_CF_03_inner_width_comes_from_the_weights(tmp_path: Path, inner: int, loads: bool) -> None:
    """expand x hidden is 80, heads x head_dim 96: weights of 96 load, others name the numbers."""
    heads = inner // 8 if inner != 96 else 3
    sizes = replace(MAMBA, d_inner=inner, heads=heads, head_dim=inner // heads, groups=1)
    spec = model(LayerSpec("mamba2", sizes, "forward"), width=40, tied_embeddings=True)
    config = {
        **HF,
        "hidden_size": 40,
        "expand": 2,
        "num_heads": 3,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "n_groups": 1,
    }
    write(tmp_path / "c", config, spec)
    if loads:
        notes: list[str] = []
        assert load(tmp_path / "c", notes=notes.append).spec.layers[0].mamba2 == sizes
        assert any("80" in note and "96" in note for note in notes)
        return
    message = failure(tmp_path / "c")
    for words in {88: ("88", "= 80", "= 96"), 80: ("80", "head_dim 32")}.get(inner, ()):
        assert words in message


def test_CF_07_a_hybrid_config_without_any_mamba_layer(tmp_path: Path) -> None:
    """Every layer in attn_layer_idx: attention alone, and no recurrent state."""
    layer = LayerSpec("attention", AttentionSizes(4, 2, 8, 8), "forward")
    spec = model(layer, layer, vocab_size=40, mask_id=39, residual_fp32=True, tied_embeddings=True)
    config = {**SSM, "attn_layer_idx": [0, 1], "attn_cfg": MHA}
    tensors = write(tmp_path / "c", config, spec)
    found = load(tmp_path / "c", mask_id=39)
    assert found.spec == spec
    assert same(found, tensors)
    assert {port.kind for port in StateSpec.of(found.spec).ports} == {"key", "value"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ssm(layer="Mamba3"), ("'Mamba3'", "Mamba1 or Mamba2")),
        (ssm(layer="m2"), ("'m2'", "Mamba1 or Mamba2")),
        ({**SSM, "attn_layer_idx": ["attention"]}, ("['attention']", "layer numbers from 0 to 1")),
        ({**SSM, "n_layer": 3}, ("n_layer 3", "2 layers")),
        ({**HF, "num_hidden_layers": 1}, ("num_hidden_layers 1", "2 layers")),
    ],
)
def test_CF_07_unknown_words_and_counts_list_what_is_allowed(
    tmp_path: Path, change: Config, words: tuple[str, str]
) -> None:
    """A layer list that is not understood is never guessed at."""
    write(tmp_path / "c", change)
    message = failure(tmp_path / "c")
    assert all(word in message for word in words)


@pytest.mark.parametrize("config", [HF, SSM], ids=["transformers", "mamba_ssm"])
def test_CF_09_the_published_chunk_size_changes_nothing(tmp_path: Path, config: Config) -> None:
    """A setting of their kernels: any positive one loads the same model, others are refused."""

    def chunked(size: Any) -> Config:
        return {**HF, "chunk_size": size} if config is HF else ssm(chunk_size=size)

    tensors = write(tmp_path / "c", config)
    for size in (1, 4, 7, 16, 31, 256):
        write(tmp_path / "c", chunked(size))
        found = load(tmp_path / "c")
        assert found.spec == EXPECTED
        assert same(found, tensors)
    for size in (0, -1, 2.5, "auto"):
        write(tmp_path / "c", chunked(size))
        assert f"chunk_size {size!r}, expected a positive int" in failure(tmp_path / "c")


def test_TK_01_mask_against_the_special_ids_of_a_published_config(tmp_path: Path) -> None:
    """Mask as end is refused with both ids; mask as pad is fine, masks come from lengths."""
    write(tmp_path / "c", {**HF, "pad_token_id": 39, "eos_token_id": 2})
    assert load(tmp_path / "c", mask_id=39).spec.mask_id == 39
    assert "mask_id 2 is also a stop id (2,)" in failure(tmp_path / "c", mask_id=2)
    assert "objective 'block' needs a mask id" in failure(tmp_path / "c", objective="block")


# --- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [HF, SSM], ids=["transformers", "mamba_ssm"])
def test_CK_10_every_published_tensor_is_required(tmp_path: Path, config: Config) -> None:
    """Delete and add one key at a time; the message spells names as the file does."""
    write(tmp_path / "c", config)
    file = tmp_path / "c" / "model.safetensors"
    stored = load_file(file)
    for name in stored:
        save_file({key: value for key, value in stored.items() if key != name}, file)
        assert name in failure(tmp_path / "c")
        save_file({**stored, f"{name}_scale": torch.ones(1)}, file)
        assert f"{name}_scale" in failure(tmp_path / "c")


def change_ties(stored: Tensors, kept: str, embedding: str) -> Tensors:
    weight = stored[embedding]
    rest = {key: value for key, value in stored.items() if key != embedding}
    if kept in ("embedding", "both"):
        rest[embedding] = weight
    if kept in ("head", "both"):
        rest["lm_head.weight"] = weight.clone()
    return rest


@pytest.mark.parametrize("config", [HF, SSM], ids=["transformers", "mamba_ssm"])
@pytest.mark.parametrize("kept", ["embedding", "head", "both"])
def test_CK_01_published_ties(tmp_path: Path, config: Config, kept: str) -> None:
    """Either end, or both if equal; never one of them with the flag false."""
    tensors = write(tmp_path / "c", config)
    file = tmp_path / "c" / "model.safetensors"
    embedding = f"backbone.embedding{'s' if config is HF else ''}.weight"
    stored = change_ties(load_file(file), kept, embedding)
    save_file(stored, file)
    assert same(load(tmp_path / "c"), tensors)
    flag = "tie_word_embeddings" if config is HF else "tie_embeddings"
    (tmp_path / "c" / "config.json").write_text(json.dumps({**config, flag: False}))
    if kept != "both":
        assert "not tied" in failure(tmp_path / "c")
        return
    assert not load(tmp_path / "c").spec.tied_embeddings
    (tmp_path / "c" / "config.json").write_text(json.dumps({**config, flag: True}))
    save_file({**stored, "lm_head.weight": stored["lm_head.weight"] + 1}, file)
    assert "differ" in failure(tmp_path / "c")


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.module."])
def test_CK_08_wrapped_published_names(tmp_path: Path, prefix: str) -> None:
    """Wrappers are reported; backbone belongs to the format and is not."""
    tensors = write(tmp_path / "c", SSM)
    file = tmp_path / "c" / "model.safetensors"
    save_file({prefix + name: value for name, value in load_file(file).items()}, file)
    notes: list[str] = []
    assert same(load(tmp_path / "c", notes=notes.append), tensors)
    assert notes == [f"removed the wrapper prefix {prefix!r} from {len(tensors)} tensor names"]


@pytest.mark.parametrize("shape", [(96, 1, 4), (96, 4), (96, 4, 1)], ids=["d1k", "dk", "dk1"])
def test_CK_09_published_convolution_layouts(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Converted folders store (D, K, 1)."""
    tensors = write(tmp_path / "c", HF)
    file = tmp_path / "c" / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith("conv1d.weight")]:
        stored[name] = stored[name].reshape(shape)
    save_file(stored, file)
    assert same(load(tmp_path / "c"), tensors)


@pytest.mark.parametrize(
    ("stated", "limits"),
    [
        (None, (0.0, None)),
        ([0.0, {"__float__": "Infinity"}], (0.0, None)),
        ([0.0, math.inf], (0.0, None)),
        ([-math.inf, 0.5], (0.0, 0.5)),
        ([0.001, 0.1], (0.001, 0.1)),
    ],
)
@pytest.mark.parametrize(
    "config", [lambda limit: {**HF, "time_step_limit": limit}, lambda limit: ssm(dt_limit=limit)]
)
def test_limits_of_dt(
    tmp_path: Path, config: Callable[[Any], Config], stated: Any, limits: tuple[float, float | None]
) -> None:
    """Infinity has two spellings in JSON, and means no limit."""
    write(tmp_path / "c", config(stated))
    sizes = load(tmp_path / "c").spec.layers[0].mamba2
    assert (sizes.dt_min, sizes.dt_max) == limits
