"""A user's own module: how it is found, what is refused, which laws it has to keep."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner
from sample_models import MODELS, attention_layer, mamba_layer, model
from torch import nn

from fixedstate.bundle import WEIGHTS, Bundle, DecodeDefaults, Source
from fixedstate.cli import cli
from fixedstate.errors import ExportError, ParityError, UsageError
from fixedstate.export.custom import (
    BuildReference,
    CustomDenoiser,
    build_reference,
    load_module,
    refuse_options,
)
from fixedstate.export.customlaws import check_module
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.parity import check_against_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.weights import random_tensors
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.laws import check_bundle


@pytest.fixture(autouse=True)
def one_thread():
    """As the export runs small models: more threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "bring_your_own" / "model.py"


@functools.cache
def example():
    """The example's code, as a module."""
    spec = importlib.util.spec_from_file_location("bring_your_own", EXAMPLE)
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    return code


class Wrapped(nn.Module):
    """The reference denoiser as a user's module would be written around it."""

    def __init__(self, spec, computed=None):
        super().__init__()
        self.spec = spec
        computed = computed or spec
        self.inner = Denoiser(computed, random_tensors(computed, seed=3))

    def denoise(self, ids, state, past_length):
        return self.inner.denoise(ids, state, past_length)

    def commit(self, ids, state, past_length, commit_length):
        lengths = {"past_length": past_length, "commit_length": commit_length}
        passed = self.inner.passes("commit", ids, state, **lengths)
        last = {} if passed.last_logits is None else {"last_logits": passed.last_logits}
        return passed.states | last


def checked(module) -> CustomDenoiser:
    denoiser = CustomDenoiser("mine:build", module)
    check_module(denoiser)
    return denoiser


def written(folder: Path, text: str, name: str = "mine.py") -> BuildReference:
    """A file of user code; `EXAMPLE` in it is the example's path."""
    file = folder / name
    file.write_text(text)
    return build_reference(f"{file}:build")


# --- the name ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model:build", "model"),
        ("pkg.sub.model:build", "pkg.sub.model"),
        ("path/to/file.py:build", "path/to/file.py"),
        ("/path/to/file.py:build", "/path/to/file.py"),
    ],
)
def test_names_of_modules(name, module):
    assert build_reference(name) == BuildReference(module, "build")


@pytest.mark.parametrize(
    "name",
    ["tiny-mamba", "folder/model", "./model", "owner/name:build", "model:", ":build", "a-b:build",
     "model:not a name", "folder/file.py", "https://host/model"],
)  # fmt: skip
def test_names_of_checkpoints(name):
    """Nothing else is taken for code."""
    assert build_reference(name) is None


def test_a_folder_of_that_name_is_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model:build").mkdir()
    assert build_reference("model:build") is None


# --- running its code ----------------------------------------------------------------------------


def test_it_is_said_before_code_runs(tmp_path):
    """Whoever reads the notes knows what is about to run."""
    ran = tmp_path / "ran"
    reference = written(
        tmp_path,
        f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nraise RuntimeError('enough')\n",
    )
    notes = []

    def note(text):
        notes.append((text, ran.exists()))

    with pytest.raises(ExportError, match="enough"):
        load_module(reference, note)
    assert notes == [(f"running code from {reference.module}", False)]
    assert ran.exists()


