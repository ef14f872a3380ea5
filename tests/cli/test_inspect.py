"""`inspect`: what is read off a manifest, as JSON and as tables."""

from __future__ import annotations

from fixedstate.bundle import Bundle


def test_json_names_every_port_of_every_graph(run, bundle):
    """Other programs feed the graphs by these names."""
    data = run("inspect", bundle, "--json").json
    opened = Bundle.open(bundle)
    for graph in data["graphs"]:
        ports = [p for p in data["ports"] if p["graph"] == graph["role"]]
        assert [p["name"] for p in ports if p["direction"] == "input"] == graph["inputs"]
        assert [p["name"] for p in ports if p["direction"] == "output"] == graph["outputs"]
        assert graph["inputs"] == [p.name for p in opened.graphs[graph["role"]].inputs]
    assert {graph["role"]: graph["file"] for graph in data["graphs"]} == {
        "denoise": "denoise.onnx",
        "commit": "commit.onnx",
    }


def test_json_bytes_and_updates(run, bundle):
    """Constant ports have bytes, growing ones have none; both say how they are carried on."""
    data = run("inspect", bundle, "--json").json
    ports = {(p["graph"], p["name"]): p for p in data["ports"]}
    ssm = ports["commit", "past_ssm_state_000"]
    assert ssm == {
        "name": "past_ssm_state_000",
        "graph": "commit",
        "direction": "input",
        "shape": ["B", 8, 8, 8],
        "dtype": "float32",
        "update": "swap",
        "scope": "committed",
        "bytes": 8 * 8 * 8 * 4,
    }
    key = ports["denoise", "past_key_001"]
    assert (key["update"], key["bytes"]) == ("append", None)
    logits = ports["denoise", "logits"]
    assert (logits["update"], logits["bytes"]) == (None, 8 * 40 * 4)
    assert ports["commit", "input_ids"]["shape"] == ["B", "8n"]
    swapped = [p for p in data["ports"] if p["graph"] == "commit" and p["update"] == "swap"]
    assert data["state_bytes"] == sum(p["bytes"] for p in swapped if p["direction"] == "input")
    assert data["kv_bytes_per_token"] == 2 * 2 * 8 * 4


def test_json_memory_plan(run, bundle):
    data = run("inspect", bundle, "--json").json
    plans = data["memory"].pop("plans")
    assert data["memory"] == {
        "weights": 1000,
        "state_two_buffers": 2 * data["state_bytes"],
        "kv_1024_tokens": 1024 * 128,
        "kv_8192_tokens": 8192 * 128,
        "default": "fast",
    }
    assert set(plans) == {"fast"}  # it has no fused graph
    assert plans["fast"]["sessions"] == ["denoise", "commit"]
    assert plans["fast"]["weights"] == 2000
    assert plans["fast"]["kv"] == 256 * 128
    assert data["schema"] == 2
    assert data["digest"] == Bundle.open(bundle).digest
    assert data["model"]["mixers"] == ["mamba2", "attention", "mamba2"]


def test_tables_hold_every_port_whole(run, bundle):
    """A name cut by the width of a pipe would be of no use."""
    done = run("inspect", bundle)
    assert (done.code, done.err) == (0, "")
    for port in run("inspect", bundle, "--json").json["ports"]:
        assert port["name"] in done.out
    for words in ("KV at 8,192 tokens", "2 mamba2, 1 attention", "state per row"):
        assert words in done.out


def test_names_from_the_bundle_are_not_markup(run, make_bundle):
    """A folder called [red] is a name, not a colour."""
    folder = make_bundle("[red]x.bundle", "F2")
    assert "[red]x.bundle" in run("inspect", folder).out.replace("\n", "")
