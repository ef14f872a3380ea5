"""The own checkpoint format: load exactly what the folder says, or say what is wrong."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sample_models import ATTENTION, MODELS, attention_layer, mamba_layer, model

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import CheckpointError, UsageError
from fixedstate.export import checkpoint as subject
from fixedstate.export.checkpoint import (
    Checkpoint,
    load_checkpoint,
    random_tensors,
    save_checkpoint,
    tensor_shapes,
)
from fixedstate.export.checkpoint_files import widen
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba1Sizes, ModelSpec

F2 = MODELS["F2"]
MAMBA1 = Mamba1Sizes(d_inner=32, d_state=4, dt_rank=2, d_conv=4, bias=True)


def all_kinds() -> ModelSpec:
    """Every mixer, tie, direction, bias and norm that changes the list of tensors."""
    mamba = mamba_layer().mamba2
    biased = AttentionSizes(4, 2, 8, 8, qk_norm=True, qkv_bias=True, out_bias=True)
    return model(
        mamba_layer(sizes=replace(mamba, bias=True, d_has_hdim=True)),
        mamba_layer(sizes=replace(mamba, conv_bias=False, gated_norm="none"), tied="projections"),
        mamba_layer("reverse"),
        LayerSpec("mamba1", MAMBA1),
        LayerSpec("mamba1", MAMBA1, tied="all"),
        LayerSpec("attention", biased, norm="layer"),
        LayerSpec("none", None, mlp="plain", mlp_width=16, mlp_bias=True),
        norm="layer",
    )


def write(folder: Path, spec: ModelSpec = F2, **options: object) -> dict[str, torch.Tensor]:
    tensors = random_tensors(spec, seed=1)
    save_checkpoint(folder, spec, tensors, DecodeDefaults(steps=3), **options)  # type: ignore[arg-type]
    return tensors


def rewrite(folder: Path, change: object, file: str = "model.safetensors") -> None:
    """Save the weights again after ``change(tensors)``."""
    tensors = load_file(folder / file)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / file)


def reconfigure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def same(left: Checkpoint | dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    tensors = left.tensors if isinstance(left, Checkpoint) else left
    return list(tensors) == list(right) and all(torch.equal(tensors[k], right[k]) for k in right)


def failure(folder: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- the format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", [*MODELS, "all kinds"])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, name: str, shards: int) -> None:
    """Each kind of layer has its own list of tensors."""
    spec = all_kinds() if name == "all kinds" else MODELS[name]
    tensors = write(tmp_path / "c", spec, shards=shards)
    found = load_checkpoint(tmp_path / "c")
    assert same(found, tensors)
    assert (found.spec, found.decode) == (spec, DecodeDefaults(steps=3))
    assert all(tensor.dtype == torch.float32 for tensor in found.tensors.values())


def test_the_documented_names_and_shapes() -> None:
    """The own layout is a format: a renamed tensor would orphan every saved checkpoint."""
    shapes = tensor_shapes(MODELS["F3"])
    assert shapes["layers.0.mixer.in_proj.weight"] == (2 * 64 + 2 * 2 * 8 + 8, 32)
    assert shapes["layers.0.mixer.reverse.conv1d.weight"] == (96, 1, 4)
    assert shapes["layers.1.mixer.k_proj.weight"] == (16, 32)
    assert shapes["layers.1.mlp.gate_proj.weight"] == (48, 32)
    assert "layers.2.mixer.reverse.dt_bias" in shapes
    assert "layers.2.mixer.reverse.in_proj.weight" not in shapes
    assert "layers.1.mixer.reverse.dt_bias" not in tensor_shapes(F2)
    assert shapes["head.weight"] == shapes["embedding.weight"] == (40, 32)
    assert tensor_shapes(all_kinds())["layers.0.mixer.D"] == (64,)


def test_random_weights_are_seeded_and_in_range() -> None:
    """Tests and benchmarks build on them: same seed, same bytes, and no runaway dynamics."""
    one, two = random_tensors(F2, seed=5), random_tensors(F2, seed=5)
    assert same(one, two)
    assert not same(one, random_tensors(F2, seed=6))
    decay = one["layers.0.mixer.A_log"].exp()
    step = torch.nn.functional.softplus(one["layers.0.mixer.dt_bias"])
    assert 1 <= float(decay.min()) <= float(decay.max()) <= 16
    assert 9e-4 <= float(step.min()) <= float(step.max()) <= 0.11


def test_two_folders_give_the_same_source(tmp_path: Path) -> None:
    """A bundle must not depend on where its checkpoint lay."""
    write(tmp_path / "one", shards=2)
    write(tmp_path / "two", shards=2)
    one, two = load_checkpoint(tmp_path / "one"), load_checkpoint(str(tmp_path / "two"))
    assert one.source == two.source
    assert sorted(one.source.files) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert one.source.name == ""


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("mistralai/Mamba-Codestral-7B-v0.1", "mistralai/Mamba-Codestral-7B-v0.1"),
        ("/data/models/mine", ""),
        ("./mine", ""),
        ("mine", ""),
        ("out/mine", ""),
        ("me/checkpoint-500", ""),
        ("a/b/c", ""),
        (None, ""),
    ],
)
def test_only_a_published_name_is_a_name(tmp_path: Path, stated: object, expected: str) -> None:
    """A local folder's name in a bundle would leak paths and break byte identity."""
    write(tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps({**config, "_name_or_path": stated}))
    assert load_checkpoint(tmp_path / "c").source.name == expected


