"""Reduced heads: less than all scores, of the slots asked for, and nothing else is different."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
import torch
from sample_models import (
    FULL_HEADS,
    MAMBA,
    MODELS,
    attention_layer,
    mamba_layer,
    model,
    selective_layer,
)
from torch import nn

from fixedstate.bundle import Bundle
from fixedstate.errors import ParityError, SpecError, UsageError
from fixedstate.export import layerwise, parity
from fixedstate.export.checkpoint_writer import save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.heads import head_values
from fixedstate.export.parts import parts_of
from fixedstate.export.passes import finish_with, serialised
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.trace import trace_graph
from fixedstate.export.weights import random_tensors
from fixedstate.ports import Port
from fixedstate.runtime.sampling import Scorer
from fixedstate.spec import AttentionSizes, LayerSpec, LinearAttentionSizes
from fixedstate.state import (
    HEADS,
    Precision,
    StateSpec,
    graph_ports,
    head_ports,
    head_role,
    split_role,
)

REDUCED = HEADS[1:]
WINDOW = AttentionSizes(4, 2, 8, 8, window=6, sinks=2, keys_rotated=False)

KINDS = {
    **MODELS,
    "window": model(mamba_layer(), attention_layer(sizes=WINDOW), logit_shift=True),
    "shifted": model(attention_layer("forward"), mamba_layer("forward"), logit_shift=True),
    "sidecar": model(
        attention_layer("forward"),
        selective_layer("reverse", norm="layer", norm_place="after", output_gate=True),
        commit_mask="causal",
        commit_reverse=False,
    ),
    "biased-reverse": model(mamba_layer(sizes=replace(MAMBA, bias=True)), commit_reverse=False),
    "linear": model(LayerSpec("linear_attention", LinearAttentionSizes(4, 2, 8, rotary_dim=8))),
    "self-conditioned": model(mamba_layer(), self_conditioning_width=16),
    "mlp-last": model(mamba_layer(), LayerSpec("none", None, mlp="plain", mlp_width=8)),
    "mask-inside": model(mamba_layer("forward"), mask_id=5, stop_ids=(2,)),
    "mask-beyond": model(mamba_layer("forward"), mask_id=38, vocab_size=37),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_head_gives_what_the_logits_say(name: str) -> None:
    """Softmax, entropy and best tokens of the slots asked for; states as without a head."""
    spec = KINDS[name]
    denoiser = Denoiser(spec, random_tensors(spec, seed=1), top_k=5).double()
    rng = torch.Generator().manual_seed(0)
    state = denoiser.zero_state(3, 4 * spec.block_len)
    for blocks, base in ((1, "denoise"), (1, "commit_denoise"), (3, "commit_denoise")):
        ids = torch.randint(0, spec.vocab_size, (3, blocks * spec.block_len), generator=rng)
        slots = torch.randint(0, spec.block_len, (3, 5), generator=rng)
        lengths = {"past_length": torch.zeros(3, dtype=torch.int64)}
        if base == "commit_denoise":
            clean = torch.tensor([blocks - 1, blocks, blocks - 1])
            lengths["commit_length"] = clean * spec.block_len
        whole = denoiser.passes(base, ids, state, **lengths)
        assert whole.logits is not None
        logits = whole.logits.gather(1, slots[..., None].expand(-1, -1, spec.vocab_rows)).clone()
        logits[..., spec.vocab_size :] = -torch.inf
        logits[..., spec.mask_id] = -torch.inf
        shares = logits.softmax(-1)
        for head in REDUCED:
            found = denoiser.passes(f"{base}_{head}", ids, state, open_slots=slots, **lengths)
            given = found.reduced
            ports = [port.name for port in head_ports(spec, head)]
            assert sorted(given) == sorted(ports)
            assert torch.equal(given["tokens"], logits.argmax(-1))
            torch.testing.assert_close(given["confidence"], shares.amax(-1))
            if head == "entropy":
                logs = shares.clamp(min=1e-300).log()
                torch.testing.assert_close(given["entropy"], -(shares * logs).sum(-1))
            if head == "top_k":
                best = shares.topk(5, -1)
                torch.testing.assert_close(given["top_confidence"], best.values)
                assert torch.equal(given["top_tokens"], best.indices)
            assert found.states.keys() == whole.states.keys()
            for suffix, tensor in whole.states.items():
                torch.testing.assert_close(found.states[suffix], tensor)
            assert (found.last_logits is None) == (whole.last_logits is None)
            if whole.last_logits is not None:
                torch.testing.assert_close(found.last_logits, whole.last_logits)


# --- the head alone, against the rule of the runtime ---------------------------------------------


class HeadAlone(nn.Module):
    """A graph from logits to what a head gives of them."""

    role = "head"

    def __init__(self, spec, head, top_k):
        super().__init__()
        self.denoiser = Denoiser(spec, random_tensors(spec, seed=0))
        self.head, self.top_k = head, top_k
        self.inputs = (Port("scores_in", "float32", ("B", "R", spec.vocab_rows)),)
        self.outputs = head_ports(spec, head, top_k)

    def forward(self, *tensors):
        given = head_values(self.head, *tensors, self.denoiser.spec, self.top_k)
        return tuple(given[port.name] for port in self.outputs)


def scored_by_graph(spec, head, top_k):
    """A call from logits (B, R, V) to the head's outputs by name, on ONNX Runtime."""
    graph = HeadAlone(spec, head, top_k)
    made = trace_graph(graph)
    role = head_role("denoise", head)
    finish_with(made, spec, Precision(), role, graph.inputs, graph.outputs)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(serialised(made), options)
    names = [port.name for port in graph.outputs]
    return lambda logits: dict(zip(names, session.run(names, {"scores_in": logits}), strict=True))


