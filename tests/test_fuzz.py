"""Laws 1 to 5 on drawn models: one of each theme, a few draws each; `make fuzz` does many more."""

from __future__ import annotations

import pytest
from fuzz import drawn_specs, fuzz_one
from strategies import THEMES

DRAWS = 6
SPECS = drawn_specs(len(THEMES))


def test_every_theme_is_drawn():
    """Twelve models cover every mixer, every direction and both kinds of objective."""
    layers = [layer for spec in SPECS for layer in spec.layers]
    mixers = {layer.mixer for layer in layers}
    assert mixers >= {"mamba1", "mamba2", "attention", "linear_attention"}
    assert {layer.direction for layer in layers} == {"forward", "block", "reverse"}
    assert {spec.objective for spec in SPECS} == {"block", "full"}
    assert any(spec.logit_shift for spec in SPECS)
    assert any(spec.self_conditioning_width for spec in SPECS)
    assert any(x.mixer == "attention" and x.attention.window for x in layers)


@pytest.mark.parametrize("index", range(len(SPECS)), ids=THEMES)
def test_laws_hold_under_fuzz(index, tmp_path):
    """Cached == recomputed, denoise writes nothing, k commits == one, alone == in a batch."""
    assert fuzz_one(index, SPECS[index], DRAWS, tmp_path) >= DRAWS
