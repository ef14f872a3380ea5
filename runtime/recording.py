"""What a flight recording holds, and how it is read back.

A folder with `recording.json` (what was run), `events.ring` (:mod:`fixedstate.runtime.ring`) and
`state-NNN.bin`, saved states that are replaced in turn. An event is something that happens to one
row: its request begins, a pass fills slots, tokens are committed, it ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fixedstate.bundle import Bundle, DecodeDefaults
from fixedstate.errors import SpecError, StateError, require_keys
from fixedstate.ports import Array
from fixedstate.runtime.policies import FixedQuota, Policy, Threshold
from fixedstate.runtime.requests import Rules
from fixedstate.runtime.ring import read_ring
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.state import Precision, StateSpec

FORMAT = 1
"""Number of the format this code writes; a newer one is refused."""

HEADER = "recording.json"
RING = "events.ring"
HASH = 16  # bytes of a hash of logits or state
POLICY = 64  # bytes of a policy's state that are kept readable

_POLICIES: dict[str, type[Any]] = {kind.__name__: kind for kind in (FixedQuota, Threshold)}
_BEGUN, _PASS, _COMMIT, _ENDED = 1, 2, 3, 4
_STATE_HEAD = struct.Struct("<8sQQ32s")  # mark, bytes of the note, of the state; hash of the note
_STATE_MARK = b"fixedst1"


# --- what was run --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """What was run, and how the recording is laid out.

    Attributes:
        bundle: The bundle's folder as it was given; empty where it was not.
        digest: Of the bundle.
        weights: sha256 of the weights.
        model: sha256 of the model's description.
        roles: Of the graphs that ran.
        graphs: sha256 of these graphs and of their copies for a target, by role.
        objective: Of the model.
        precision: Of the bundle.
        state: What is carried.
        decode: The bundle's decode defaults.
        block_len: L.
        versions: Of fixedstate, numpy and the back end.
        provider: What the passes ran on.
        threads: Of a pass, as asked for; None for the back end's choice.
        cores: Processor cores the process could use.
        optimization: Of the graphs, as asked for.
        slots: Rows at most.
        limit: Tokens per row at most; None for no limit.
        every: Blocks of a row between two saved states.
        payload: Bytes of an event that one cell of the ring holds.
        length: Cells of the ring.
        states: Files of saved states.
        state_bytes: Bytes of such a file at most.
        unsaved: Why states were not saved; empty where all were.
    """

    bundle: str
    digest: str
    weights: str
    model: str
    roles: tuple[str, ...]
    graphs: dict[str, str]
    objective: str
    precision: Precision
    state: StateSpec = field(repr=False)
    decode: DecodeDefaults
    block_len: int
    versions: dict[str, str]
    provider: str
    threads: int | None
    cores: int
    optimization: str
    slots: int
    limit: int | None
    every: int
    payload: int
    length: int
    states: int
    state_bytes: int
    unsaved: str = ""

    def to_json(self) -> bytes:
        """The content of `recording.json`."""
        plain = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("precision", "state", "decode"):
            plain[name] = plain[name].to_dict()
        return json.dumps({"format": FORMAT, **plain}, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read the header of a recording.

        Raises:
            StateError: where there is none, it is damaged or newer.
        """
        path = folder / HEADER
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError as err:
            raise StateError(
                f"{folder} holds no {HEADER}: give a folder that `generate --record` wrote"
            ) from err
        except OSError as err:
            raise StateError(f"{path} cannot be read: {err.strerror or err}") from err
        except ValueError as err:
            raise StateError(f"{path} is damaged: it is not JSON; record again") from err
        number = data.pop("format", None) if isinstance(data, dict) else None
        if not isinstance(number, int) or number < 1:
            raise StateError(f"{path} names no format: it is not the header of a recording")
        if number > FORMAT:
            raise StateError(
                f"{folder} has format {number}, this version reads up to {FORMAT}: install a newer "
                "fixedstate or record again"
            )
        try:
            require_keys(data, tuple(item.name for item in dataclasses.fields(cls)), HEADER)
            parts = {
                "precision": Precision.from_dict(data["precision"]),
                "state": StateSpec.from_dict(data["state"]),
                "decode": DecodeDefaults.from_dict(data["decode"]),
                "roles": tuple(data["roles"]),
            }
        except (SpecError, TypeError, KeyError, AttributeError) as err:
            raise StateError(f"{path} is damaged: {err}") from err
        return cls(**{**data, **parts})