VOCABULARIES = {
    "mask-last": model(mamba_layer("forward")),
    "mask-inside": KINDS["mask-inside"],
    "mask-beyond": KINDS["mask-beyond"],
    "all-rows": model(mamba_layer("forward"), vocab_size=40, mask_id=7),
}


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("head", REDUCED)
def test_graph_and_runtime_score_alike(name: str, head: str) -> None:
    """Same tokens, ties to the lowest id; same confidences; what is not finite is NaN."""
    spec = VOCABULARIES[name]
    graph = scored_by_graph(spec, head, 4)
    scorer = Scorer(spec.vocab_size, spec.vocab_rows, [spec.mask_id], 4)
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, 8, spec.vocab_rows)).astype(np.float32)
    logits *= np.array([0.01, 1, 5, 20, 200, 1])[:, None, None].astype(np.float32)
    logits[5] = np.round(logits[5])  # ties, at the top too
    logits[..., spec.mask_id] = rng.choice([1e4, np.inf, -np.inf, np.nan], (6, 8))
    logits[..., spec.vocab_size :] = np.nan
    every = np.ones((6, 8), np.bool_)
    right = scorer(logits, every, np.zeros(6), needs=REDUCED)
    found = graph(logits)
    assert right.finite.all()
    assert np.array_equal(found["tokens"], right.tokens)
    np.testing.assert_allclose(found["confidence"], right.confidence, rtol=1e-6)
    sure = right.confidence > 0.999
    assert sure.any()
    assert np.array_equal(found["confidence"][sure], right.confidence[sure])
    if head == "entropy":
        np.testing.assert_allclose(found["entropy"], right.entropy, rtol=1e-5, atol=1e-6)
    if head == "top_k":
        assert np.array_equal(found["top_tokens"], right.top_tokens)
        np.testing.assert_allclose(
            found["top_confidence"], right.top_confidence, rtol=1e-5, atol=1e-30
        )
        assert np.array_equal(found["top_tokens"][..., 0], found["tokens"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_shows(bad: float) -> None:
    """In its slot alone, wherever among the allowed ids it stands; elsewhere nothing changes."""
    spec = VOCABULARIES["all-rows"]
    graph = scored_by_graph(spec, "entropy", 4)
    scorer = Scorer(spec.vocab_size, spec.vocab_rows, [spec.mask_id], 4)
    logits = np.random.default_rng(4).standard_normal((40, 3, 40)).astype(np.float32)
    clean = graph(logits)
    for place in range(40):
        logits[place, 1, place] = bad
    found = graph(logits)
    for name in ("confidence", "entropy"):
        assert np.flatnonzero(~np.isnan(found[name][:, 1])).tolist() == [spec.mask_id], name
        assert np.array_equal(found[name][:, [0, 2]], clean[name][:, [0, 2]])
    rule = scorer(logits, np.ones((40, 3), np.bool_), np.zeros(40)).finite
    assert np.array_equal(np.isfinite(found["confidence"]).all(axis=1), rule)


# --- ports and roles ------------------------------------------------------------------------------


def test_roles_of_heads_take_slots_and_give_no_logits() -> None:
    """The ports of the pass itself, then the slots; what the head gives stands for the logits."""
    spec = KINDS["shifted"]
    state = StateSpec.of(spec)
    for base in ("denoise", "commit_denoise"):
        inputs, outputs = graph_ports(spec, state, base)
        for head in REDUCED:
            role = f"{base}_{head}"
            assert split_role(f"{role}@ort-cpu") == (base, head)
            asked, given = graph_ports(spec, state, role, 3)
            assert asked == (*inputs, Port("open_slots", "int64", ("B", "R")))
            place = [port.name for port in outputs].index("logits")
            expected = (*outputs[:place], *head_ports(spec, head, 3), *outputs[place + 1 :])
            assert given == expected
    assert head_ports(spec, "top_k", 99)[-1].shape == ("B", "R", spec.vocab_size - 1)


@pytest.mark.parametrize("objective", ["full", "causal"])
def test_models_that_fill_no_blocks_have_no_heads(tmp_path, objective: str) -> None:
    """Nothing would ask for open slots."""
    spec = model(mamba_layer("forward"), objective=objective)
    with pytest.raises(SpecError, match="has no graph 'denoise_confidence'"):
        graph_ports(spec, StateSpec.of(spec), "denoise_confidence")
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=0))
    with pytest.raises(UsageError, match=f"objective '{objective}' has none"):
        export_bundle(tmp_path / "c", tmp_path / "b", head="confidence")


