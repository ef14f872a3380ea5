"""A bundle without a model, a scripted decoder, and a runner of the command line."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sample_models import MODELS

import fixedstate.runtime
from fixedstate.bundle import (
    MANIFEST,
    WEIGHTS,
    Bundle,
    DecodeDefaults,
    Graph,
    Source,
    staged_folder,
)
from fixedstate.cli import cli
from fixedstate.runtime.laws import LawResult
from fixedstate.runtime.loop import Stream
from fixedstate.state import Precision, StateSpec, graph_ports

STOP = 2
LETTERS = "".join(chr(ord("a") + i) for i in range(26)) + "0123456789"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return self.err.splitlines()


@pytest.fixture(scope="session")
def run():
    """Run the command line in this process: `run("inspect", folder, "--json")`."""

    def invoke(*args, **options) -> Outcome:
        done = CliRunner().invoke(
            cli, [str(arg) for arg in args], prog_name="fixedstate", **options
        )
        return Outcome(done.exit_code, done.stdout, done.stderr)

    return invoke


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_bundle(
    folder: Path, name: str = "F3", roles=("denoise", "commit"), tokenizer=True, **changes
) -> Path:
    """A bundle that opens: right manifest, right hashes, graphs that are only bytes."""
    spec = replace(MODELS[name], **changes)
    state = StateSpec.of(spec)
    folder.mkdir(parents=True)
    graphs = {}
    for role in roles:
        content = f"graph {role}".encode()
        (folder / f"{role}.onnx").write_bytes(content)
        inputs, outputs = graph_ports(spec, state, role)
        graphs[role] = Graph(role, f"{role}.onnx", sha(content), "1.23", inputs, outputs)
    if tokenizer:
        (folder / "tokenizer.json").write_bytes(b"{}")
    weights = bytes(1000)
    (folder / WEIGHTS).write_bytes(weights)
    bundle = Bundle(
        path=folder,
        spec=spec,
        precision=Precision(),
        state=state,
        graphs=graphs,
        weights=sha(weights),
        decode=DecodeDefaults(train_length=40),
        files={"tokenizer.json": sha(b"{}")} if tokenizer else {},
        source=Source(name="tiny"),
    )
    (folder / MANIFEST).write_bytes(bundle.manifest())
    return folder


@pytest.fixture
def make_bundle(tmp_path):
    """Write a bundle: `make_bundle("name.bundle", "F2", tokenizer=False)`."""

    def make(folder: str, *args, **options) -> Path:
        return write_bundle(tmp_path / folder, *args, **options)

    return make


@pytest.fixture
def bundle(make_bundle) -> Path:
    return make_bundle("my.bundle")


def script(past: int, slot: int) -> int:
    """The token that the scripted model says at a position: a, b, c, ..., from the 20th on stop."""
    place = past + slot
    return STOP if place >= 20 else 3 + place


class ScriptedEngine:
    """Logits from a rule of position; what a failure or Ctrl-C looks like at a chosen pass."""

    limit = None
    provider = "scripted"
    fuses = False
    whole_blocks = True
    head = "logits"

    def __init__(self, spec, slots, limit=None, *, interrupt_at=None, bad_row_at=None):
        self.spec, self.slots, self.limit = spec, slots, limit
        self.past_length = np.zeros(slots, np.int64)
        self.passes = 0
        self.interrupt_at, self.bad_row_at = interrupt_at, bad_row_at

    def reset(self, slot, room=0):
        self.past_length[slot] = 0

    def move(self, source, target):
        self.past_length[target] = self.past_length[source]

    def swap(self, row, other):
        self.past_length[[row, other]] = self.past_length[[other, row]]

    def denoise(self, ids, first=0):
        if self.passes == self.interrupt_at:
            raise KeyboardInterrupt
        self.passes += 1
        rows, length = ids.shape
        logits = np.zeros((rows, length, self.spec.vocab_rows), np.float32)
        for row in range(rows):
            for slot in range(length):
                logits[row, slot, script(int(self.past_length[first + row]), slot)] = 9.0
        if self.bad_row_at is not None and self.passes == 1:
            logits[self.bad_row_at] = np.nan
        return logits

    def commit(self, ids, commit_length, first=0):
        self.past_length[first : first + len(commit_length)] += commit_length

    def state_bytes(self):
        return 1536

    def kv_bytes(self, tokens):
        return 64 * tokens


class ScriptedDecoder:
    """The decoder's surface over a scripted engine; records how it was loaded."""

    def __init__(self, bundle, slots, limit, **faults):
        self.bundle, self.spec = bundle, bundle.spec
        self.engine = ScriptedEngine(bundle.spec, slots, limit, **faults)

    def stream(self, requests, on_pass=None, watcher=None):
        return Stream(self.engine, requests, self.bundle.decode, on_pass=on_pass, load_seconds=0.25)

    def generate(self, requests, on_pass=None):
        stream = self.stream(requests, on_pass)
        list(stream)
        return stream.results


