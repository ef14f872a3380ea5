"""One exported graph on many weights and many prompts: laws 1 to 5 as one function.

A bundle is exported once per model; :func:`swap_weights` then puts other weights into its file, in
place, and :func:`check_trial` walks ragged rows through it. Right is the PyTorch denoiser in
float64; what float32 itself cannot hold is judged by PyTorch at the bundle's own precision.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from strategies import Trial

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.export import passinfo
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.layers import rotary_frequencies
from fixedstate.export.parity import JUDGE_FACTOR, TorchEngine
from fixedstate.export.stored import as_stored
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.ort import open_sessions
from fixedstate.spec import ModelSpec, RopeScaling

ABSOLUTE = {"fp32": 1e-4, "fp16": 2e-2}  # of the larger of 1 and the port's deviation
STATELESS = 1e-8  # float64 against float64

Steps = dict[str, np.ndarray]
"""Arrays by place and port: ``row 1 block 2 logits``."""

Peers = Callable[[], Iterator[Denoiser]]


def swap_weights(bundle: Bundle, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write other weights over those of a bundle, in place; its hashes no longer fit.

    Written against what docs/bundle.md says about the file, not with the exporter's own code: a
    part ``NAME.k`` holds the columns behind those of the parts before it.
    """
    held = Denoiser(bundle.spec, tensors, bundle.precision)
    file = bundle.path / WEIGHTS
    with file.open("r+b") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        columns: dict[str, int] = {}
        for name in sorted(header, key=_part):
            whole, place = _part(name)
            data = held.weight(whole).numpy()
            if place >= 0:
                first = columns.get(whole, 0)
                columns[whole] = first + header[name]["shape"][1]
                data = data[:, first : columns[whole]]
            assert list(data.shape) == header[name]["shape"], name
            begin, end = header[name]["data_offsets"]
            raw = np.ascontiguousarray(data).tobytes()
            assert len(raw) == end - begin, name
            stream.seek(8 + size + begin)
            stream.write(raw)
    for whole, seen in columns.items():
        assert seen == held.weight(whole).shape[1], f"{whole}: parts hold {seen} columns"


def _part(name: str) -> tuple[str, int]:
    """The whole weight, and which part of it; -1 for all of it."""
    whole, _, last = name.rpartition(".")
    return (whole, int(last)) if last.isdigit() else (name, -1)


def check_trial(folder: Path, tensors: Mapping[str, torch.Tensor], trial: Trial) -> None:
    """Laws 1 to 5 of a bundle with these weights on this trial.

    Raises:
        AssertionError: naming law, row, block and port.
    """
    bundle = Bundle.open(folder, verify_weights=False)
    swap_weights(bundle, tensors)
    stored = as_stored(tensors, bundle.precision)
    exact = Denoiser(bundle.spec, stored).double()
    peers = functools.partial(_peers, bundle, tensors, stored)
    if bundle.spec.objective == "full":
        _check_full(bundle, exact, peers, trial)
        return
    ids, slots = trial.ids(bundle.spec), len(trial.blocks)
    right = TorchEngine(exact, slots)
    truth = dict(_walk(right, bundle.spec, trial, ids))
    _check_recompute(exact, trial, ids, truth)
    engine = open_engine(bundle, threads=1, slots=max(slots, 2))
    found = dict(_walk(engine, bundle.spec, trial, ids))
    _judge(
        "law 5",
        bundle,
        truth,
        found,
        lambda: (
            dict(_walk(TorchEngine(peer, slots), bundle.spec, trial, ids)) for peer in peers()
        ),
    )
    _check_at_once(bundle, engine, trial, ids, truth, peers)
    _check_alone(bundle, engine, trial, ids, found)