def test_wrong_heads_are_refused(checkpoint_path, tmp_path) -> None:
    """By name, before anything is traced."""
    with pytest.raises(UsageError, match="head 'probability' is unknown; use one of logits"):
        export_bundle(checkpoint_path("F2"), tmp_path / "b", head="probability")
    with pytest.raises(UsageError, match="top_k must be a number of tokens, 1 or more; got 0"):
        export_bundle(checkpoint_path("F2"), tmp_path / "b", head="top_k", top_k=0)
    with pytest.raises(UsageError, match="a custom module has no graphs beside"):
        export_bundle("mine:build", tmp_path / "b", head="entropy")


# --- the comparison with PyTorch ------------------------------------------------------------------


def test_heads_are_compared_and_share_the_weights(bundle_path) -> None:
    """Every role of the bundle stands in parity.json; the weights file is that without heads."""
    plain, heads = bundle_path("F3", fused=True), bundle_path("F3", fused=True, head="top_k")
    bundle = Bundle.open(heads)
    added = {"denoise_top_k", "commit_denoise_top_k"}
    assert set(bundle.graphs) == {"denoise", "commit", "commit_denoise", *added}
    assert {bundle.graphs[role].top_k for role in added} == {8}
    assert bundle.weights == Bundle.open(plain).weights
    report = (heads / "parity.json").read_text()
    assert all(f'"{role}": ' in report for role in added)


def test_a_bundle_with_another_k_opens(bundle_path, tmp_path) -> None:
    """The number of tokens stands in the ports, and in no other place."""
    graph = Bundle.open(bundle_path("F3", fused=True, head="top_k")).graphs["denoise_top_k"]
    spec = MODELS["F3"]
    listed = graph_ports(spec, StateSpec.of(spec), "denoise_top_k", 3)[1]
    assert replace(graph, outputs=listed).top_k == 3