def test_the_current_folder_is_importable(tmp_path, monkeypatch):
    """As with `python -m`; the import path is as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pkg_of_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "model.py").write_text(EXAMPLE.read_text())
    before = list(sys.path)
    loaded = load_module(build_reference("pkg_of_mine.model:build"), print)
    assert sys.path == before
    assert list(loaded.source.files) == ["model.py"]
    assert (loaded.source.name, loaded.source.revision) == ("", "")


def test_a_file_imports_what_stands_beside_it(tmp_path):
    """As with `python path/to/file.py`."""
    (tmp_path / "beside_mine.py").write_text(EXAMPLE.read_text())
    reference = written(tmp_path, "from beside_mine import build\n")
    assert load_module(reference, print).denoiser.spec == example().SPEC


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'build' in FILE is missing, expected a callable"),
        ("build = 3", "'build' in FILE is of type int, expected a callable"),
        ("import not_there_at_all\n", "its import failed: ModuleNotFoundError: No module"),
        ("def build(x): pass", "build() failed: TypeError: build() missing 1 required"),
        ("def build(): raise ValueError('no weights')", "build() failed: ValueError: no weights"),
        ("raise SystemExit(0)", "its import failed: SystemExit: 0"),
        ("def build(): return 3", "build() gave a value of type int, expected a torch.nn.Module"),
    ],
)  # fmt: skip
def test_code_that_gives_no_module(tmp_path, text, message):
    """The user's own exception is in the message and behind it."""
    with pytest.raises(ExportError) as caught:
        load_module(written(tmp_path, text), print)
    assert message.replace("FILE", str(tmp_path / "mine.py")) in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "mine.py:build"))
    assert ("failed" in message) == (caught.value.__cause__ is not None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_thing:build", "there is no module 'no_such_thing' beside you or installed"),
        ("fixedstate.no_such:build", "there is no module 'fixedstate.no_such'"),
        ("no/such/file.py:build", "there is no file no/such/file.py"),
    ],
)
def test_modules_that_are_not_there(name, message):
    with pytest.raises(ExportError, match=re.escape(message)):
        load_module(build_reference(name), print)


# --- what it gives -------------------------------------------------------------------------------


def changed(**attributes) -> nn.Module:
    """The example with other attributes; None removes one."""
    module = example().build()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class NoCommit(nn.Module):
    spec = MODELS["F4"]

    def denoise(self, ids, state, past_length):
        raise AssertionError("never run")


def with_weight(change) -> nn.Module:
    module = example().build()
    with torch.no_grad():
        change(module)
    return module


REFUSED = {
    "no spec": (changed(spec=None), "attribute spec is missing, expected a ModelSpec"),
    "spec of another type": (changed(spec={}), "attribute spec is of type dict"),
    "no method": (NoCommit(), "no method 'commit'"),
    "full": (
        changed(spec=replace(example().SPEC, objective="full")),
        "objective 'full' has neither denoise nor commit",
    ),
    "self-conditioning": (
        changed(spec=replace(example().SPEC, self_conditioning_width=4)),
        "self_conditioning_width 4 needs state from pass to pass",
    ),
    "nothing carried": (
        changed(spec=model(mamba_layer("reverse"))),
        "no layer of spec carries anything",
    ),
    "half": (with_weight(lambda m: m.half()), "is torch.float16, expected torch.float32"),
    "double": (with_weight(lambda m: m.double()), "is torch.float64, expected torch.float32"),
    "meta": (with_weight(lambda m: m.to("meta")), "on the device meta, expected cpu"),
    "NaN": (
        with_weight(lambda m: m.embedding.weight[3].fill_(float("nan"))),
        "embedding.weight holds NaN or infinity",
    ),
    "a lock": (
        changed(lock=threading.Lock()),
        "cannot be copied, which the comparison needs: TypeError: cannot pickle",
    ),
    "loose tensor": (
        with_weight(lambda m: setattr(m.norm, "table", torch.ones(3))),
        "norm.table is a tensor that the module does not know as its own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_are_refused(case):
    module, message = REFUSED[case]
    with pytest.raises(ExportError, match=re.escape(message)):
        CustomDenoiser("mine:build", module)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        (
            "decode = 8",
            "attribute decode is of type int, expected fixedstate.bundle.DecodeDefaults",
        ),
        ("tokenizer = 8", "attribute tokenizer is of type int, expected the path"),
        ("tokenizer = 'nowhere'", "tokenizer nowhere is no tokenizer.json"),
    ],
)
def test_attributes_that_are_refused(tmp_path, attribute, message):
    with pytest.raises(ExportError, match=re.escape(message)):
        load_module(written(tmp_path, extended(attribute)), print)


def extended(*attributes: str) -> str:
    """The example with attributes more."""
    lines = [
        "from fixedstate.bundle import DecodeDefaults",
        EXAMPLE.read_text().replace("from __future__ import annotations\n", ""),
        "def build(_build=build):",
        "    m = _build()",
        *(f"    m.{attribute}" for attribute in attributes),
        "    return m",
    ]
    return "\n".join(lines)


