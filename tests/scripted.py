"""F5: a scripted denoiser with the Engine protocol; logits from a function, forwards counted."""

from __future__ import annotations

import numpy as np

from fixedstate.runtime.engine import check_commit, check_denoise
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.requests import Request, Settings
from fixedstate.spec import LayerSpec, Mamba2Sizes, ModelSpec
from fixedstate.state import StateSpec

VOCAB, MASK, STOP = 37, 36, 35


def small_spec(**changes) -> ModelSpec:
    """A forward Mamba-2 of width 32 with 37 tokens in 40 rows and blocks of 8."""
    sizes = Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=4)
    values = {
        "vocab_size": VOCAB,
        "vocab_rows": 40,
        "width": 32,
        "layers": (LayerSpec("mamba2", sizes, direction="forward"),),
        "block_len": 8,
        "mask_id": MASK,
        "stop_ids": (STOP,),
    }
    return ModelSpec(**{**values, **changes})


class ScriptedEngine:
    """Logits from a table by (request, block, pass, slot); the history of every row is kept.

    `table(history, ids)` gives the (L, V) logits of one row: `history` are its committed tokens,
    `ids` its canvas. A row's request is whatever its history says, so rows may move freely.
    With `fuses` a finished block is committed in the first pass of the next one.
    """

    provider = "scripted"
    whole_blocks = True
    head = "logits"
    weights = "scripted"
    state = StateSpec(())

    def __init__(self, spec, table=None, *, slots=4, limit=None, fuses=False):
        self.spec, self.slots, self.limit, self.fuses = spec, slots, limit, fuses
        self.table = table or (lambda history, ids: names_position(spec, history))
        self.rows = [[] for _ in range(slots)]
        self.last_logits = np.zeros((slots, spec.vocab_rows if spec.logit_shift else 0))
        self.denoised, self.commits, self.fused, self.log = 0, 0, 0, []
        self.fail_at = None

    @property
    def past_length(self):
        return np.array([len(row) for row in self.rows], np.int64)

    def denoise(self, ids, first=0):
        ids = check_denoise(self.spec, self.slots, ids, first)
        self.denoised += 1
        if self.fail_at is not None and self.denoised == self.fail_at:
            raise KeyboardInterrupt
        return self._logits(ids, first)

    def _logits(self, ids, first):
        rows = [self.rows[first + r] for r in range(len(ids))]
        self.log.append([(len(row), ids[r].copy()) for r, row in enumerate(rows)])
        return np.stack([self.table(list(row), ids[r]) for r, row in enumerate(rows)]).astype(
            np.float32
        )

    def commit_denoise(self, ids, first=0):
        ids = check_denoise(self.spec, self.slots, ids, first, blocks=2)
        assert self.fuses
        length = self.spec.block_len
        self.fused += 1
        self._commit(ids[:, :length], np.full(len(ids), length), first)
        return self._logits(ids[:, length:], first)

    def commit(self, ids, commit_length, first=0):
        ids, lengths = check_commit(self.spec, self.slots, ids, commit_length, first)
        self.commits += 1
        self._commit(ids, lengths, first)

    def _commit(self, ids, lengths, first):
        for i, count in enumerate(lengths):
            row = first + i
            assert self.spec.mask_id not in ids[i, :count]
            if count and self.spec.logit_shift:
                start = (count - 1) // self.spec.block_len * self.spec.block_len
                history = [*self.rows[row], *ids[i, :start].tolist()]
                block = self.table(history, ids[i, start : start + self.spec.block_len])
                self.last_logits[row] = block[count - 1 - start]
            self.rows[row] = [*self.rows[row], *ids[i, :count].tolist()]

    def reset(self, row, room=0):
        self.rows[row] = []
        self.last_logits[row] = 0

    def move(self, source, target):
        self.rows[target] = list(self.rows[source])
        self.last_logits[target] = self.last_logits[source]

    def swap(self, row, other):
        self.rows[row], self.rows[other] = self.rows[other], self.rows[row]
        self.last_logits[[row, other]] = self.last_logits[[other, row]]

    def read(self, row):
        """A state of no ports; what a saved state of this engine restores is its history."""
        return {}

    def state_bytes(self):
        return 0

    def kv_bytes(self, past_length):
        return 0


def one_hot(spec, tokens, gain=10.0):
    """(L, V) logits whose best token of each slot is given."""
    out = np.zeros((spec.block_len, spec.vocab_rows), np.float32)
    out[np.arange(spec.block_len), tokens] = gain
    return out


def names_position(spec, history):
    """Each slot's best token says where it stands: position modulo 30."""
    return one_hot(spec, (len(history) + np.arange(spec.block_len)) % 30)


def noise_table(spec, gain=3.0):
    """Random logits that depend on history and canvas alone, as a model's do."""

    def table(history, ids):
        words = [*history, 1000, *ids.tolist()]
        rng = np.random.default_rng(np.array(words, np.uint64))
        return (rng.standard_normal((spec.block_len, spec.vocab_rows)) * gain).astype(np.float32)

    return table


def decode(engine, prompt=(), *, on_pass=None, defaults=None, **settings):
    """One request to its end."""
    return decode_all(engine, [Request(prompt, Settings(**settings))], on_pass, defaults)[0]


def decode_all(engine, requests, on_pass=None, defaults=None):
    """All requests to their ends."""
    stream = Stream(engine, requests, defaults, on_pass=on_pass)
    for _ in stream:
        pass
    return stream.results
