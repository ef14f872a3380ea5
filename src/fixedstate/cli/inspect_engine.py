"""``fixedstate inspect ENGINE``: what an engine was made of, its plans, profiles and layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.output import byte_text, echo_fields, echo_table

if TYPE_CHECKING:
    from fixedstate.runtime.enginefile import EngineFolder


def describe(engine: EngineFolder) -> dict[str, Any]:
    """Everything ``inspect`` says about an engine, ready for JSON.

    Args:
        engine: The opened engine.

    Returns:
        Identity and its key, precision and how it was checked, plans with ports, profiles, bytes
        and layers (None where the engine has no record of them), where plans without weights get
        them (None where they hold theirs), and state bytes of one row.
    """
    layers = _layers(engine)
    return {
        "path": str(engine.path),
        "digest": engine.digest,
        "key": engine.identity.key,
        "identity": engine.identity.to_dict(),
        "source": engine.source.to_dict(),
        "precision": engine.precision.to_dict(),
        "check": engine.check,
        "decode": engine.decode.to_dict(),
        "plans": [
            {
                "role": role,
                **plan.to_dict(),
                "bytes": (engine.path / plan.file).stat().st_size,
                "profiles": [
                    {name: [list(shape) for shape in bounds] for name, bounds in profile.items()}
                    for profile in plan.profiles
                ],
                "layers": layers.get(role),
            }
            for role, plan in engine.plans.items()
        ],
        "refit": _refit(engine),
        "files": sorted(engine.files),
        "state_bytes": engine.state.state_bytes(),
        "kv_bytes_per_token": engine.state.kv_bytes_per_token(),
    }


def _refit(engine: EngineFolder) -> dict[str, Any] | None:
    """What plans without weights are refitted from; no weights where the engine has none."""
    from fixedstate.bundle import WEIGHTS
    from fixedstate.runtime.enginefile import refit_graph

    if not engine.identity.is_stripped:
        return None
    if not engine.refits:
        return {"weights": None, "bytes": 0, "graphs": {}}
    return {
        "weights": WEIGHTS,
        "bytes": (engine.path / WEIGHTS).stat().st_size,
        "graphs": {role: refit_graph(role) for role in engine.plans},
    }


def _layers(engine: EngineFolder) -> dict[str, Any]:
    """What the build recorded of networks and plans, by role; its hash was checked."""
    file = engine.path / "layers.json"
    found: dict[str, Any] = json.loads(file.read_bytes()) if file.name in engine.files else {}
    return found


def show(data: dict[str, Any]) -> None:
    """Print it for people."""
    identity, check = data["identity"], data["check"]
    flags = [
        name if value is True else f"{name} {value}"
        for name, value in identity["flags"].items()
        if value is not False
    ]
    worst, refit = check.get("worst"), data["refit"]
    if refit is None:
        holds = None
    elif refit["weights"] is None:
        holds = "hold no weights, and the engine has none to put into them"
    else:
        holds = f"hold no weights; put in when loaded: {refit['weights']}, {refit['bytes']:,} bytes"
    echo_fields(
        (
            ("engine", data["path"]),
            ("key", data["key"]),
            ("built by", f"{identity['product']} {identity['version']}"),
            ("with", f"fixedstate {identity['package']}"),
            ("for", f"{identity['os']}, compute capability {', '.join(identity['capabilities'])}"),
            ("bundle", identity["bundle"]),
            ("weights", identity["weights"]),
            ("plans", holds),
            ("source", " ".join(filter(None, map(data["source"].get, ("name", "revision"))))),
            ("precision", ", ".join(f"{k} {v}" for k, v in data["precision"].items())),
            ("float32 layers", ", ".join(map(str, identity["fp32_layers"]))),
            ("checked", check.get("kind")),
            (
                "worst difference",
                f"{worst['port']}: {worst['rms_rel']:.2g} of its deviation root mean square, "
                f"{worst['max_rel']:.2g} at most, {worst['peak_rel']:.2g} of its largest value"
                if isinstance(worst, dict)
                else None,
            ),
            ("flags", ", ".join(flags)),
            ("state per row", byte_text(data["state_bytes"])),
            ("KV per token", byte_text(data["kv_bytes_per_token"])),
        )
    )
    _tables(data)


def _tables(data: dict[str, Any]) -> None:
    def weights(plan: dict[str, Any]) -> str | None:
        found = plan["layers"]
        return None if found is None else f"{found['weight_bytes']:,}"

    echo_table(
        "Plans",
        ("role", "file", "bytes>", "weights>", "inputs>", "outputs>", "in place>"),
        [
            (
                plan["role"],
                plan["file"],
                f"{plan['bytes']:,}",
                weights(plan),
                len(plan["inputs"]),
                len(plan["outputs"]),
                len(plan["aliases"]),
            )
            for plan in data["plans"]
        ],
    )
    echo_table(
        "Profiles",
        ("role", "profile", "input", "least", "usual", "most"),
        [
            (plan["role"], index, name, *("x".join(map(str, shape)) for shape in bounds))
            for plan in data["plans"]
            for index, profile in enumerate(plan["profiles"])
            for name, bounds in profile.items()
        ],
    )
    plugins = data["identity"]["plugins"]
    if plugins:
        echo_table(
            "Plugins",
            ("plugin", "version", "kind", "kernels"),
            [
                (f"{p['namespace']}::{p['name']}", p["version"], p["kind"], ", ".join(p["texts"]))
                for p in plugins
            ],
        )
    rows = [
        (plan["role"], what, kind, count)
        for plan in data["plans"]
        if plan["layers"] is not None
        for what, kinds in (
            ("network", plan["layers"]["layers"]),
            ("plan", plan["layers"]["steps"]),
        )
        for kind, count in kinds.items()
    ]
    if rows:
        echo_table("Layers", ("role", "of", "type", "count>"), rows)
    click.echo(f"{len(data['files'])} files beside the plans: {', '.join(data['files'])}")
