"""State without a model: what saved states are taken from and put into, without any graph."""

from __future__ import annotations

import numpy as np

from fixedstate.runtime.buffers import StateBuffers
from fixedstate.state import StateSpec

WEIGHTS = "0123456789abcdef" * 4


class Holder:
    """The part of an engine that a saved state needs: buffers of a model, and no passes."""

    whole_blocks = True

    def __init__(self, spec, precision=None, *, slots=3, limit=None, weights=WEIGHTS):
        self.spec, self.slots, self.limit, self.weights = spec, slots, limit, weights
        self.state = StateSpec.of(spec, precision)
        width = spec.vocab_rows if spec.logit_shift else 0
        self.buffers = StateBuffers(self.state, slots, spec.block_len, 0, limit, width)
        self.read, self.write = self.buffers.read, self.buffers.write

    @property
    def past_length(self):
        return self.buffers.past_length

    @property
    def last_logits(self):
        return self.buffers.last_logits

    def fill(self, row, tokens, seed=0):
        """Give a row some state of that many committed tokens."""
        rng = np.random.default_rng(seed)
        arrays = {
            port.suffix: noise(rng, port.past.resolve(B=1, C=tokens)[1:], port.past.dtype)
            for port in self.state.committed
        }
        last = noise(rng, self.last_logits.shape[1:], "float32")
        self.write(row, arrays, tokens, last)
        return self


def noise(rng, shape, dtype):
    """Finite numbers of any dtype that a port may have."""
    if dtype == "bfloat16":
        return rng.integers(0, 0x7F80, shape).astype(np.uint16)
    return rng.standard_normal(shape).astype(dtype)