def test_optional_attributes(tmp_path):
    """Decode defaults and a tokenizer, as a file or as its folder."""
    folder = ROOT / "export" / "models" / "tiny-mamba"
    loaded = load_module(written(tmp_path, extended("decode = DecodeDefaults(steps=4)")), print)
    assert loaded.decode == DecodeDefaults(steps=4)
    assert loaded.tokenizer_files == {}
    for path in (folder, folder / "tokenizer.json"):
        loaded = load_module(written(tmp_path, extended(f"tokenizer = {str(path)!r}")), print)
        assert loaded.tokenizer_files["tokenizer.json"] == folder / "tokenizer.json"


def test_a_tokenizer_of_another_model(tmp_path):
    """More ids than rows."""
    text = extended(f"tokenizer = {str(ROOT / 'export' / 'models' / 'tiny-mamba')!r}")
    text = text.replace("vocab_rows=257", "vocab_rows=17").replace(
        "vocab_size=256", "vocab_size=16"
    )
    with pytest.raises(ExportError, match="the model's vocabulary has 17 rows"):
        load_module(written(tmp_path, text.replace("mask_id=256", "mask_id=16")), print)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"precision": "fp16"}, "--precision fp16"),
        ({"block_len": 8}, "--block-len"),
        ({"mask_id": 0}, "--mask-id"),
        ({"conv_layout": "dk"}, "--conv-layout"),
    ],
)
def test_options_of_checkpoints_are_refused(options, flag):
    """The module says all that itself; an option that is not read would mislead."""
    reference = BuildReference("mine", "build")
    with pytest.raises(UsageError, match=flag):
        refuse_options(reference, **{"precision": "fp32", **options})
    refuse_options(reference, precision="fp32", block_len=None, allow_unexpected=False)


# --- shapes --------------------------------------------------------------------------------------


def commits(change):
    """The example, its commit's result changed."""

    class Changed(example().Model):
        def commit(self, ids, state, past_length, commit_length):
            made = super().commit(ids, state, past_length, commit_length)
            return change(made, state, commit_length)

    return Changed()


def denoises(change):
    """The example, its logits changed."""

    class Changed(example().Model):
        def denoise(self, ids, state, past_length):
            return change(super().denoise(ids, state, past_length), ids, state)

    return Changed()


def _without(made, name):
    return {key: value for key, value in made.items() if key != name}


