"""Decode from a bundle with onnxruntime and numpy alone, by the names of `inspect --json`.

    fixedstate inspect log.bundle --json > log.json
    python plain_onnxruntime.py log.bundle log.json --prompt-ids 5,6,7 --max-new-tokens 32

One row, the most likely tokens, a fixed number of passes per block: what `generate --threads 1`
does with the same ids. Nothing of fixedstate is imported. Models that need more than this program
does (shifted logits, state from pass to pass, no block decoding at all) are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

PREFILL_BLOCKS = 16  # blocks of the prompt per commit; any number gives the same up to rounding
COLUMNS = 256  # room for keys and values at first


class Row:
    """One row's carried arrays, by the part of their names behind `past_` and `present_`."""

    def __init__(self, folder: Path, about: dict) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.sessions = {
            graph["role"]: ort.InferenceSession(
                str(folder / graph["file"]), options, providers=["CPUExecutionProvider"]
            )
            for graph in about["graphs"]
        }
        self.inputs = {graph["role"]: graph["inputs"] for graph in about["graphs"]}
        # The same carried port may enter several graphs, and not every graph reads every one.
        self.ports = {
            port["name"].removeprefix("past_"): port
            for port in about["ports"]
            if port["direction"] == "input" and port["update"] is not None
        }
        self.past = 0  # committed tokens
        self.state = {name: self.zeros(name, COLUMNS) for name in self.ports}

    def zeros(self, name: str, columns: int) -> np.ndarray:
        """A port before its first token; C, the columns of keys and values, may be any number."""
        sizes = {"B": 1, "C": columns}
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in self.ports[name]["shape"]]
        return np.zeros(shape, self.ports[name]["dtype"])

    def run(self, role: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Run a graph on the inputs it has; a graph lists only those it reads."""
        known = {
            "input_ids": ids[None].astype(np.int64),
            "past_length": np.array([self.past], np.int64),
            "commit_length": np.array([len(ids)], np.int64),
            **{f"past_{name}": array for name, array in self.state.items()},
        }
        session = self.sessions[role]
        names = [output.name for output in session.get_outputs()]
        values = session.run(names, {name: known[name] for name in self.inputs[role]})
        return dict(zip(names, values, strict=True))

    def denoise(self, canvas: np.ndarray) -> np.ndarray:
        """(L, vocab_rows) scores of a block behind the committed tokens; carries nothing."""
        return self.run("denoise", canvas)["logits"][0]

    def commit(self, ids: np.ndarray) -> None:
        """Carry whole blocks of clean tokens into the state."""
        made = self.run("commit", ids)
        for name, port in self.ports.items():
            new = made[f"present_{name}"]
            if port["update"] == "append":  # only the new columns come out
                new = self.appended(name, new)
            self.state[name] = new
        self.past += len(ids)

    def appended(self, name: str, new: np.ndarray) -> np.ndarray:
        """Keys or values with the new columns behind the committed ones, room doubled if full."""
        old, end = self.state[name], self.past + new.shape[2]
        if end > old.shape[2]:
            wider = self.zeros(name, max(2 * old.shape[2], end))
            wider[:, :, : old.shape[2]] = old
            old = wider
        old[:, :, self.past : end] = new
        return old


def choose(scores: np.ndarray, model: dict) -> tuple[np.ndarray, np.ndarray]:
    """The most likely usable id of each slot, and its probability among the usable ones."""
    usable = scores[:, : model["vocab_size"]].copy()  # the columns behind are padding
    if model["mask_id"] < model["vocab_size"]:
        usable[:, model["mask_id"]] = -np.inf
    weights = np.exp(usable - usable.max(axis=1, keepdims=True))
    return usable.argmax(axis=1), 1.0 / weights.sum(axis=1).astype(np.float64)


def fill_block(row: Row, canvas: np.ndarray, model: dict, steps: int) -> None:
    """Fill the open slots in at most `steps` passes, the surest first, in equal shares."""
    for step in range(steps):
        still_open = np.flatnonzero(canvas == model["mask_id"])
        if not still_open.size:
            return
        tokens, sure = choose(row.denoise(canvas)[still_open], model)
        share = -(-still_open.size // (steps - step))
        first = np.argsort(-sure, kind="stable")[:share]
        canvas[still_open[first]] = tokens[first]


def decode(row: Row, about: dict, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The new tokens; a stop id that ended them is the last."""
    model = about["model"]
    length, mask = model["block_len"], model["mask_id"]
    steps = about["decode"]["steps"] or length
    whole = len(prompt) // length * length
    for start in range(0, whole, PREFILL_BLOCKS * length):
        row.commit(np.array(prompt[start : min(start + PREFILL_BLOCKS * length, whole)]))
    rest, answer = prompt[whole:], []
    while True:
        canvas = np.array(rest + [mask] * (length - len(rest)))
        fill_block(row, canvas, model, steps)
        for token in canvas[len(rest) :].tolist():
            answer.append(token)
            if token in model["stop_ids"] or len(answer) == max_new_tokens:
                return answer
        row.commit(canvas)
        rest = []


def too_much(about: dict) -> str:
    """What of a model this program does not do; empty where it does everything."""
    if about["model"]["objective"] != "block":
        return f"its objective is {about['model']['objective']}, not block"
    if about["model"]["logit_shift"]:
        return "its logits predict the next position"
    if any(port["scope"] == "step" for port in about["ports"]):
        return "it carries state from pass to pass"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("description", type=Path, help="what `inspect --json` printed")
    parser.add_argument("--prompt-ids", default="", help="ids such as 1,2,3")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args(argv)
    about = json.loads(args.description.read_text())
    if reason := too_much(about):
        print(f"this program cannot decode the model: {reason}", file=sys.stderr)
        return 2
    prompt = [int(word) for word in args.prompt_ids.split(",") if word]
    row = Row(args.bundle, about)
    print(",".join(map(str, decode(row, about, prompt, args.max_new_tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
