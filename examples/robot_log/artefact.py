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
from generate import END, MASK, build_tokenizer
from safetensors.torch import load_file, save_file
from train import TRAIN_LENGTH

from fixedstate.bundle import DecodeDefaults
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba2Sizes, ModelSpec


def describe(sizes: Sizes) -> dict[str, object]:
    """The config.json of the documented own layout: ModelSpec and decode defaults."""
    tokenizer = build_tokenizer()
    spec = ModelSpec(
        vocab_size=tokenizer.get_vocab_size(),
        vocab_rows=sizes.vocab,
        width=sizes.width,
        layers=tuple(_layer(sizes, kind) for kind in sizes.layers),
        block_len=sizes.block_len,
        mask_id=tokenizer.token_to_id(MASK),
        stop_ids=(tokenizer.token_to_id(END),),
        tied_embeddings=True,
        norm_eps=sizes.norm_eps,
    )
    decode = DecodeDefaults(steps=8, train_length=TRAIN_LENGTH)
    return {"format": "fixedstate", "model": spec.to_dict(), "decode": decode.to_dict()}


def _layer(sizes: Sizes, kind: str) -> LayerSpec:
    hidden = sizes.mlp(kind)
    mixer: AttentionSizes | Mamba2Sizes
    if kind == "a":
        mixer = AttentionSizes(
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            rotary_dim=sizes.head_dim,
            rope_theta=sizes.rope_theta,
        )
    else:
        mixer = Mamba2Sizes(
            d_inner=sizes.inner,
            heads=sizes.inner // sizes.ssm_head_dim,
            head_dim=sizes.ssm_head_dim,
            d_state=sizes.d_state,
            groups=1,
            d_conv=sizes.conv_taps,
            norm_eps=sizes.norm_eps,
        )
    return LayerSpec(
        mixer="attention" if kind == "a" else "mamba2",
        sizes=mixer,
        direction="block",
        tied="none" if kind == "a" else "all",
        mlp="gated" if hidden else "none",
        mlp_width=hidden,
        norm_eps=sizes.norm_eps,
    )


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
    config = json.loads((folder / "config.json").read_text())
    model = Denoiser(next(sizes for sizes in PRESETS.values() if describe(sizes) == config))
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
