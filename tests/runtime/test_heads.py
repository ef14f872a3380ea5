"""Graphs that give less than all scores: the same tokens, the same bytes, clear refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from sample_models import attention_layer, mamba_layer, model
from scripted import MASK, ScriptedEngine, decode_all, noise_table, small_spec

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, UsageError
from fixedstate.runtime import load
from fixedstate.runtime.compare import draw_inputs
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.memory import choose
from fixedstate.runtime.ort import open_sessions
from fixedstate.runtime.policies import FixedQuota, Reveal, Threshold, quota
from fixedstate.runtime.requests import Request, Settings
from fixedstate.runtime.sampling import (
    Scorer,
    places_of,
    scores_from_head,
    serves,
    with_first_slot,
)
from fixedstate.state import HEADS, Precision, split_role

SHIFTED = model(mamba_layer("forward"), attention_layer("forward"), logit_shift=True)
STEPPED = model(mamba_layer(), self_conditioning_width=16)
OWN = {"shifted": (SHIFTED, "top_k"), "self-conditioned": (STEPPED, "confidence")}
CASES = {"F1": "confidence", "F2-forward": "entropy", "F3": "top_k", "F4": "confidence"}


def surest(view, sureness, steps):
    """The quota of a pass, taken by a policy's own measure."""
    count = quota(view.open.sum(axis=1), steps - view.step)
    order = np.argsort(np.where(view.open, -sureness, np.inf), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    accept = view.open & (rank < count[:, None])
    return Reveal(view.fill(accept), np.zeros(len(accept), np.int64))


@dataclass(frozen=True)
class LowestEntropy:
    """Slots whose distribution is narrowest first."""

    steps: int
    monotone: ClassVar[bool] = True
    needs: ClassVar[str] = "entropy"

    def reveal(self, view):
        return surest(view, -view.scores.entropy, self.steps)


@dataclass(frozen=True)
class WidestMargin:
    """Slots whose best token is furthest before the second first."""

    steps: int
    monotone: ClassVar[bool] = True
    needs: ClassVar[str] = "top_k"

    def reveal(self, view):
        top = view.scores.top_confidence
        assert (view.scores.top_tokens[..., 0] == view.scores.tokens)[view.open].all()
        return surest(view, top[..., 0] - top[..., 1], self.steps)


@dataclass(frozen=True)
class HighestScore:
    """Slots whose best score is highest first."""

    steps: int
    monotone: ClassVar[bool] = True
    needs: ClassVar[str] = "logits"

    def reveal(self, view):
        scores = view.logits.copy()
        scores[..., view.mask_id :] = -np.inf
        return surest(view, scores.max(axis=2), self.steps)


POLICIES = (FixedQuota(3), FixedQuota(8), Threshold(0.3, 4), LowestEntropy(4), WidestMargin(4))


@pytest.fixture(scope="module", params=[*CASES, *OWN])
def exported(request, bundle_path, tmp_path_factory):
    """The folder of a bundle with a head and the fused graph, and which head."""
    if request.param in CASES:
        head = CASES[request.param]
        return bundle_path(request.param, fused=True, head=head), head
    from fixedstate.export.checkpoint_writer import save_checkpoint
    from fixedstate.export.pipeline import export_bundle
    from fixedstate.export.weights import random_tensors

    spec, head = OWN[request.param]
    root = tmp_path_factory.mktemp("own")
    save_checkpoint(root / "c", spec, random_tensors(spec, seed=4))
    export_bundle(root / "c", root / "b", head=head, top_k=3)
    return root / "b", head


def requests(spec, policy):
    """Five of mixed lengths; the answers take more than two blocks."""
    rng = np.random.default_rng(7)
    lengths = (1, 5, spec.block_len, 2 * spec.block_len + 3, 3)
    settings = Settings(2 * spec.block_len + 5, stop_ids=(), policy=policy)
    vocab = min(spec.vocab_size, spec.mask_id)
    return [Request(rng.integers(0, vocab, length), settings) for length in lengths]


def answers(folder, policies, **options):
    """Tokens of all requests by policy."""
    with load(folder, threads=1, **options) as decoder:
        return {
            policy: [one.token_ids for one in decoder.generate(requests(decoder.spec, policy))]
            for policy in policies
        }


def test_a_head_decodes_as_the_logits_do(exported):
    """Whole decodes in batches and alone, in both memory modes, with every policy it serves."""
    folder, head = exported
    served = [policy for policy in POLICIES if serves(head, policy.needs)]
    assert len(served) >= 3
    expected = answers(folder, served, slots=3)
    assert len({tuple(rows) for rows in expected.values()}) > 1  # policies do differ
    for memory in ("lean", "fast"):
        assert answers(folder, served, slots=3, memory=memory, head=head) == expected
    assert answers(folder, served[:1], head=head) == {served[0]: expected[served[0]]}


def test_rows_have_the_same_bytes_for_any_slots_and_rows(exported):
    """As many as are asked for, alone or in a batch: products of few rows change nothing."""
    folder, head = exported
    check_bytes(Bundle.open(folder), head)


def test_wide_tied_heads_have_the_same_bytes_too(tmp_path):
    """Of a width at which a back end splits its products by their size."""
    from fixedstate.bundle import DecodeDefaults, Source
    from fixedstate.export.denoiser import Denoiser
    from fixedstate.export.pipeline import write_bundle
    from fixedstate.export.stored import StoredWeights
    from fixedstate.export.weights import random_tensors
    from fixedstate.plugins.torch_ops import TRACED

    spec = model(
        mamba_layer("forward"),
        width=768,
        vocab_size=2000,
        vocab_rows=2000,
        mask_id=1999,
        block_len=32,
        tied_embeddings=True,
    )
    tensors = random_tensors(spec, seed=0)
    bundle = write_bundle(
        tmp_path,
        Denoiser(spec, tensors, ops=TRACED),
        StoredWeights(tensors, Precision()),
        ["denoise_confidence", "commit_denoise_confidence"],
        lambda _: None,
        decode=DecodeDefaults(),
        files={},
        source=Source(),
    )
    check_bytes(bundle, "confidence")


def check_bytes(bundle, head):
    """Run what a head gives of all slots, then of some of them, some rows, in another order."""
    length = bundle.spec.block_len
    roles = [role for role in bundle.graphs if split_role(role)[1] == head]
    rng = np.random.default_rng(0)
    past = rng.integers(0, 4, 5) * length
    for role, session in open_sessions(bundle, tuple(roles), threads=1).items():
        blocks = 2 if role.startswith("commit") else 1
        feeds = draw_inputs(
            session.inputs,
            rng,
            vocab=bundle.spec.vocab_size,
            past_length=past,
            commit_length=np.full(5, (blocks - 1) * length),
            B=5,
            m=blocks,
            n=blocks,
            C=256,
            R=length,
        )
        feeds["open_slots"] = np.tile(np.arange(length), (5, 1))
        whole = session.run(feeds)
        for rows in (1, 3, 5):
            for asked in {1, 2, 4, length // 4, length // 2, length - 1}:
                slots = np.stack([rng.permutation(length)[:asked] for _ in range(rows)])
                some = {name: np.ascontiguousarray(v[:rows]) for name, v in feeds.items()}
                found = session.run({**some, "open_slots": slots})
                for name, values in found.items():
                    right = whole[name][:rows]
                    if name in ("tokens", "confidence", "entropy") or name.startswith("top_"):
                        right = right[np.arange(rows)[:, None], slots]
                    assert values.tobytes() == right.tobytes(), (role, name, rows, asked)


# --- refusals -------------------------------------------------------------------------------------


REFUSED = {
    "temperature": (Settings(4, temperature=0.5), "temperature 0.5 draws from all scores"),
    "min-new-tokens": (Settings(4, min_new_tokens=2), "min_new_tokens 2 takes stop ids out"),
    "entropy": (Settings(4, policy=LowestEntropy(2)), r"LowestEntropy\(steps=2\) needs entropy"),
    "logits": (Settings(4, policy=HighestScore(2)), r"HighestScore\(steps=2\) needs logits"),
}


@pytest.fixture(scope="module")
def sure(bundle_path):
    """A decoder whose passes give confidences only."""
    with load(bundle_path("F4", fused=True, head="confidence"), head="confidence") as decoder:
        yield decoder


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_need_more_are_refused_before_any_pass(sure, case):
    """By what they need."""
    settings, what = REFUSED[case]
    with pytest.raises(UsageError, match=f"{what}.*the loaded graphs give confidence only"):
        sure.generate([Request([1, 2], settings)])
    assert sure.engine.past_length.tolist() == [0]


def test_minimum_without_stop_ids_needs_no_more(sure):
    """Nothing is taken out of the scores then."""
    settings = Settings(4, min_new_tokens=2, stop_ids=())
    assert len(sure.generate([Request([1, 2], settings)])[0].token_ids) == 4


def test_passes_of_the_other_kind_are_refused(sure, bundle_path):
    """A head gives no logits, and graphs with all scores take no places."""
    ids = np.full((1, 8), MASK)
    with pytest.raises(BackendError, match="give confidence, not all scores"):
        sure.engine.denoise(ids)
    with pytest.raises(BackendError, match="give confidence, not all scores"):
        sure.engine.commit_denoise(np.zeros((1, 16), np.int64))
    plain = open_engine(Bundle.open(bundle_path("F4")))
    with pytest.raises(BackendError, match="give all scores: load the bundle with a head"):
        plain.denoise_at(ids, np.zeros((1, 1), np.int64))
    for places in ([[8]], [[-1]], [[0] * 9], [[0], [1]], [0], [[0.5]]):
        with pytest.raises(UsageError, match="places must be"):
            sure.engine.denoise_at(ids, np.array(places))


def test_a_head_that_was_not_exported_is_refused(bundle_path):
    """With what the bundle has, and how to get the other."""
    folder = bundle_path("F4", fused=True, head="confidence")
    with pytest.raises(UsageError, match=r"has no head 'top_k' \(it has confidence\): export it"):
        load(folder, head="top_k")
    with pytest.raises(UsageError, match=r"has no head 'entropy' \(it has none\)"):
        load(bundle_path("F4"), head="entropy")
    with pytest.raises(UsageError, match="head 'all' is unknown"):
        choose(Bundle.open(folder), head="all")


def test_a_watcher_needs_all_scores(sure):
    """A recording of what was never computed would be empty."""
    with pytest.raises(UsageError, match="a watcher is shown all scores"):
        sure.generate([Request([1], Settings(2))], watcher=object())


def test_a_slot_that_is_not_finite_ends_its_row_alone(sure, monkeypatch):
    """As with logits: the error names block and pass, the other rows go on."""
    given = sure.engine.denoise_at

    def broken(ids, places, first=0):
        out = {name: values.copy() for name, values in given(ids, places, first).items()}
        if ids[0, 0] == 1:
            out["confidence"][0, -1] = np.nan
        return out

    monkeypatch.setattr(sure.engine, "denoise_at", broken)
    settings = Settings(3, stop_ids=())
    bad, good = sure.generate([Request([1], settings), Request([2], settings)])
    assert bad.finish_reason == "error"
    assert "scores are not finite in block 0, pass 0" in bad.error
    assert (good.finish_reason, len(good.token_ids)) == ("length", 3)


# --- scores ---------------------------------------------------------------------------------------


def test_a_policy_may_read_all_scores():
    """Without a head it gets the logits of the slots it sees, its own rows only."""
    spec = small_spec()
    engine = ScriptedEngine(spec, noise_table(spec), slots=3)
    some = [Request([i], Settings(12, stop_ids=(), policy=HighestScore(4))) for i in range(3)]
    mixed = [some[0], replace(some[1], settings=Settings(12, stop_ids=())), some[2]]
    alone = [decode_all(engine, [one])[0].token_ids for one in mixed]
    assert [one.token_ids for one in decode_all(engine, mixed)] == alone
    assert alone[1] != decode_all(engine, [some[1]])[0].token_ids


@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_entropy_and_best_tokens_are_of_the_distribution_chosen_from(heat):
    """Against float64, with a mask and a banned id taken out."""
    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal((2, 4, 9))).astype(np.float32)
    slots = rng.random((2, 4)) < 0.7
    banned = [(np.ones(4, np.bool_), (2,)), (np.zeros(4, np.bool_), (2,))]
    u = np.full((2, 4), 0.5)
    scores = Scorer(8, 9, [7], 3)(
        logits, slots, np.full(2, heat), u, banned, needs={"entropy", "top_k"}
    )
    exact = logits.astype(np.float64)[..., :7] / (heat or 1.0)
    exact[0, :, 2] = -np.inf
    shares = np.exp(exact - exact.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    entropy = -np.sum(shares * np.log(np.maximum(shares, 1e-300)), axis=-1)
    np.testing.assert_allclose(scores.entropy[slots], entropy[slots], rtol=1e-5)
    assert np.isinf(scores.entropy[~slots]).all()
    best = np.argsort(-shares, axis=-1, kind="stable")[..., :3]
    assert np.array_equal(scores.top_tokens[slots], best[slots])
    right = np.take_along_axis(shares, best, -1)
    np.testing.assert_allclose(scores.top_confidence[slots], right[slots], rtol=1e-5)
    assert (scores.top_confidence[~slots] == -1).all()
    assert Scorer(8, 9, [7])(logits, slots, np.zeros(2)).entropy is None


def test_sure_tokens_keep_their_order():
    """Confidences next to 1 are those of their rivals, not of a rounded sum."""
    logits = np.zeros((1, 3, 5), np.float32)
    logits[0, :, 1] = [16.0, 15.5, 15.0]
    confidence = Scorer(5, 5, [4])(logits, np.ones((1, 3), np.bool_), np.zeros(1)).confidence[0]
    rivals = 3 * np.exp(-logits[0, :, 1])
    right = np.float32(1) / (np.float32(1) + rivals)
    assert np.array_equal(confidence, right)
    assert confidence[0] > confidence[1] > confidence[2]


def test_what_a_head_gave_becomes_the_scores_of_the_slots():
    """Repeated places, rows without open slots, the first slot of a shift, a NaN in one row."""
    slots = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]], np.bool_)
    places = places_of(slots, 2)
    assert places.tolist() == [[0, 3, 3, 3], [0, 0, 0, 0], [1, 2, 3, 3]]
    given = {
        "tokens": 10 * np.arange(3)[:, None] + places,
        "confidence": (0.1 * (1 + places)).astype(np.float32),
        "entropy": places.astype(np.float32),
        "top_tokens": np.stack([places, places + 1], -1),
        "top_confidence": np.ones((3, 4, 2), np.float32),
    }
    given["confidence"][2, 1] = np.nan
    scores = scores_from_head(given, places, slots)
    assert scores.tokens.tolist() == [[0, 0, 0, 3], [0, 0, 0, 0], [0, 21, 22, 23]]
    assert scores.finite.tolist() == [True, True, False]
    assert (scores.confidence[~slots] == -1).all()
    assert np.isinf(scores.entropy[~slots]).all()
    assert scores.top_tokens[0].tolist() == [[0, 1], [0, 0], [0, 0], [3, 4]]
    one = scores.of_rows(slice(0, 1))
    first = Scorer(5, 5, [4], 2)(
        np.eye(5, dtype=np.float32)[None, 2:3], np.ones((1, 1), np.bool_), np.zeros(1), needs=HEADS
    )
    both = with_first_slot(one, first)
    assert both.tokens.tolist() == [[2, 0, 0, 3]]
    assert both.entropy[0, 0] == first.entropy[0, 0]
    assert both.top_tokens[0, :, 0].tolist() == [2, 0, 0, 3]


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_places_cover_the_open_slots_in_few_shapes(multiple):
    """For random canvases: every open slot, R a multiple or L."""
    rng = np.random.default_rng(multiple)
    for rows in (1, 2, 5):
        for _ in range(50):
            slots = rng.random((rows, 12)) < rng.random()
            places = places_of(slots, multiple)
            assert places.shape[1] % multiple == 0 or places.shape[1] == 12
            assert places.shape[1] < max(slots.sum(axis=1).max(), 1) + multiple
            for row, found in zip(slots, places, strict=True):
                wanted = set(np.flatnonzero(row).tolist())
                assert wanted <= set(found.tolist())
                assert set(found.tolist()) == (wanted or {0})


def test_heads_serve_what_they_hold():
    """All scores serve everything, everything serves confidences, no head serves another."""
    served = {(head, need) for head in HEADS for need in HEADS if serves(head, need)}
    assert served == {
        *(("logits", need) for need in HEADS),
        *((head, "confidence") for head in HEADS),
        ("entropy", "entropy"),
        ("top_k", "top_k"),
    }
