"""`export`: what it hands to the exporter and prints of the result."""

from __future__ import annotations


def test_prints_the_path(run, tmp_path, scripted_export):
    """`$(fixedstate export ...)` is a folder name and nothing else."""
    done = run("export", "tiny-mamba", "-o", tmp_path / "out")
    assert (done.code, done.out, done.err) == (0, f"{tmp_path / 'out'}\n", "")


def test_json_says_what_was_compared(run, tmp_path, scripted_export):
    data = run("export", "tiny-mamba", "-o", tmp_path / "out", "--json").json
    assert data["path"] == str(tmp_path / "out")
    assert data["graphs"] == ["commit", "denoise"]
    assert len(data["digest"]) == 64
    assert data["parity"]["passed"] is True
    assert data["parity"]["worst"] == {"logits": 2e-6}


def test_options_reach_the_exporter(run, tmp_path, scripted_export):
    run(
        *("export", "ckpt", "-o", tmp_path / "out", "--block-len", 16, "--mask-id", 3),
        *("--stop-id", 4, "--stop-id", 5, "--precision", "fp16", "--no-fused", "--head", "top_k"),
        *("--allow-unexpected", "--conv-layout", "dk"),
    )
    asked = {k: v for k, v in scripted_export.items() if k not in ("hook", "notes", "calls")}
    assert asked == {
        "checkpoint": "ckpt",
        "block_len": 16,
        "mask_id": 3,
        "stop_ids": (4, 5),
        "precision": "fp16",
        "fused": False,
        "head": "top_k",
        "top_k": 8,
        "force": False,
        "allow_unexpected": True,
        "conv_layout": "dk",
    }


def test_nothing_is_guessed(run, tmp_path, scripted_export):
    """What is not given is None: the checkpoint says it, or the exporter refuses."""
    run("export", "ckpt", "-o", tmp_path / "out")
    for name in ("block_len", "mask_id", "stop_ids", "conv_layout"):
        assert scripted_export[name] is None


def test_layouts_are_those_of_the_exporter(run):
    from fixedstate.export.names import CONV_LAYOUTS

    assert f"[{'|'.join(CONV_LAYOUTS)}]" in run("export", "--help").out
