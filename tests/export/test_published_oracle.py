"""An independent implementation judges us: transformers' Mamba-1 and 2 against ONNX Runtime.

Nothing of this package runs the graphs here: the bundle is made and described by the command
line, and decoded through the port names of ``inspect --json`` by onnxruntime alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

from fixedstate.cli import cli

LENGTHS = (1, 15, 16, 17, 48, 257)
BLOCK_LEN = 16
VOCAB = 61


SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "state_size": 16,
    "num_hidden_layers": 2,
    "expand": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO = {"num_heads": 8, "head_dim": 8, "chunk_size": 16}
CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "plain": ("Mamba2", {**TWO, "n_groups": 1, "tie_word_embeddings": True}),
    "grouped": (
        "Mamba2",
        {
            **TWO,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_bias": True,
            "layer_norm_epsilon": 1e-3,
            "time_step_limit": (0.01, 0.3),
            "tie_word_embeddings": False,
        },
    ),
    "mamba1": ("Mamba", {}),
    "mamba1-biased": (
        "Mamba",
        {
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_rank": 5,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A random model of transformers, the folder that save_pretrained wrote, and its bundle."""
    import transformers

    kind, changes = CONFIGS[request.param]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SHARED, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "norm_f.weight", ".D")):
                weight.add_(0.1 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("published") / "model"
    model.save_pretrained(folder)
    bundle = folder.parent / "published.bundle"
    arguments = ["export", str(folder), "-o", str(bundle), "--block-len", str(BLOCK_LEN)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.stderr
    return model, folder, bundle


def decode_with_plain_onnxruntime(bundle: Path, ids: np.ndarray) -> np.ndarray:
    """Logits at every position: whole blocks committed, the rest of a block filled with id 0."""
    done = CliRunner().invoke(cli, ["inspect", str(bundle), "--json"])
    assert done.exit_code == 0, done.stderr
    ports = json.loads(done.stdout)["ports"]
    sessions = {
        role: onnxruntime.InferenceSession(bundle / f"{role}.onnx")
        for role in ("denoise", "commit")
    }
    carried = {
        port["name"]: np.zeros([1, *port["shape"][1:]], port["dtype"])
        for port in ports
        if port["graph"] == "denoise" and port["name"].startswith("past_")
    }
    logits = []
    for start in range(0, len(ids), BLOCK_LEN):
        block = np.zeros((1, BLOCK_LEN), np.int64)
        piece = ids[start : start + BLOCK_LEN]
        block[0, : len(piece)] = piece
        (out,) = sessions["denoise"].run(["logits"], {"input_ids": block, **carried})
        logits.append(out[0, : len(piece)])
        names = [p["name"] for p in ports if p["graph"] == "commit" and p["direction"] == "output"]
        feeds = {"input_ids": block, "commit_length": np.array([len(piece)]), **carried}
        made = sessions["commit"].run(names, feeds)
        carried = {
            name.replace("present_", "past_"): value
            for name, value in zip(names, made, strict=True)
        }
    return np.concatenate(logits)


def test_published_model_equals_transformers_at_every_length(published) -> None:
    """A Hugging Face folder exported with --block-len gives transformers' logits."""
    model, _, bundle = published
    rng = np.random.default_rng(0)
    worst = 0.0
    for length in LENGTHS:
        ids = rng.integers(0, VOCAB, length)
        with torch.inference_mode():
            expected = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
        found = decode_with_plain_onnxruntime(bundle, ids)
        worst = max(worst, float(np.abs(found - expected).max()))
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"length {length}")
    print(f"worst difference from transformers at lengths {LENGTHS}: {worst:.2e}")


def test_a_continuation_equals_transformers_cached_one(published) -> None:
    """Committed blocks and then one more agree with transformers' own cache."""
    model, _, bundle = published
    ids = np.random.default_rng(1).integers(0, VOCAB, 40)
    # single steps with a cache leave time_step_limit out, other than a whole pass of the same model
    limited = np.isfinite(getattr(model.config, "time_step_limit", (0, np.inf))[1])
    steps = [24, 16] if limited else [24, *[1] * 16]
    cache, logits = None, []
    with torch.inference_mode():
        for part in torch.split(torch.from_numpy(ids)[None], steps, 1):
            out = model(part, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits[0].numpy())
    found = decode_with_plain_onnxruntime(bundle, ids)
    np.testing.assert_allclose(found, np.concatenate(logits), atol=1e-4)


def test_a_model_without_mask_id_does_not_generate(published, tmp_path: Path) -> None:
    """Objective causal: commit and logits work, generate refuses with the reason."""
    _, folder, bundle = published
    done = CliRunner().invoke(cli, ["generate", str(bundle), "--prompt-ids", "1,2,3"])
    assert done.exit_code != 0
    assert "causal" in done.stderr
    assert done.stdout == ""
    refused = CliRunner().invoke(cli, ["export", str(folder), "-o", str(tmp_path / "x.bundle")])
    assert refused.exit_code == 1
    assert "--block-len" in refused.stderr
