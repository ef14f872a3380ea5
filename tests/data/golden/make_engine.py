"""Make the golden engine of the schema that this checkout writes; run once per schema.

    PYTHONPATH=tests .venv/bin/python tests/data/golden/make_engine.py

A golden engine that is there is never replaced: it must open for ever. Its manifest is a true one;
its plans are lines of text, since a TensorRT plan of even a tiny model has megabytes of kernels.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sample_engine import (
    LEVELS,
    PYTHON,
    identity_of,
    plans_of,
    precision_of,
    profile_of,
    write_placeholder_bundle,
)

from fixedstate.runtime.enginefile import write_engine
from fixedstate.runtime.identity import SCHEMA

ROLES = ("commit", "denoise", "denoise_top_k")

CHECK = {
    "kind": "fp16 graphs in ONNX Runtime on the CPU, in float32 rounded by pairs of casts",
    "reference": "the bundle's float32 graphs in ONNX Runtime on the CPU",
    "passed": True,
    "graphs": list(ROLES),
    "tokens": "text",
    "blocks": 4,
    "comparisons": 76,
    "worst": {
        "place": "block 3, state",
        "port": "ssm_state_001, row 0",
        "max_abs": 0.0248,
        "max_rel": 0.0481,
        "rms_rel": 0.00114,
        "peak_rel": 0.00149,
        "passed": True,
        "problem": "",
    },
    "largest": {"max_rel": 0.0481, "rms_rel": 0.0015, "peak_rel": 0.003},
    "beyond_deviation": 3,
    "tolerance": {"precision": "fp16", "absolute": None, "relative": 0.02, "floor": 0.0001},
}
"""What a comparison of converted graphs leaves."""


def main() -> None:
    """Write ``engine-N``."""
    folder = Path(__file__).with_name(f"engine-{SCHEMA}")
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        bundle = write_placeholder_bundle(Path(scratch, "bundle"), roles=ROLES)
        levels = [{**sizes, "n": n} for sizes, n in zip(LEVELS, (2, 4, 16), strict=True)]
        profiles = {role: (profile_of(bundle.graphs[role].inputs),) for role in ROLES}
        profiles["commit"] += (profile_of(bundle.graphs["commit"].inputs, levels),)
        identity = identity_of(
            bundle, ROLES, fp32_layers=(2,), plugins=(PYTHON,), profiles=profiles
        )
        plans = plans_of(bundle, identity)
        for plan in plans:
            (folder / plan.file).write_text(f"stand-in plan of {plan.role}\n")
        layers = {
            role: {
                "layers": {"MATRIX_MULTIPLY": 7, "PLUGIN_V3": 1},
                "plugins": ["layers.1.mixer.ssd"],
                "kernels": [["SsdBlockDenoise", 1, "plugin"]],
                "profiles": [role, *(["commit prefill"] if role == "commit" else [])],
                "steps": {"custom_layer": 1, "function": 9},
                "plan_bytes": (folder / f"{role}.plan").stat().st_size,
                "weight_bytes": 20_480,
            }
            for role in ROLES
        }
        file = Path(scratch, "layers.json")
        file.write_text(json.dumps(layers, indent=1) + "\n")
        write_engine(
            folder, bundle, identity, precision_of("fp16"), plans, check=CHECK, libraries=[file]
        )


if __name__ == "__main__":
    main()