def test_side_files_and_licence(tmp_path: Path) -> None:
    """Tokenizer and licence travel with the weights."""
    write(tmp_path / "c")
    for name in ("tokenizer_config.json", "NOTICE", "LICENSE.txt", "notes.txt"):
        (tmp_path / "c" / name).write_text("{}")
    (tmp_path / "c" / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\nHello\n")
    found = load_checkpoint(tmp_path / "c")
    assert list(found.tokenizer_files) == ["tokenizer_config.json"]
    assert list(found.licence_files) == ["LICENSE.txt", "NOTICE"]
    assert found.source.licence == "apache-2.0"


def test_licence_is_read_from_its_file(tmp_path: Path) -> None:
    """A folder without a model card still has a licence."""
    write(tmp_path / "c")
    (tmp_path / "c" / "LICENSE").write_text("  Apache License\n  Version 2.0, January 2004\n")
    assert load_checkpoint(tmp_path / "c").source.licence == "Apache-2.0"


def test_a_shipped_name_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name means the shipped model, a path the folder, also where both exist."""
    monkeypatch.setattr(subject, "_models", lambda: tmp_path / "models")
    (tmp_path / "models").mkdir()
    shipped = write(tmp_path / "models" / "tiny-x")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    local = random_tensors(F2, seed=9)
    save_checkpoint("tiny-x", F2, local)
    notes: list[str] = []
    found = load_checkpoint("tiny-x", notes=notes.append)
    assert same(found, shipped)
    assert found.source.name == "tiny-x"
    assert "./tiny-x" in notes[0]
    assert same(load_checkpoint("./tiny-x"), local)
    assert same(load_checkpoint(Path("tiny-x")), local)
    with pytest.raises(CheckpointError, match=r"tiny-y does not exist.*tiny-x"):
        load_checkpoint("tiny-y")


@pytest.mark.parametrize(
    ("option", "value"),
    [("block_len", 16), ("mask_id", 3), ("stop_ids", (4,)), ("objective", "causal")],
)
def test_an_option_cannot_contradict_the_config(tmp_path: Path, option: str, value: object) -> None:
    """A model has one block length and one mask; another would decode nonsense."""
    write(tmp_path / "c")
    assert f"{option}" in failure(tmp_path / "c", **{option: value})
    stated = getattr(F2, option)
    assert load_checkpoint(tmp_path / "c", **{option: stated}).spec == F2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "damaged"),
        ("[1]", "mapping"),
        ("{}", "expected format"),
        ('{"format": "other"}', "'other'"),
        ('{"format": "fixedstate", "sizes": {}}', "unknown keys ['sizes'] and lacks"),
        ('{"format": "fixedstate", "model": {"widht": 3}, "decode": {}}', "widht"),
        ('{"format": "fixedstate", "model": 3, "decode": {}}', "mapping"),
        ('{"model_type": "llama", "hidden_size": 3}', "'llama'"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, config: str, words: str) -> None:
    """Each is one line that names the file or the key."""
    write(tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text(config)
    message = failure(tmp_path / "c")
    assert words in message
    assert str(tmp_path / "c") in message


def test_layers_of_the_wrong_kind_in_the_config(tmp_path: Path) -> None:
    """A hand-edited config must not end in a traceback."""
    write(tmp_path / "c")
    reconfigure(tmp_path / "c", layers=5)
    assert "describes no model" in failure(tmp_path / "c")


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    """Missing folder, a file, an empty folder, a folder without weights."""
    assert "does not exist" in failure(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is a file" in failure(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "config.json" in failure(tmp_path / "empty")
    write(tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").rename(tmp_path / "c" / "weights.safetensors")
    assert "weights.safetensors: rename it" in failure(tmp_path / "c")
    (tmp_path / "c" / "weights.safetensors").unlink()
    assert "no weights" in failure(tmp_path / "c")


def test_saving_refuses_what_could_not_be_loaded(tmp_path: Path) -> None:
    """The writer checks by the same table as the reader, and leaves nothing behind."""
    tensors = random_tensors(F2)
    with pytest.raises(CheckpointError, match=r"missing or unknown: norm\.weight"):
        save_checkpoint(
            tmp_path / "c", F2, {k: v for k, v in tensors.items() if k != "norm.weight"}
        )
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \(3,\)"):
        save_checkpoint(tmp_path / "c", F2, {**tensors, "norm.weight": torch.ones(3)})
    wide = {**tensors, "norm.weight": torch.full((32,), 1e6)}
    with pytest.raises(CheckpointError, match=r"NaN or Inf as torch\.float16"):
        save_checkpoint(tmp_path / "c", F2, wide, dtype="float16")
    with pytest.raises(CheckpointError, match="dtype 'int8'"):
        save_checkpoint(tmp_path / "c", F2, tensors, dtype="int8")
    with pytest.raises(CheckpointError, match="shards is 0"):
        save_checkpoint(tmp_path / "c", F2, tensors, shards=0)
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        save_checkpoint(tmp_path / "c", F2, tensors, tokenizer=tmp_path / "none.json")
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path / "c", F2, tensors)
    with pytest.raises(UsageError, match="--force"):
        save_checkpoint(tmp_path / "c", F2, tensors)
    save_checkpoint(tmp_path / "c", F2, tensors, force=True)


# --- the cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
def test_CK_01_tied_weights_stored_once(tmp_path: Path, kept: str) -> None:
    """Either end may be the one that was kept; with the flag false both must be there."""
    spec = replace(F2, tied_embeddings=True)
    tensors = write(tmp_path / "c", spec)

    def keep(found: dict[str, torch.Tensor]) -> None:
        found[kept] = found.pop("embedding.weight")

    rewrite(tmp_path / "c", keep)
    assert same(load_checkpoint(tmp_path / "c"), tensors)
    reconfigure(tmp_path / "c", tied_embeddings=False)
    absent = {"embedding.weight": "head.weight", "head.weight": "embedding.weight"}[kept]
    message = failure(tmp_path / "c")
    assert absent in message
    assert "not tied" in message


def test_CK_01_tied_weights_stored_twice(tmp_path: Path) -> None:
    """Two equal copies are one tensor; two different ones contradict the flag."""
    tensors = write(tmp_path / "c", replace(F2, tied_embeddings=True))
    rewrite(tmp_path / "c", lambda t: t.update({"head.weight": t["embedding.weight"].clone()}))
    assert same(load_checkpoint(tmp_path / "c"), tensors)
    rewrite(tmp_path / "c", lambda t: t["head.weight"].add_(1))
    message = failure(tmp_path / "c")
    assert "head.weight and embedding.weight differ" in message


def test_CK_03_missing_shard(tmp_path: Path) -> None:
    """An absent shard is an incomplete download, not random weights."""
    write(tmp_path / "c", shards=2)
    (tmp_path / "c" / "model-00002-of-00002.safetensors").unlink()
    message = failure(tmp_path / "c")
    assert "model-00002-of-00002.safetensors" in message
    assert "download may be incomplete" in message


def test_CK_03_shards_without_their_index(tmp_path: Path) -> None:
    """The index is a file of the download as well."""
    write(tmp_path / "c", shards=2)
    (tmp_path / "c" / "model.safetensors.index.json").unlink()
    assert "no model.safetensors.index.json" in failure(tmp_path / "c")


def test_CK_03_index_and_files_disagree(tmp_path: Path) -> None:
    """A tensor in two shards, in the wrong one, in none, or unknown to the index."""
    folder = tmp_path / "c"
    write(folder, shards=2)
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    first, second = load_file(folder / one), load_file(folder / two)
    norm = second["norm.weight"]
    save_file({**first, "norm.weight": norm}, folder / one)
    assert f"norm.weight stands in {one} and in {two}" in failure(folder)
    rest = {name: tensor for name, tensor in second.items() if name != "norm.weight"}
    save_file(rest, folder / two)
    assert f"norm.weight stands in {one}" in failure(folder)
    save_file(first, folder / one)
    assert f"places tensor norm.weight in {two}, which does not hold it" in failure(folder)
    save_file({**second, "extra": norm.clone()}, folder / two)
    assert "nothing about it" in failure(folder)


def test_CK_03_index_beside_a_single_file(tmp_path: Path) -> None:
    """Two sets of weights in one folder: neither is guessed."""
    write(tmp_path / "c", shards=2)
    save_file({"x": torch.ones(1)}, tmp_path / "c" / "model.safetensors")
    assert "holds both" in failure(tmp_path / "c")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "x", 3])
def test_index_names_stay_in_the_folder(tmp_path: Path, shard: object) -> None:
    """A file name from a model cannot reach outside its folder."""
    write(tmp_path / "c", shards=2)
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": shard}}))
    message = failure(tmp_path / "c")
    assert repr(shard) in message
    assert "plain name" in message


def test_CK_05_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    """Every bf16 and fp16 value has one float32 value, subnormal, inf and NaN included."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    wide = widen(bits.to(torch.int16).view(torch.bfloat16))
    assert torch.equal(wide.view(torch.int32), (bits & 0xFFFF) << 16)
    half = bits.to(torch.int16).view(torch.float16)
    finite = half[torch.isfinite(half)]
    assert torch.equal(widen(finite).double(), finite.double())
    assert torch.equal(torch.isnan(widen(half)), torch.isnan(half))

    tensors = write(tmp_path / "c")

    def narrow(found: dict[str, torch.Tensor]) -> None:
        found["norm.weight"] = found["norm.weight"].bfloat16()
        found["embedding.weight"] = found["embedding.weight"].half()

    rewrite(tmp_path / "c", narrow)
    narrow(tensors)
    found = load_checkpoint(tmp_path / "c").tensors
    assert torch.equal(found["norm.weight"], tensors["norm.weight"].float())
    assert torch.equal(found["embedding.weight"], tensors["embedding.weight"].float())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_CK_05_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """One NaN weight makes every token NaN: tensor and file are named."""
    write(tmp_path / "c", dtype="bfloat16")
    rewrite(tmp_path / "c", lambda t: t["layers.0.mixer.D"][3:4].fill_(value))
    message = failure(tmp_path / "c")
    assert "layers.0.mixer.D of model.safetensors holds 1 NaN or Inf" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_CK_05_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Narrowing loses values, and quantised weights lack their scales."""
    write(tmp_path / "c")
    rewrite(tmp_path / "c", lambda t: t.update({"norm.weight": t["norm.weight"].to(dtype)}))
    message = failure(tmp_path / "c")
    assert "norm.weight of model.safetensors has dtype" in message


def test_CK_06_sizes_of_config_and_weights(tmp_path: Path) -> None:
    """A wrong width is one error with both shapes."""
    write(tmp_path / "c")
    reconfigure(tmp_path / "c", width=48)
    message = failure(tmp_path / "c")
    assert "(40, 32)" in message
    assert "(40, 48)" in message


def tokenizer(size: int, added: int = 0) -> str:
    vocabulary = {f"w{i}": i for i in range(size - added)}
    extra = [{"id": size - added + i, "content": f"<{i}>"} for i in range(added)]
    return json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": extra})


@pytest.mark.parametrize(("size", "usable"), [(30, 30), (37, 37), (40, 37), (None, 37)])
def test_CK_07_rows_and_usable_ids(tmp_path: Path, size: int | None, usable: int) -> None:
    """40 rows, 37 usable ids by the config, or fewer where the tokenizer has fewer."""
    write(tmp_path / "c")
    if size:
        (tmp_path / "c" / "tokenizer.json").write_text(tokenizer(size, added=2))
    spec = load_checkpoint(tmp_path / "c").spec
    assert (spec.vocab_rows, spec.vocab_size) == (40, usable)


def test_CK_07_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    """Ids without a row, and a stop id the tokenizer does not have, are found at load time."""
    write(tmp_path / "c")
    file = tmp_path / "c" / "tokenizer.json"
    file.write_text(tokenizer(41))
    assert "ids up to 40, the embedding has 40 rows" in failure(tmp_path / "c")
    file.write_text(tokenizer(2))
    assert "stop_ids 2 is outside 0..1" in failure(tmp_path / "c")
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git-lfs pointer" in failure(tmp_path / "c")
    file.write_text('{"model": {"vocab": {"a": "b"}}}')
    assert "is not a tokenizer" in failure(tmp_path / "c")


def test_CK_07_list_vocabularies(tmp_path: Path) -> None:
    """Unigram tokenizers list their pieces in order of their ids."""
    write(tmp_path / "c")
    data = {"model": {"type": "Unigram", "vocab": [["a", -1.0]] * 33}}
    (tmp_path / "c" / "tokenizer.json").write_text(json.dumps(data))
    assert load_checkpoint(tmp_path / "c").spec.vocab_size == 33


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "model.", "backbone.", "module._orig_mod.", "_orig_mod.model."],
)
def test_CK_08_wrapper_prefixes(tmp_path: Path, prefix: str) -> None:
    """Known wrappers are taken off and reported."""
    tensors = write(tmp_path / "c")

    def wrap(found: dict[str, torch.Tensor]) -> None:
        for name in list(found):
            found[prefix + name] = found.pop(name)

    rewrite(tmp_path / "c", wrap)
    notes: list[str] = []
    assert same(load_checkpoint(tmp_path / "c", notes=notes.append), tensors)
    assert notes == [f"removed the wrapper prefix {prefix!r} from {len(tensors)} tensor names"]


def test_CK_08_an_unknown_prefix(tmp_path: Path) -> None:
    """All names look missing and unexpected: the error shows a few of each."""
    write(tmp_path / "c")

    def wrap(found: dict[str, torch.Tensor]) -> None:
        for name in list(found):
            found[f"student.{name}"] = found.pop(name)

    rewrite(tmp_path / "c", wrap)
    message = failure(tmp_path / "c")
    assert "lacks embedding.weight" in message
    assert "student.embedding.weight" in message
    assert len(message) < 500


def test_CK_08_two_names_for_one_tensor(tmp_path: Path) -> None:
    """With and without wrapper in one file: neither is chosen."""
    write(tmp_path / "c")
    rewrite(tmp_path / "c", lambda t: t.update({"module.norm.weight": torch.ones(32)}))
    assert "are both the tensor norm.weight" in failure(tmp_path / "c")


def relay(folder: Path, shape: tuple[int, ...]) -> None:
    def change(found: dict[str, torch.Tensor]) -> None:
        for name in [name for name in found if name.endswith("conv1d.weight")]:
            found[name] = found[name].reshape(shape)

    rewrite(folder, change)


@pytest.mark.parametrize("shape", [(96, 1, 4), (96, 4), (96, 4, 1)], ids=["d1k", "dk", "dk1"])
def test_CK_09_three_layouts_of_a_convolution(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Each is told by its shape and gives the same weights."""
    tensors = write(tmp_path / "c")
    relay(tmp_path / "c", shape)
    assert same(load_checkpoint(tmp_path / "c"), tensors)


def square() -> ModelSpec:
    sizes = replace(MAMBA1, d_inner=8, d_conv=8, bias=False)
    return model(LayerSpec("mamba1", sizes))


@pytest.mark.parametrize(
    ("shape", "layout"), [((8, 8), "dk"), ((8, 8, 1), "dk1"), ((8, 1, 8), "d1k")]
)
def test_CK_09_channels_equal_to_taps(tmp_path: Path, shape: tuple[int, ...], layout: str) -> None:
    """A square weight may be transposed: it is read only as told."""
    tensors = write(tmp_path / "c", square())
    relay(tmp_path / "c", shape)
    assert same(load_checkpoint(tmp_path / "c", conv_layout=layout), tensors)
    if layout != "d1k":
        message = failure(tmp_path / "c")
        assert "cannot be told apart" in message
        assert "--conv-layout" in message


def test_CK_09_layouts_that_do_not_fit(tmp_path: Path) -> None:
    """Told layouts are checked too, and a transposed weight is no layout."""
    write(tmp_path / "c")
    assert "expected the layout dk" in failure(tmp_path / "c", conv_layout="dk")
    assert "'kd'" in failure(tmp_path / "c", conv_layout="kd")
    relay(tmp_path / "c", (4, 96))
    assert "asks for (96, 1, 4)" in failure(tmp_path / "c")
    relay(tmp_path / "c", (4, 24, 4))
    assert "expected (D, 1, K), (D, K) or (D, K, 1)" in failure(tmp_path / "c")


def test_CK_10_every_tensor_is_required(tmp_path: Path) -> None:
    """Delete one key at a time: none is replaced by ones or noise."""
    tensors = write(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, file)
        assert name in failure(tmp_path / "c")


def test_CK_10_no_tensor_is_ignored(tmp_path: Path) -> None:
    """Add one key at a time: refused, or left out with a note where that is allowed."""
    tensors = write(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    for name in tensors:
        extra = f"{name}_scale"
        save_file({**tensors, extra: torch.ones(1)}, file)
        assert f"holds {extra}" in failure(tmp_path / "c")
    notes: list[str] = []
    found = load_checkpoint(tmp_path / "c", allow_unexpected=True, notes=notes.append)
    assert same(found, tensors)
    assert notes == [f"left out the unexpected tensor {extra}"]


def test_CK_10_computed_buffers_are_left_out(tmp_path: Path) -> None:
    """Rotary frequencies are computed from the config, in every model."""
    tensors = write(tmp_path / "c", model(attention_layer(sizes=ATTENTION)))
    buffer = "layers.0.mixer.rotary_emb.inv_freq"
    rewrite(tmp_path / "c", lambda t: t.update({buffer: torch.ones(4, dtype=torch.float64)}))
    notes: list[str] = []
    assert same(load_checkpoint(tmp_path / "c", notes=notes.append), tensors)
    assert buffer in notes[0]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[: len(raw) // 2], "not a whole safetensors file"),
        (lambda raw: b"", "empty"),
        (lambda raw: POINTER, "a git-lfs pointer"),
        (lambda raw: b"<!doctype html><p>404", "a web page"),
        (lambda raw: raw[:6], "not a whole safetensors file"),
        (lambda raw: struct.pack("<Q", 2**62) + raw[8:], "not a whole safetensors file"),
        (lambda raw: raw + b"tail", "not a whole safetensors file"),
    ],
    ids=["half", "zero", "pointer", "page", "six bytes", "header length", "tail"],
)
def test_CK_11_damaged_weights(tmp_path: Path, damage: object, words: str) -> None:
    """The error says which file and its size."""
    write(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    raw = damage(file.read_bytes())  # type: ignore[operator]
    file.write_bytes(raw)
    message = failure(tmp_path / "c")
    assert f"{file} is damaged ({len(raw)} bytes, {words}" in message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"hello", "is damaged (5 bytes, not a weight file)"),
        (b"", "is damaged (0 bytes, empty"),
        (POINTER, "git-lfs pointer"),
        (b"PK\x03\x04rest", "convert to safetensors"),
        (b"\x80\x02rest", "convert to safetensors"),
    ],
)
def test_CK_11_bin_files_are_never_loaded(tmp_path: Path, raw: bytes, words: str) -> None:
    """A pickle runs code; text in its place is damage."""
    write(tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").unlink()
    (tmp_path / "c" / "pytorch_model.bin").write_bytes(raw)
    message = failure(tmp_path / "c")
    assert "pytorch_model.bin" in message
    assert words in message


def test_CK_11_damaged_index(tmp_path: Path) -> None:
    """The index is JSON with a weight map."""
    write(tmp_path / "c", shards=2)
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.write_text("{}")
    assert "no weight_map" in failure(tmp_path / "c")
    index.write_bytes(b"\xff\xfe")
    assert "is damaged (2 bytes" in failure(tmp_path / "c")