class LetterText:
    """One letter per id from 3 on, ids 0 to 2 say nothing; any other character gets some id."""

    def encode(self, text, *, goes_on=False):
        return [3 + (ord(c) - ord("a")) % 33 for c in text]

    def decode(self, ids):
        return "".join(LETTERS[i - 3] for i in ids if i >= 3)

    def incremental(self):
        return self

    def push(self, ids):
        return self.decode(ids)

    def finish(self):
        return ""


@pytest.fixture
def scripted(monkeypatch):
    """Replace the runtime by a script; the dict it yields sets faults and holds what was asked."""
    from fixedstate.runtime import text

    asked: dict = {"faults": {}}

    def load(path, *, slots=1, limit=None, **options):
        asked.update(options, path=path, slots=slots, limit=limit, loads=asked.get("loads", 0) + 1)
        return ScriptedDecoder(Bundle.open(path), slots, limit, **asked["faults"])

    monkeypatch.setattr(fixedstate.runtime, "load", load)
    monkeypatch.setattr(text.Text, "open", lambda folder: LetterText())
    return asked


@pytest.fixture
def scripted_export(monkeypatch):
    """Replace the exporter by one that writes a small bundle through the real staging folder.

    The dict it yields takes `hook`, called with the staging folder when half is written, and
    `notes`; it holds the options of the last call.
    """
    asked: dict = {"hook": lambda folder: None, "notes": (), "calls": 0}

    def export_bundle(checkpoint, out, *, notes, progress, force, **options):
        asked.update(options, checkpoint=checkpoint, force=force, calls=asked["calls"] + 1)
        progress("writing")
        for note in asked["notes"]:
            notes(note)
        with staged_folder(out, force=force) as staging:
            write_bundle(staging / "whole", "F2")
            half = sorted((staging / "whole").iterdir())
            for file in half[: len(half) // 2]:
                file.rename(staging / file.name)
            asked["hook"](staging)
            for file in half[len(half) // 2 :]:
                file.rename(staging / file.name)
            (staging / "whole").rmdir()
        parity = {"passed": True, "tolerance": 1e-4, "worst": {"logits": 2e-6}}
        return types.SimpleNamespace(bundle=Bundle.open(out), parity=parity)

    module = types.ModuleType("fixedstate.export.pipeline")
    module.export_bundle = export_bundle
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


@pytest.fixture
def laws(monkeypatch):
    """Replace the laws by a script; `passed`, `worst` and `error` say how they come out."""
    asked: dict = {"passed": True, "worst": 1e-6, "error": None, "calls": 0}

    def check_bundle(bundle, **options):
        asked.update(options, calls=asked["calls"] + 1)
        return [
            LawResult(1, "cached equals recomputed", True, 1e-7, "layer 0", "PyTorch side not run"),
            LawResult(2, "denoise writes nothing", asked["passed"], asked["worst"], "block 3", ""),
        ]

    def check_against_checkpoint(bundle, checkpoint, **options):
        from fixedstate.export.checkpoint import load_checkpoint

        load_checkpoint(str(checkpoint))
        return [LawResult(5, "PyTorch equals ONNX Runtime", True, 2e-6, "", "")]

    monkeypatch.setattr("fixedstate.runtime.laws.check_bundle", check_bundle)
    parity = types.ModuleType("fixedstate.export.parity")
    parity.check_against_checkpoint = check_against_checkpoint
    monkeypatch.setitem(sys.modules, parity.__name__, parity)
    return asked