def model_hash(bundle: Bundle) -> str:
    """sha256 of the description of a bundle's model: equal for every export of one model."""
    text = json.dumps(bundle.spec.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# --- hashes --------------------------------------------------------------------------------------


def hash_scores(logits: Array, slots: Array, vocab_size: int) -> bytes:
    """The hash of the logits that a policy saw.

    Args:
        logits: (L, V) float32, each row in one piece.
        slots: Indices of the slots it looked at.
        vocab_size: Columns that count.
    """
    digest = hashlib.blake2b(digest_size=HASH)
    for slot in slots.tolist():
        digest.update(logits[slot, :vocab_size].data)
    return digest.digest()


def hash_ports(state: StateSpec, arrays: Mapping[str, Array], begin: int) -> bytes:
    """One hash per committed port, in order: of all of it, or of the columns from `begin` on.

    Columns of keys and values are never written twice, so each is hashed once, when it is new.
    """
    out = []
    for port in state.committed:
        array = arrays[port.suffix]
        part = array[:, begin:] if port.update == "append" else array
        out.append(hash_array(part))
    return b"".join(out)


def hash_array(array: Array) -> bytes:
    """The hash of the bytes of an array."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=HASH).digest()


def policy_text(state: Any) -> bytes | None:
    """A policy's state as bytes that are equal for equal states; None where it has no such form."""
    if state is None or isinstance(state, (bool, int, float, str, bytes, np.generic)):
        return repr(state.item() if isinstance(state, np.generic) else state).encode()
    if isinstance(state, np.ndarray):
        return f"{state.dtype}{list(state.shape)}".encode() + state.tobytes()
    if isinstance(state, (list, tuple)):
        return _joined(state)
    if isinstance(state, dict):
        return _joined([item for key in sorted(state, key=repr) for item in (key, state[key])])
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return _joined([getattr(state, item.name) for item in dataclasses.fields(state)])
    return None


def _joined(items: Sequence[Any]) -> bytes | None:
    parts = [policy_text(item) for item in items]
    if any(part is None for part in parts):
        return None
    return b"(" + b"".join(struct.pack("<I", len(part or b"")) + (part or b"") for part in parts)


def hash_policy(state: Any) -> tuple[bytes, bytes]:
    """The hash of a policy's state and its beginning; both empty where it has none to show."""
    text = None if state is None else policy_text(state)
    if text is None:
        return bytes(HASH), b""
    return hashlib.blake2b(text, digest_size=HASH).digest(), text[:POLICY]


# --- rules ---------------------------------------------------------------------------------------


def rules_to_dict(rules: Rules) -> dict[str, Any]:
    """A request's rules, ready for JSON; of a policy of your own only its words are kept."""
    kind = type(rules.policy)
    policy: dict[str, Any] = {"name": kind.__name__, "text": repr(rules.policy)[:200]}
    if _POLICIES.get(kind.__name__) is kind:
        policy = {"name": kind.__name__, **dataclasses.asdict(rules.policy)}  # type: ignore[call-overload]
    return {
        "policy": policy,
        "max_new_tokens": rules.max_new_tokens,
        "min_new_tokens": rules.min_new_tokens,
        "temperature": rules.temperature,
        "seed": rules.seed,
        "stop_ids": list(rules.stop_ids),
    }


def policy_from_dict(data: Mapping[str, Any]) -> Policy | None:
    """The policy of recorded rules; None for one that is not of this package."""
    values = dict(data["policy"])
    kind = _POLICIES.get(values.pop("name"))
    if kind is None or "text" in values:
        return None
    policy: Policy = kind(**values)
    return policy


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """A request got its slot; its state is the one of `past_length` tokens.

    Attributes:
        number: Of its first cell.
        request: In the order they began, from 0.
        slot: Where.
        past_length: Committed tokens it goes on from; 0 for a new row.
        room: Tokens it can come to.
        prompt: Tokens of the prompt.
        state: Key of the saved state it goes on from; empty for a new row.
        rules: See :func:`rules_to_dict`.
    """

    number: int
    request: int
    slot: int
    past_length: int
    state: str
    room: int
    prompt: int
    rules: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pass:
    """Logits came and the policy filled slots.

    Attributes:
        number: Of its first cell.
        request: Whose.
        block: Of the answer.
        step: Inside the block.
        past_length: Committed tokens before the block.
        seed: Of the row.
        made: Tokens of the answer before this block.
        fixed: Slots of the block that the prompt fills.
        again: Whether the logits were those of the pass before, whose canvas stayed as it was.
        before: (L,) int32.
        after: (L,) int32.
        logits: Hash of those of the slots that the policy looked at.
        policy: Hash of the policy's state afterwards; zeros where it keeps none.
        policy_text: Its beginning.
    """

    number: int
    request: int
    block: int
    step: int
    past_length: int
    seed: int
    made: int
    fixed: int
    again: bool
    before: Array
    after: Array
    logits: bytes
    policy: bytes
    policy_text: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens went into the state.

    Attributes:
        number: Of its first cell.
        request: Whose.
        block: Finished blocks of the answer by then; 0 for the prompt.
        past_length: Committed tokens before.
        fused: Whether it was done by the pass that began the next block.
        ids: The tokens.
        ports: Hash of every port afterwards; see :func:`hash_ports`.
        last_logits: Hash of the row's last logits afterwards; zeros where there are none.
    """

    number: int
    request: int
    block: int
    past_length: int
    fused: bool
    ids: Array
    ports: tuple[bytes, ...]
    last_logits: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ended.

    Attributes:
        number: Of its first cell.
        request: Whose.
        reason: Why.
        error: What went wrong.
        tokens: Of the answer.
    """

    number: int
    request: int
    reason: str
    error: str | None
    tokens: int


Event = Begun | Pass | Commit | Ended


class Layout:
    """Events as bytes and back, for one block length and number of ports."""

    def __init__(self, block_len: int, ports: int) -> None:
        head = [("kind", "u1"), ("flag", "u1"), ("slot", "<u2"), ("request", "<u4")]
        place = [("block", "<u4"), ("past_length", "<i8")]
        self.ports = ports
        self._head = np.dtype(head)
        canvas = ("<i4", (block_len,))
        self._pass = np.dtype(
            [
                *head,
                *place,
                *(("step", "<u4"), ("seed", "<u8"), ("made", "<u4"), ("fixed", "<u4")),
                *(("before", *canvas), ("after", *canvas)),
                *(("logits", f"V{HASH}"), ("policy", f"V{HASH}")),
            ]
        )
        self._commit = np.dtype([*head, *place, ("count", "<u4"), ("last_logits", f"V{HASH}")])
        self._scratch = np.zeros((), self._pass)
        self.pass_bytes = self._pass.itemsize + POLICY
        """Bytes of a pass at most."""

    def pack_begun(self, slot: int, request: int, values: Mapping[str, Any]) -> bytes:
        """A :class:`Begun`: past_length, state, room, prompt and rules."""
        return self._note(_BEGUN, slot, request, values)

    def pack_ended(self, slot: int, request: int, values: Mapping[str, Any]) -> bytes:
        """An :class:`Ended`: reason, error and tokens."""
        return self._note(_ENDED, slot, request, values)

    def _note(self, kind: int, slot: int, request: int, values: Mapping[str, Any]) -> bytes:
        head = np.array((kind, 0, slot, request), self._head)
        return head.tobytes() + json.dumps(values, separators=(",", ":")).encode()

    def pack_pass(self, slot: int, request: int, text: bytes, **values: Any) -> bytes:
        """A :class:`Pass`; `text` is the beginning of the policy's state."""
        record = self._scratch
        record["kind"], record["flag"] = _PASS, values.pop("again")
        record["slot"], record["request"] = slot, request
        for name, value in values.items():
            record[name] = value
        return record.tobytes() + text

    def pack_commit(
        self,
        slot: int,
        request: int,
        *,
        block: int,
        past_length: int,
        fused: bool,
        ids: Array,
        ports: bytes,
        last_logits: bytes,
    ) -> bytes:
        """A :class:`Commit`; `ports` are all hashes behind one another."""
        values = (_COMMIT, fused, slot, request, block, past_length, len(ids), last_logits)
        return np.array(values, self._commit).tobytes() + ports + ids.astype("<i4").tobytes()

    def unpack(self, number: int, data: bytes) -> Event:
        """The event of some bytes."""
        head = np.frombuffer(data, self._head, 1)[0]
        kind, request, slot = int(head["kind"]), int(head["request"]), int(head["slot"])
        if kind == _PASS:
            return self._unpack_pass(number, data)
        if kind == _COMMIT:
            return self._unpack_commit(number, data)
        values = json.loads(data[self._head.itemsize :])
        if kind == _BEGUN:
            return Begun(number, request, slot, **values)
        return Ended(number, request, **values)

    def _unpack_pass(self, number: int, data: bytes) -> Pass:
        record = np.frombuffer(data, self._pass, 1)[0]
        names = ("request", "block", "step", "past_length", "seed", "made", "fixed")
        return Pass(
            number,
            **{name: int(record[name]) for name in names},
            again=bool(record["flag"]),
            before=record["before"],
            after=record["after"],
            logits=record["logits"].tobytes(),
            policy=record["policy"].tobytes(),
            policy_text=data[self._pass.itemsize :],
        )

    def _unpack_commit(self, number: int, data: bytes) -> Commit:
        record = np.frombuffer(data, self._commit, 1)[0]
        start = self._commit.itemsize
        end = start + HASH * self.ports
        ids = np.frombuffer(data[end:], "<i4").astype(np.int64)
        return Commit(
            number,
            **{name: int(record[name]) for name in ("request", "block", "past_length")},
            fused=bool(record["flag"]),
            ids=ids,
            ports=tuple(data[i : i + HASH] for i in range(start, end, HASH)),
            last_logits=record["last_logits"].tobytes(),
        )


# --- saved states --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state of a recording, and where it belongs.

    Attributes:
        path: Its file.
        next: Number of the first cell behind it.
        block: Of the answer: full, and not in the state yet; -1 for the state of a beginning.
        key: Of the state of a beginning, which several requests may share; empty elsewhere.
        begun: Its request, the first that had it.
    """

    path: Path
    next: int
    block: int
    key: str
    begun: Begun

    def load(self) -> Snapshot:
        """The state.

        Raises:
            StateError: where it is damaged.
        """
        try:
            data = self.path.read_bytes()
        except OSError as err:
            raise StateError(f"{self.path} cannot be read: {err.strerror or err}") from err
        _, note, size, _ = _STATE_HEAD.unpack_from(data)
        start = _STATE_HEAD.size + note
        return Snapshot.from_bytes(data[start : start + size], str(self.path))


def state_file(begun: Begun, after: int, block: int, key: str, state: bytes) -> tuple[bytes, bytes]:
    """What stands before a saved state in its file, and the state.

    Args:
        begun: The request's beginning.
        after: Number of the first cell behind it.
        block: See :class:`SavedState`.
        key: See :class:`SavedState`.
        state: What :meth:`Snapshot.to_bytes` gave.
    """
    place = {"next": after, "block": block, "key": key, "begun": dataclasses.asdict(begun)}
    note = json.dumps(place).encode()
    digest = hashlib.sha256(note).digest()
    return _STATE_HEAD.pack(_STATE_MARK, len(note), len(state), digest) + note, state


def _read_state(path: Path) -> SavedState | None:
    """The note of a saved state; None where the file is damaged."""
    with path.open("rb") as file:
        head = file.read(_STATE_HEAD.size)
        if len(head) < _STATE_HEAD.size:
            return None
        mark, size, _, digest = _STATE_HEAD.unpack(head)
        note = file.read(size) if mark == _STATE_MARK and size < 1 << 24 else b""
    if hashlib.sha256(note).digest() != digest:
        return None
    values = json.loads(note)
    return SavedState(path, **{**values, "begun": Begun(**values["begun"])})


# --- the whole -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording, read.

    Attributes:
        header: What was run.
        events: What the ring still holds, oldest first.
        states: Saved states that can be gone on from, oldest first.
        lost: Cells that damage cut off.
        damaged: Names of saved states that are damaged.
    """

    header: Header
    events: tuple[Event, ...] = field(repr=False)
    states: tuple[SavedState, ...]
    lost: int
    damaged: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> Recording:
        """Read a recording, also one whose process was killed.

        Raises:
            StateError: where it is missing, damaged or newer.
        """
        header = Header.read(folder)
        log = read_ring(folder / RING, header.payload, header.length)
        layout = Layout(header.block_len, len(header.state.committed))
        states, damaged = [], []
        for path in sorted(folder.glob("state-*.bin")):
            state = _read_state(path)
            if state is None:
                damaged.append(path.name)
            elif state.key or log.begin <= state.next <= log.end:
                states.append(state)
        return cls(
            header=header,
            events=tuple(layout.unpack(number, data) for number, data in log.events),
            states=tuple(sorted(states, key=lambda state: state.next)),
            lost=log.lost,
            damaged=tuple(damaged),
        )

    @property
    def requests(self) -> tuple[int, ...]:
        """Numbers of the requests of which there is anything, in order."""
        return tuple(sorted({event.request for event in self.events}))

    def of(self, request: int) -> tuple[Event, ...]:
        """The events of one request."""
        return tuple(event for event in self.events if event.request == request)
