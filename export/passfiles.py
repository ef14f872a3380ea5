"""Passes of a bundle's graphs as files that Polygraphy loads: what went in and what came out.

``fixedstate check --save-inputs IN --save-outputs OUT`` writes one file per graph, which
``polygraphy run GRAPH --onnxrt --load-inputs IN/ROLE.json --load-outputs OUT/ROLE.json`` takes: any
runner of Polygraphy's is compared with them. The format is that of its package, 0.49 and newer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fixedstate.bundle import Bundle, staged_folder
from fixedstate.errors import BackendError, UsageError
from fixedstate.ports import Array, Port
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.ort import open_sessions
from fixedstate.runtime.requests import Request, Settings
from fixedstate.runtime.session import Binding, Session

RUNNER = "fixedstate-onnxruntime-cpu"
"""Name under which Polygraphy reports our side."""

_GROUPS = (("denoise", "commit"), ("commit_denoise",))  # graphs that decode with one another


@dataclass(frozen=True, slots=True)
class KeptPass:
    """One run of a graph.

    Attributes:
        inputs: By port name.
        outputs: By port name.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def require_polygraphy() -> None:
    """Refuse to go on without the package whose format is written.

    Raises:
        BackendError: saying how to install it.
    """
    try:
        import polygraphy  # noqa: F401
    except ImportError as err:
        raise BackendError(
            "passes are saved in the format of Polygraphy, which is not installed: "
            "`pip install polygraphy`, or leave --save-inputs and --save-outputs out"
        ) from err


def keep_passes(bundle: Bundle, *, seed: int = 0) -> dict[str, KeptPass]:
    """One real pass of every graph that gives all scores, by role.

    Two rows are decoded by the ordinary loop, with one thread: ids are in range, and lengths and
    carried tensors are what a row really holds behind some blocks.

    Args:
        bundle: The opened bundle.
        seed: Of the prompts.

    Raises:
        UsageError: for a bundle without such graphs.
        BackendError: where ONNX Runtime cannot run a graph.
    """
    spec = bundle.spec
    groups = [group for group in _GROUPS if set(group) <= set(bundle.graphs)]
    if not groups:
        raise UsageError(
            f"{bundle.path} has no graphs that carry state from block to block (it has "
            f"{', '.join(sorted(bundle.graphs))}): its passes cannot be saved"
        )
    rng = np.random.default_rng(seed)
    known = np.flatnonzero(np.arange(spec.vocab_size) != spec.mask_id)
    length = spec.block_len
    # a row of one pass a block finishes one in every round: with the other one, when that does
    requests = [
        Request(
            rng.choice(known, 2 * length + length // 2),
            Settings(blocks * length, steps=min(steps, length), temperature=0, stop_ids=()),
        )
        for blocks, steps in ((8, 1), (2, 2))
    ]
    kept: dict[str, KeptPass] = {}
    for group in groups:
        sessions = open_sessions(bundle, group, threads=1)
        watched = {role: _Watched(role, session, kept) for role, session in sessions.items()}
        engine = SessionEngine(
            spec, bundle.state, watched, slots=len(requests), weights=bundle.weights
        )
        for _ in Stream(engine, requests, replace(bundle.decode, prefill_blocks=1)):
            pass
    return dict(sorted(kept.items()))


class _Watched:
    """A session that keeps what went through it, of as many rows as there were."""

    def __init__(self, role: str, session: Session, kept: dict[str, KeptPass]) -> None:
        self._role, self._session, self._kept = role, session, kept

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The graph's inputs."""
        return self._session.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The graph's outputs."""
        return self._session.outputs

    @property
    def provider(self) -> str:
        """What it runs on."""
        return self._session.provider

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Binding:
        """Bind arrays; a run keeps copies of them."""
        return _WatchedBinding(self, self._session.bind(inputs, outputs), inputs, outputs)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once on any arrays."""
        found = self._session.run(feeds)
        self.keep(_copies(feeds), found)
        return found

    def keep(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Keep a pass, unless one of more rows is kept."""
        before = self._kept.get(self._role)
        if before is None or len(before.inputs["input_ids"]) <= len(inputs["input_ids"]):
            self._kept[self._role] = KeptPass(inputs, _copies(outputs))


class _WatchedBinding:
    def __init__(
        self,
        session: _Watched,
        binding: Binding,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        self._session, self._binding = session, binding
        self._inputs, self._outputs = inputs, outputs

    def run(self) -> None:
        """Run on the bound arrays and keep what went in and came out."""
        given = _copies(self._inputs)
        self._binding.run()
        self._session.keep(given, self._outputs)


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


def save_passes(
    kept: Mapping[str, KeptPass], inputs: Path | None = None, outputs: Path | None = None
) -> list[Path]:
    """Write passes for Polygraphy: ``ROLE.json`` in a folder for inputs, in one for outputs.

    Args:
        kept: What :func:`keep_passes` gave.
        inputs: Folder to make for what went in; None for none.
        outputs: Folder to make for what came out; None for none.

    Returns:
        The files.

    Raises:
        BackendError: where Polygraphy is not installed.
        UsageError: where a folder is there already.
        BundleError: where it cannot be written.
    """
    require_polygraphy()
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json
    from polygraphy.logger import G_LOGGER

    content: dict[Path, dict[str, Any]] = {}
    if inputs is not None:
        content[inputs] = {role: [OrderedDict(one.inputs)] for role, one in kept.items()}
    if outputs is not None:
        content[outputs] = {role: RunResults() for role in kept}
        for role, results in content[outputs].items():
            results.add([OrderedDict(kept[role].outputs)], runner_name=RUNNER)
    files = []
    with G_LOGGER.verbosity(G_LOGGER.ERROR):  # it speaks on standard output
        for target, values in content.items():
            with staged_folder(target) as folder:
                for role, value in values.items():
                    save_json(value, str(folder / f"{role}.json"))
            files += [target / f"{role}.json" for role in values]
    return files