def _check_recompute(exact: Denoiser, trial: Trial, ids: np.ndarray, truth: Steps) -> None:
    """Law 1 in PyTorch, float64: what is cached against a whole sequence at once.

    At positions in the cache a key is turned by other angles when it is recomputed. Those are
    float32 in every bundle; here they are float64, so that nothing but the law is tried.
    """
    spec, slots = exact.spec, len(trial.blocks)
    with pytest.MonkeyPatch.context() as patch:
        if any(
            layer.mixer == "attention"
            and layer.attention.window
            and not layer.attention.keys_rotated
            for layer in spec.layers
        ):
            patch.setattr(passinfo, "rotary_angles", _float64_angles)
            truth = dict(_walk(TorchEngine(exact, slots), spec, trial, ids))
        stateless = dict(_walk(TorchEngine(exact, slots, stateless=True), spec, trial, ids))
    for place, array in stateless.items():
        gap = np.abs(array - truth[place]).max()
        assert gap <= STATELESS * max(1.0, truth[place].std()), f"law 1: {place} by {gap:.1e}"


def _float64_angles(
    positions: torch.Tensor, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rotary_angles gives, in float64."""
    frequencies = torch.tensor(rotary_frequencies(rotary_dim, theta, scaling), dtype=torch.float64)
    angles = positions.double()[:, None, :, None] * frequencies
    factor = 1.0 if scaling is None else scaling.attention_factor
    return angles.cos() * factor, angles.sin() * factor


def _canvas(spec: ModelSpec, trial: Trial, piece: np.ndarray) -> np.ndarray:
    canvas = np.array(piece)
    assert spec.mask_id is not None
    canvas[:, trial.remainder :] = spec.mask_id
    return canvas


def _walk(engine, spec: ModelSpec, trial: Trial, ids: np.ndarray):
    """Every pass of ragged rows on an engine: yields (place, array).

    Law 2 on the way: a denoise pass leaves the digest of every committed byte as it was.
    """
    rows, length = len(trial.blocks), spec.block_len
    stateless = getattr(engine, "_stateless", False)
    steps = 2 if spec.self_conditioning_width and not stateless else 1
    hashed = isinstance(engine, SessionEngine)
    for row in range(rows):
        engine.reset(row)
    for block in range(max(trial.blocks) + 1):
        open_rows = [row for row in range(rows) if block <= trial.blocks[row]]
        before = engine.buffers.hash() if hashed else None
        for step in range(steps):
            if step == 0:
                for row in range(rows):
                    engine.begin_block(row)
            logits = engine.denoise(_canvas(spec, trial, ids[:, block]))
            for row in open_rows:
                yield f"row {row} block {block} pass {step} logits", np.array(logits[row])
        assert not hashed or engine.buffers.hash() == before, f"law 2: block {block}"
        lengths = np.array([length if block < trial.blocks[row] else 0 for row in range(rows)])
        if lengths.any():
            engine.commit(ids[:, block], lengths)
        if not stateless:
            for row in np.flatnonzero(lengths):
                yield from _states(engine, row, f"row {row} after block {block}")
    if stateless:
        return
    engine.commit(ids[range(rows), list(trial.blocks)], np.array(trial.partial))
    for row in range(rows):
        yield from _states(engine, row, f"row {row} at the end")


def _states(engine, row: int, place: str):
    for name, array in engine.read(row).items():
        yield f"{place} {name}", array
    if engine.spec.logit_shift:
        yield f"{place} last_logits", np.array(engine.last_logits[row])


def _judge(
    law: str,
    bundle: Bundle,
    truth: Steps,
    found: Steps,
    peers: Callable[[], Iterator[Steps]],
) -> None:
    """Every array is close to the truth, or no further from it than its peers, times a factor.

    Peers are PyTorch at the bundle's precision, and PyTorch in float64 with weights moved by half
    a unit of their last place: what either changes, that precision cannot hold.
    """
    absolute = ABSOLUTE[bundle.precision.name]
    theirs: list[Steps] = []
    for place, right in truth.items():
        mine = found[place].astype(np.float64)
        assert mine.shape == right.shape, f"{law}: {place} {mine.shape} for {right.shape}"
        assert np.isfinite(mine).all(), f"{law}: {place} is not finite"
        gap = float(np.abs(mine - right).max(initial=0.0))
        if gap <= absolute * max(1.0, float(right.std()) if right.size else 0.0):
            continue
        theirs = theirs or list(peers())
        own = max(float(np.abs(one[place].astype(np.float64) - right).max()) for one in theirs)
        assert gap <= JUDGE_FACTOR * own, f"{law}: {place} by {gap:.2e}, its peers {own:.2e}"


_LAST_PLACE = {"fp32": 2.0**-24, "fp16": 2.0**-11}


def _peers(
    bundle: Bundle, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]
) -> Iterator[Denoiser]:
    """PyTorch at the bundle's precision, then three copies in float64 with weights moved."""
    yield Denoiser(bundle.spec, tensors, bundle.precision)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        moved = Denoiser(bundle.spec, stored).double()
        with torch.no_grad():
            for buffer in moved.buffers():
                noise = torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
                buffer.mul_(1 + _LAST_PLACE[bundle.precision.name] * noise)
        yield moved


def _check_at_once(
    bundle: Bundle,
    engine: SessionEngine,
    trial: Trial,
    ids: np.ndarray,
    truth: Steps,
    peers: Peers,
) -> None:
    """Law 3: one commit of all blocks gives the state of as many commits of one."""
    spec, rows, most = bundle.spec, len(trial.blocks), max(trial.blocks)
    lengths = np.array(trial.blocks) * spec.block_len
    whole = ids[:, :most].reshape(rows, -1)

    def at_once(of) -> Steps:
        for row in range(rows):
            of.reset(row)
        of.commit(whole, lengths)
        return dict(
            pair
            for row in range(rows)
            for pair in _states(of, row, f"row {row} after block {max(trial.blocks[row] - 1, 0)}")
        )

    wanted = {place: truth[place] for place in _at_once_places(truth, trial)}
    found = {place: array for place, array in at_once(engine).items() if place in wanted}
    _judge(
        "law 3",
        bundle,
        wanted,
        found,
        lambda: (at_once(TorchEngine(peer, rows)) for peer in peers()),
    )


def _at_once_places(truth: Steps, trial: Trial) -> list[str]:
    """Places behind each row's last whole block; none of rows without one."""
    return [
        place
        for place in truth
        for row, blocks in enumerate(trial.blocks)
        if blocks and place.startswith(f"row {row} after block {blocks - 1} ")
    ]


def _check_alone(
    bundle: Bundle, engine: SessionEngine, trial: Trial, ids: np.ndarray, together: Steps
) -> None:
    """Law 4: each row alone, with garbage in the slot beside it, byte for byte in fp32."""
    rng = np.random.default_rng(trial.seed)
    for row in range(len(trial.blocks)):
        for slot in range(engine.slots):
            engine.buffers.scribble(slot, rng, behind=False)
        alone = Trial((trial.blocks[row],), (trial.partial[row],), trial.remainder, trial.seed)
        if bundle.precision.name != "fp32":
            continue
        own = ids[row : row + 1]
        for place, array in _walk(engine, bundle.spec, alone, own):
            name = place.replace("row 0", f"row {row}", 1)
            if name in together:
                same = together[name].tobytes() == array.tobytes()
                gap = np.abs(together[name] - array).max() if not same else 0
                assert same, f"law 4: {name} differs alone by {gap:.1e}"


def _check_full(bundle: Bundle, exact: Denoiser, peers: Peers, trial: Trial) -> None:
    """The whole-sequence graph at several lengths, in PyTorch and in ONNX Runtime."""
    session = open_sessions(bundle, ("full",), threads=1)["full"]
    ids = trial.ids(bundle.spec)
    flat = ids.reshape(len(ids), -1)
    for tokens in sorted({1, trial.remainder + 1, bundle.spec.block_len, flat.shape[1]}):
        cut = np.ascontiguousarray(flat[:, :tokens])

        def logits(of: Denoiser) -> Steps:
            with torch.inference_mode():
                made = of.passes("full", torch.from_numpy(cut), {}).logits  # noqa: B023
            assert made is not None
            return {f"{tokens} tokens": made.numpy()}  # noqa: B023

        found = {f"{tokens} tokens": session.run({"input_ids": cut})["logits"]}
        _judge("law 5", bundle, logits(exact), found, lambda: map(logits, peers()))
        for row in range(len(ids)):
            alone = session.run({"input_ids": cut[row : row + 1]})["logits"][0]
            assert (
                bundle.precision.name != "fp32"
                or alone.tobytes() == found[f"{tokens} tokens"][row].tobytes()
            ), f"law 4: row {row} of {tokens} tokens"