SHAPES = {
    "logits of the vocabulary": (
        denoises(lambda y, ids, state: y[..., :256]),
        (
            "denoise of input_ids [1, 8] gave 'logits' as float32 [1, 8, 256], "
            "expected float32 [1, 8, 257]"
        ),
    ),
    "logits of half": (
        denoises(lambda y, ids, state: y.half()),
        "gave 'logits' as float16 [1, 8, 257], expected float32 [1, 8, 257]",
    ),
    "logits of one row": (
        denoises(lambda y, ids, state: y[:1]),
        (
            "denoise of input_ids [3, 8] gave 'logits' as float32 [1, 8, 257], "
            "expected float32 [3, 8, 257]"
        ),
    ),
    "no logits": (denoises(lambda y, ids, state: None), "gave no 'logits', expected float32"),
    "a state left out": (
        commits(lambda made, state, n: _without(made, "ssm_state_002")),
        "commit of input_ids [1, 8] gave no 'ssm_state_002', expected float32 [1, 4, 16, 16]",
    ),
    "a state too much": (
        commits(lambda made, state, n: {**made, "ssm_state_001": made["ssm_state_000"]}),
        "gave 'ssm_state_001', expected key_001, ssm_state_000, ssm_state_002, value_001",
    ),
    "whole cache": (
        commits(lambda made, state, n: {**made, "key_001": torch.cat([state["key_001"]] * 2, 2)}),
        "gave 'key_001' as float32 [1, 4, 32, 16], expected float32 [1, 4, 8, 16]",
    ),
    "no tensor": (
        commits(lambda made, state, n: {**made, "key_001": 3}),
        "gave 'key_001' of type int",
    ),
    "no logit shift": (
        commits(lambda made, state, n: {**made, "last_logits": torch.zeros(len(n), 257)}),
        "gave 'last_logits' (spec.logit_shift is false)",
    ),
    "two blocks only": (
        commits(lambda made, state, n: {**made, "key_001": made["key_001"][:, :, :8]}),
        (
            "commit of input_ids [3, 16] gave 'key_001' as float32 [3, 4, 8, 16], "
            "expected float32 [3, 4, 16, 16]"
        ),
    ),
    "an error of its own": (
        denoises(lambda y, ids, state: y + state["nothing"]),
        "denoise of input_ids [1, 8] failed: KeyError: 'nothing'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_that_are_refused(case):
    """Port, given and expected shape are named before anything is traced."""
    module, message = SHAPES[case]
    with pytest.raises(ExportError, match=re.escape(message)):
        checked(module)


# --- laws ----------------------------------------------------------------------------------------


def test_the_example_keeps_the_laws():
    assert checked(example().build()).spec == example().SPEC


@pytest.mark.parametrize("name", ["F2", "F2-forward", "F3", "F4", "logit-shift"])
def test_the_reference_denoiser_keeps_the_laws(name):
    """Also where attention is last, whose cache a commit pass does not see."""
    shifted = model(mamba_layer("forward"), attention_layer("forward"), logit_shift=True)
    checked(Wrapped({**MODELS, "logit-shift": shifted}[name]))


def _grown(made, state, count):
    return {**made, "ssm_state_002": made["ssm_state_002"] * 1.01}


def _forgets(made, state, count):
    kept = count[:, None, None, None] > 0
    new = made["ssm_state_000"] - 0.5 * state["ssm_state_000"]
    return {**made, "ssm_state_000": torch.where(kept, new, state["ssm_state_000"])}


def _mixes_rows(made, state, count):
    kept = count[:, None, None, None] > 0
    new = made["ssm_state_000"]
    return {**made, "ssm_state_000": torch.where(kept, new + new.mean(0), new)}


def _changes_input(made, state, count):
    state["ssm_state_000"] *= 2
    return made


class IgnoresLength(example().Model):
    """Commits everything it is given, where it commits at all."""

    def commit(self, ids, state, past_length, commit_length):
        whole = torch.full_like(commit_length, ids.shape[1])
        length = torch.where(commit_length > 0, whole, commit_length)
        return super().commit(ids, state, past_length, length)


class SeesGarbage(example().Model):
    """Takes every column of the buffers for committed."""

    def denoise(self, ids, state, past_length):
        return super().denoise(ids, state, torch.full_like(past_length, 1000))


BROKEN = {
    "random": (
        denoises(lambda y, ids, state: y + torch.rand(())),
        "the same inputs give the same bytes; logits differs by",
    ),
    "in place": (commits(_changes_input), "commit changes its input 'past_ssm_state_000' in place"),
    "empty commit": (
        commits(_grown),
        "a row whose commit_length is 0 keeps its state byte for byte",
    ),
    "length ignored": (
        IgnoresLength(),
        "what stands behind commit_length changes nothing; ",
    ),
    "garbage": (
        SeesGarbage(),
        "what stands behind past_length in a key or value buffer changes nothing; logits: differs",
    ),
    "rows": (commits(_mixes_rows), "a row gives alone what it gives beside others"),
    "forgets": (
        commits(_forgets),
        "one commit of two blocks equals two commits; ssm_state_000: differs by",
    ),
    "prefix": (
        Wrapped(
            model(mamba_layer("forward"), mamba_layer("forward")),
            computed=model(mamba_layer(tied="all"), mamba_layer(tied="all")),
        ),
        "one commit of 5 tokens and the rest equals two commits; ",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_module_that_breaks_a_law_is_refused(case):
    """The sentence says which law, which port and by how much."""
    module, message = BROKEN[case]
    with pytest.raises(ExportError, match=re.escape(message)):
        checked(module)


def test_cached_equals_recomputed():
    """The surface of the reference denoiser: recompute needs no other pass than commit, denoise."""
    denoiser = checked(example().build())
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    state, past = denoiser.zero_state(2, 32), torch.zeros(2, dtype=torch.int64)
    for block in range(3):
        piece = ids[:, 8 * block : 8 * block + 8]
        made = denoiser.commit(piece, state, past, torch.full((2,), 8))
        for name in made:
            if name.startswith(("key", "value")):
                state[name][:, :, 8 * block : 8 * block + 8] = made[name]
            else:
                state[name] = made[name]
        past = past + 8
    torch.testing.assert_close(
        denoiser.recompute(ids), denoiser.denoise(ids[:, 24:], state, past), atol=1e-5, rtol=1e-5
    )


def test_float64_judges_where_the_module_can_be_run_so():
    """A module with float32 written into it is its own judge: only the tolerance decides."""
    assert CustomDenoiser("mine:build", example().build()).double().dtype == torch.float64

    class Fixed(example().Model):
        def denoise(self, ids, state, past_length):
            return super().denoise(ids, state, past_length).float()

    before = Fixed()
    after = CustomDenoiser("mine:build", before).double()
    assert after.dtype == torch.float32
    state = after.zero_state(1, 8)
    assert {x.dtype for x in state.values()} == {torch.float32}


# --- the bundle ----------------------------------------------------------------------------------

TIED = extended(
    "decode = DecodeDefaults(steps=4)",
    "head = nn.Linear(WIDTH, SPEC.vocab_rows, bias=False)",
    "head.weight = m.embedding.weight",
)


@pytest.fixture(scope="module")
def retention(tmp_path_factory) -> tuple[Bundle, Path]:
    """The example with a head that shares the embedding, exported; and the file it is in."""
    folder = tmp_path_factory.mktemp("retention")
    reference = written(folder, TIED)
    report = export_bundle(str(reference), folder / "out")
    assert report.parity["passed"]
    return report.bundle, Path(reference.module)


def test_the_bundle_says_what_it_is(retention):
    """Decode defaults are the module's; the source has the file's hash and no path."""
    bundle, _ = retention
    assert bundle.spec == example().SPEC
    assert bundle.decode == DecodeDefaults(steps=4)
    assert list(bundle.source.files) == ["mine.py"]
    assert (bundle.source.name, bundle.source.revision) == ("", "")
    assert list(bundle.graphs) == ["commit", "denoise"]


def test_weights_keep_their_names_and_stand_there_once(retention):
    """Every parameter and buffer, one copy of a shared one, none inside the graphs."""
    bundle, _ = retention
    stored = safetensors.numpy.load_file(bundle.path / WEIGHTS)
    module = dict(example().build().named_parameters())
    module |= dict(example().build().named_buffers())
    shared = [name for name in stored if name in ("module.head.weight", "module.embedding.weight")]
    assert len(shared) == 1
    for name, array in stored.items():
        key = "embedding.weight" if name in shared else name.removeprefix("module.")
        np.testing.assert_array_equal(array, module[key].detach().numpy())
    for graph in bundle.graphs.values():
        assert (bundle.path / graph.file).stat().st_size < 40_000
    rest = {f"module.{name}" for name in module if name != "embedding.weight"}
    assert set(stored) == rest | set(shared)


def test_the_bundle_keeps_the_laws(retention):
    bundle, _ = retention
    results = check_bundle(bundle, block_counts=(1, 2, 3))
    assert [result.law for result in results if not result.passed] == []


def test_the_bundle_decodes_as_the_module(retention):
    """The tokens of the runtime's loop are those of the module's own passes, slot by slot."""
    bundle, _ = retention
    prompt = [72, 105, 33, 7, 9, 200, 13, 4, 5, 6]
    with load(bundle.path, threads=1) as decoder:
        (result,) = decoder.generate([Request(prompt, Settings(max_new_tokens=6, steps=1))])
    module = example().build().eval()
    state = {name: torch.zeros(1, 4, 16, 16) for name in ("ssm_state_000", "ssm_state_002")}
    state |= {name: torch.zeros(1, 4, 8, 16) for name in ("key_001", "value_001")}
    with torch.inference_mode():
        state |= module.commit(
            torch.tensor([prompt[:8]]), state, torch.tensor([0]), torch.tensor([8])
        )
        canvas = torch.tensor([[*prompt[8:], *[256] * 6]])
        logits = module.denoise(canvas, state, torch.tensor([8]))
    assert list(result.token_ids) == logits[0, 2:, :256].argmax(-1).tolist()


def test_two_exports_are_the_same_bytes(retention, tmp_path, monkeypatch):
    """Another folder, the module imported by name: nothing of it shows."""
    bundle, file = retention
    (tmp_path / "mine.py").write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    again = export_bundle("mine:build", tmp_path / "other").bundle
    monkeypatch.delitem(sys.modules, "mine")
    assert again.digest == bundle.digest
    assert again.weights == bundle.weights


def test_check_says_what_to_give_instead(retention):
    """A bundle of a module has no checkpoint, and a module is none."""
    bundle, _ = retention
    with pytest.raises(UsageError, match=r"from the module in mine\.py.*leave --checkpoint tiny"):
        check_against_checkpoint(bundle, "tiny-mamba")
    with pytest.raises(UsageError, match="mine:build is a module, but .* give that one"):
        check_against_checkpoint(replace(bundle, source=Source()), "mine:build")


TINY = """
import torch
from torch import nn

from fixedstate.spec import LayerSpec, Mamba1Sizes, ModelSpec


SUM = LayerSpec("mamba1", Mamba1Sizes(d_inner=16, d_state=1, dt_rank=1, d_conv=1), "forward")


class Model(nn.Module):
    spec = ModelSpec(36, 37, 16, (SUM,), block_len=4, mask_id=36)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(37, 16)

    def denoise(self, ids, state, past_length):
        x = self.embedding(ids) + state["ssm_state_000"]
        FAULT
        return x @ self.embedding.weight.T

    def commit(self, ids, state, past_length, commit_length):
        past = state["ssm_state_000"]
        there = torch.arange(ids.shape[1]) < commit_length[:, None]
        new = past + torch.where(there[..., None], self.embedding(ids), 0.0).sum(1, keepdim=True)
        return {"ssm_state_000": torch.where(commit_length[:, None, None] > 0, new, past)}


def build():
    return Model()
"""
"""A sum over everything that was committed: one number per channel is all that is carried."""


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            "x = x + 0.1 * torch.cumsum(torch.ones_like(x), 1)",
            ExportError,
            "(ai.onnx::CumSum) may not stand in the portable file",
        ),
        (
            "x = x if x.sum() > 1e6 else -x",
            ExportError,
            "graph 'denoise': cannot be traced: GuardOnDataDependentSymNode",
        ),
        (
            "x = x * (2.0 if torch.compiler.is_exporting() else 1.0)",
            ParityError,
            "the exported graphs differ from PyTorch",
        ),
    ],
    ids=["forbidden operator", "control flow", "another graph than the module"],
)
def test_modules_that_cannot_be_exported(tmp_path, fault, kind, message):
    """Nothing is left behind, and the message says why."""
    reference = written(tmp_path, TINY.replace("FAULT", fault))
    with pytest.raises(kind, match=re.escape(message)):
        export_bundle(str(reference), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


PARTS = """
        q = self.norm(self.conv(x.mT).mT).unflatten(-1, (2, 8)).transpose(1, 2)
        x = x + nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        x = torch.where(self.keep, x, x[..., self.order])
"""
BUILT = """
        self.register_buffer("keep", torch.arange(16) % 2 == 0)
        self.register_buffer("order", torch.arange(15, -1, -1))
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.RMSNorm(16)
"""


def test_ordinary_parts_of_torch_can_be_exported(tmp_path):
    """A convolution, a fused attention, buffers of other types; ragged commits, byte-exact rows."""
    text = TINY.replace("        FAULT", PARTS.strip("\n"))
    text = text.replace("nn.Embedding(37, 16)\n", f"nn.Embedding(37, 16)\n{BUILT}")
    report = export_bundle(str(written(tmp_path, text)), tmp_path / "out")
    stored = safetensors.numpy.load_file(report.bundle.path / WEIGHTS)
    assert stored["module.order"].dtype == np.int64
    assert stored["module.keep"].dtype == np.bool_
    results = check_bundle(report.bundle, block_counts=(1, 2))
    assert [result.law for result in results if not result.passed] == []


def run_cli(*words: str):
    return CliRunner().invoke(cli, words, prog_name="fixedstate")


def test_a_failed_export_says_so_in_one_line(tmp_path):
    """The user's exception is in our error; its traceback only with --debug."""
    reference = written(tmp_path, "def build():\n    raise RuntimeError('the disk is gone')\n")
    done = run_cli("export", str(reference), "-o", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        f"note: running code from {reference.module}",
        f"error: {reference}: build() failed: RuntimeError: the disk is gone (--debug shows where)",
    ]
    assert (
        "Traceback"
        in run_cli("export", str(reference), "-o", str(tmp_path / "out"), "--debug").stderr
    )
