"""The shipped form of a trained denoiser: config.json, model.safetensors (fp16), tokenizer.json.

    python artefact.py hybrid models/tiny-hybrid --checkpoint run-hybrid/checkpoint.pt

Without a checkpoint only the configuration and the tokenizer are written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from denoiser import PRESETS, Denoiser, Sizes
from generate import END, MASK, PAD, UNK, build_tokenizer
from safetensors.torch import load_file, save_file
from train import TRAIN_LENGTH


def describe(sizes: Sizes) -> dict[str, object]:
    """Describe a denoiser completely: sizes, layers, special ids and what a commit pass runs."""
    tokenizer = build_tokenizer()
    layers: list[dict[str, object]] = []
    for kind in sizes.layers:
        layer: dict[str, object] = {"direction": "block", "norm": "rms"}
        if kind == "a":
            layer |= {"mixer": "attention", "heads": sizes.heads, "kv_heads": sizes.kv_heads,
                      "head_dim": sizes.head_dim, "rope_theta": sizes.rope_theta,
                      "rope_interleaved": False}  # fmt: skip
        else:
            layer |= {"mixer": "mamba2", "tied": "all", "inner": sizes.inner,
                      "heads": sizes.inner // sizes.ssm_head_dim, "head_dim": sizes.ssm_head_dim,
                      "d_state": sizes.d_state, "groups": 1, "conv": sizes.conv_taps}  # fmt: skip
        hidden = sizes.mlp(kind)
        layers.append(layer | {"mlp": "gated" if hidden else "none", "mlp_size": hidden})
    return {
        "format": "fixedstate",
        "sizes": sizes.to_dict(),
        "layers": layers,
        "objective": "block",
        "vocab_size": tokenizer.get_vocab_size(),
        "vocab_rows": sizes.vocab,
        "width": sizes.width,
        "block_len": sizes.block_len,
        "norm_eps": sizes.norm_eps,
        "tied_embeddings": True,
        "logit_shift": 0,
        "commit_reverse": True,
        "commit_mask": "block",
        "mask_id": tokenizer.token_to_id(MASK),
        "stop_ids": [tokenizer.token_to_id(END)],
        "pad_id": tokenizer.token_to_id(PAD),
        "unk_id": tokenizer.token_to_id(UNK),
        "train_length": TRAIN_LENGTH,
    }


def write(kind: str, folder: Path, checkpoint: Path | None) -> None:
    """Write an artefact folder; weights are rounded to fp16."""
    sizes = PRESETS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(describe(sizes), indent=2) + "\n")
    if checkpoint is None:
        return
    weights = torch.load(checkpoint, weights_only=True)["model"]  # noqa: TID251  own file, data only
    Denoiser(sizes).load_state_dict(weights)
    halves = {name: value.half().contiguous() for name, value in weights.items()}
    if not all(torch.isfinite(value).all() for value in halves.values()):
        raise SystemExit(f"{checkpoint}: a weight does not fit into fp16")
    save_file(halves, str(folder / "model.safetensors"))
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path) -> Denoiser:
    """Load an artefact folder; the fp16 weights run in fp32."""
    sizes = json.loads((folder / "config.json").read_text())["sizes"]
    model = Denoiser(Sizes(**sizes))
    weights = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.eval()


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=PRESETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args(argv)
    write(args.kind, args.folder, args.checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