def drawn(tokens, scores):
    """A pass that expects tokens at slots with given logits."""
    side = {"tokens": np.array([tokens])}
    return parity.Drawn("x", {}, np.zeros(1), frozenset(), side, np.array([scores], np.float32))


def test_another_token_passes_only_where_it_is_as_good() -> None:
    """By the logits, and only among ids that may be chosen; a token twice is none."""
    tolerance = parity.Tolerance.of("fp32")
    scores = [[0.0, 5.0, 5.0 - 1e-5, -np.inf], [1.0, 2.0, 1.5, -np.inf]]
    one = drawn([1, 1], scores)
    assert parity._as_chosen(one, {"tokens": np.array([[2, 1]])}, tolerance)["tokens"].tolist() == [
        [2, 1]
    ]
    for wrong in ([1, 2], [0, 1], [3, 1], [-1, 1], [9, 1]):
        found = {"tokens": np.array([wrong])}
        expected = parity._as_chosen(one, found, tolerance)
        assert expected["tokens"].tolist() == [[1, 1]]
        trial = parity.judge(parity.compare(expected, found, tolerance), {}, {}, found)
        assert [port.name for port in trial.failed] == ["tokens"]
    top = replace(one, expected={"top_tokens": np.array([[[1, 2], [1, 2]]])})
    swapped = {"top_tokens": np.array([[[2, 1], [1, 2]]])}
    assert np.array_equal(
        parity._as_chosen(top, swapped, tolerance)["top_tokens"], swapped["top_tokens"]
    )
    twice = {"top_tokens": np.array([[[2, 2], [1, 2]]])}
    assert parity._as_chosen(top, twice, tolerance)["top_tokens"].tolist() == [[[1, 2], [1, 2]]]


def test_a_wrong_head_makes_no_bundle(tmp_path, monkeypatch) -> None:
    """The second best token in the place of the best, in the traced graph alone."""
    from fixedstate.export import denoiser

    spec = model(mamba_layer("forward"))
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=0))

    def second(head, logits, spec, top_k):
        given = head_values(head, logits, spec, top_k)
        if torch.compiler.is_exporting():
            given["tokens"] = logits[..., : spec.mask_id].topk(2, -1).indices[..., 1]
        return given

    monkeypatch.setattr(denoiser, "head_values", second)
    with pytest.raises(ParityError, match="port tokens"):
        export_bundle(tmp_path / "c", tmp_path / "b", head="confidence", fused=False)
    assert not (tmp_path / "b").exists()


def test_parts_of_a_model_with_a_head(bundle_path) -> None:
    """Whatever gives less than all scores is compared where tokens are left out, not elsewhere."""
    bundle = Bundle.open(bundle_path("F3", fused=True, head="top_k"))
    parts = {part.name: part for part in parts_of(bundle.spec, True, 3)}
    reduced = {"denoise_top_k", "commit_denoise_top_k"}
    roles = {name: set(layerwise._roles(bundle, part)) for name, part in parts.items()}
    assert roles["layers.2+head"] == reduced
    assert roles["head"] == {"denoise", "denoise_top_k"}
    assert roles["layers.2"] == {"denoise", "commit", "commit_denoise"}
    assert roles["ends+layers.0+1"] == set(bundle.graphs)
    assert {part.top_k for name, part in parts.items() if part.heads} == {3}
    assert "layers.2+head" not in {part.name for part in parts_of(bundle.spec)}


@pytest.mark.slow
def test_large_models_have_heads_too(tmp_path) -> None:
    """Compared by parts: the head, and the end of the model that leaves out tokens."""
    spec = model(attention_layer("forward", FULL_HEADS))
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=0))
    report = export_bundle(
        tmp_path / "c", tmp_path / "b", head="top_k", top_k=3, fused=False, whole_up_to=0
    ).parity
    assert report["passed"]
    assert "layers.0+head" in report["parts"]
    trials = [trial["trial"] for trial in report["trials"]]
    for part in ("head", "layers.0+head", "ends+layers.0"):
        assert any(trial.startswith(f"{part} denoise_top_k") for trial in trials), part
