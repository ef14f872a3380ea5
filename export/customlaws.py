"""Whether a custom module gives what its ports say and keeps the laws of cached decoding.

Run in PyTorch before anything is traced: a graph that equals a module which decodes wrongly is
wrong too. Every pass goes through :class:`RoleGraph`, so that a module only sees what the runtime
will give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedstate.errors import ExportError
from fixedstate.export.custom import CustomDenoiser
from fixedstate.export.denoiser import RoleGraph
from fixedstate.ports import Port
from fixedstate.runtime.compare import Tolerance, compare
from fixedstate.state import graph_ports

EXAMPLES = ((1, 1), (3, 2))
"""Rows and blocks at which shapes are looked at; the dimensions that vary take two values each."""

_ROWS = 3
_BLOCKS = 4  # room in the key and value buffers of the laws


def check_module(denoiser: CustomDenoiser, seed: int = 0) -> None:
    """Refuse a module whose passes are not those of its spec, or break a law.

    Args:
        denoiser: The module.
        seed: Of the tokens.

    Raises:
        ExportError: naming port, given and expected shape; or the law, the port and by how much.
    """
    with torch.inference_mode():
        for rows, blocks in EXAMPLES:
            _check_shapes(denoiser, rows, blocks)
        _Laws(denoiser, torch.Generator().manual_seed(seed)).check()


# --- shapes ---------------------------------------------------------------------------------------


def _check_shapes(denoiser: CustomDenoiser, rows: int, blocks: int) -> None:
    length = denoiser.spec.block_len
    state = denoiser.zero_state(rows, 2 * length)
    past = torch.zeros(rows, dtype=torch.int64)
    for role, count in (("denoise", 1), ("commit", blocks)):
        ids = torch.zeros(rows, count * length, dtype=torch.int64)
        lengths = {"past_length": past, "commit_length": torch.full((rows,), count * length)}
        where = f"{denoiser.name}: {role} of input_ids {list(ids.shape)}"
        try:
            passed = denoiser.passes(role, ids, state, **lengths)
        except Exception as err:
            raise ExportError(
                f"{where} failed: {type(err).__name__}: {err} (--debug shows where)"
            ) from err
        ports = denoiser.state_spec.ports
        made = {port.present.name: passed.states.get(port.suffix) for port in ports}
        made |= {"logits": passed.logits, "last_logits": passed.last_logits}
        _, outputs = graph_ports(denoiser.spec, denoiser.state_spec, role)
        for port in outputs:
            _check_port(where, port, made[port.name], port.resolve(B=rows, n=count))
        known = {port.suffix for port in ports}
        extra = [f"{name!r}" for name in passed.states if name not in known]
        if passed.last_logits is not None and not denoiser.spec.logit_shift:
            extra.append("'last_logits' (spec.logit_shift is false)")
        if extra:
            raise ExportError(
                f"{where} gave {', '.join(extra)}, expected {', '.join(sorted(known))}: name the "
                "new state by the suffixes of its ports"
            )


def _check_port(where: str, port: Port, given: object, shape: tuple[int, ...]) -> None:
    expected = f"expected {port.dtype} {list(shape)}"
    suffix = port.name.removeprefix("present_")
    if given is None:
        raise ExportError(f"{where} gave no {suffix!r}, {expected}")
    if not isinstance(given, Tensor):
        raise ExportError(f"{where} gave {suffix!r} of type {type(given).__name__}, {expected}")
    dtype = str(given.dtype).removeprefix("torch.")
    if tuple(given.shape) != shape or dtype != port.dtype:
        raise ExportError(f"{where} gave {suffix!r} as {dtype} {list(given.shape)}, {expected}")


# --- laws -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rows:
    """Rows of committed tokens: their state and how many they are."""

    state: dict[str, Tensor]
    past: Tensor


class _Laws:
    def __init__(self, denoiser: CustomDenoiser, generator: torch.Generator) -> None:
        self.denoiser = denoiser
        self.generator = generator
        self.ports = denoiser.state_spec.ports
        self.length = denoiser.spec.block_len
        self.tolerance = Tolerance.of(denoiser.precision.name)
        self.graphs = {role: RoleGraph(denoiser, role) for role in ("denoise", "commit")}

    def check(self) -> None:
        """Every law, the plain ones first: what breaks them breaks the others too."""
        self._is_a_function()
        self._zero_leaves_bytes()
        self._behind_is_not_seen()
        self._rows_are_apart()
        self._once_equals_twice(self.length, _lengths(2, 1, 2, length=self.length))
        if self.denoiser.spec.causal_commit:
            first = self.length // 2 + 1  # inside a block
            self._once_equals_twice(first, torch.tensor([2 * self.length, first, self.length]))

    # --- passes

    def _tokens(self, blocks: int) -> Tensor:
        high = self.denoiser.spec.vocab_size
        shape = (_ROWS, blocks * self.length)
        return torch.randint(high, shape, generator=self.generator)

    def _start(self) -> _Rows:
        """Rows behind 0, 1 and 1 random blocks."""
        state = self.denoiser.zero_state(_ROWS, _BLOCKS * self.length)
        rows = _Rows(state, torch.zeros(_ROWS, dtype=torch.int64))
        return self._commit(rows, self._tokens(1), _lengths(0, 1, 1, length=self.length))[0]

    def _run(self, role: str, ids: Tensor, rows: _Rows, count: Tensor | None) -> dict[str, Tensor]:
        """The role's outputs by port name, from exactly its inputs, which must stay as they are."""
        graph = self.graphs[role]
        known = {"input_ids": ids, "past_length": rows.past, "commit_length": count}
        known |= {port.past.name: rows.state[port.suffix] for port in self.ports}
        given = {port.name: known[port.name] for port in graph.inputs}
        before = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
        try:
            results = graph(*(given[port.name] for port in graph.inputs))
        except Exception as err:
            raise ExportError(
                f"{self.denoiser.name}: {role} of input_ids {list(ids.shape)} failed: "
                f"{type(err).__name__}: {err} (--debug shows where)"
            ) from err
        for name, tensor in before.items():
            if not _same(tensor, known[name]):
                raise ExportError(
                    f"{self.denoiser.name}: {role} changes its input {name!r} in place: make a new "
                    "tensor, what is carried is only read"
                )
        return {port.name: x for port, x in zip(graph.outputs, results, strict=True)}

    def _commit(self, rows: _Rows, ids: Tensor, count: Tensor) -> tuple[_Rows, dict[str, Tensor]]:
        """Rows after a commit as the runtime keeps them, and what the pass gave."""
        made = self._run("commit", ids, rows, count)
        state = {}
        for port in self.ports:
            new = made[port.present.name]
            if port.update == "append":
                buffer = rows.state[port.suffix].clone()
                for row, (past, more) in enumerate(
                    zip(rows.past.tolist(), count.tolist(), strict=True)
                ):
                    buffer[row, :, past : past + more] = new[row, :, :more]
                new = buffer
            state[port.suffix] = new
        return _Rows(state, rows.past + count), made

    def _denoise(self, rows: _Rows, ids: Tensor) -> Tensor:
        return self._run("denoise", ids, rows, None)["logits"]

    # --- judging

    def _broken(self, law: str, what: str) -> ExportError:
        return ExportError(f"{self.denoiser.name}: the module breaks a law: {law}; {what}")

    def _equal(self, law: str, right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        for name, tensor in right.items():
            if not _same(tensor, found[name]):
                gap = (tensor.double() - found[name].double()).abs().max().item()
                raise self._broken(law, f"{name} differs by {gap:.3g}, expected the same bytes")

    def _close(self, law: str, right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        a, b = ({name: x.numpy() for name, x in side.items()} for side in (right, found))
        result = compare(a, b, self.tolerance)
        if not result.passed:
            limit = self.tolerance
            raise self._broken(
                law,
                f"{result.worst}; allowed: absolute {limit.absolute}, relative {limit.relative}",
            )

    # --- the laws

    def _is_a_function(self) -> None:
        law = "the same inputs give the same bytes"
        rows, ids, count = self._start(), self._tokens(1), _lengths(1, 1, 1, length=self.length)
        canvas = self._tokens(1)
        first, second = ({"logits": self._denoise(rows, canvas)} for _ in range(2))
        self._equal(law, first, second)
        first, second = (self._commit(rows, ids, count)[1] for _ in range(2))
        self._equal(law, first, second)

    def _zero_leaves_bytes(self) -> None:
        law = (
            "a row whose commit_length is 0 keeps its state byte for byte (end with "
            "torch.where(commit_length > 0, new, past))"
        )
        rows = self._start()
        after, made = self._commit(rows, self._tokens(2), torch.zeros(_ROWS, dtype=torch.int64))
        self._equal(law, rows.state, after.state)
        if "last_logits" in made and made["last_logits"].any():
            raise self._broken("last_logits are zeros where commit_length is 0", "they are not")

    def _behind_is_not_seen(self) -> None:
        """Tokens behind commit_length, and columns behind past_length."""
        law = "what stands behind commit_length changes nothing"
        rows, ids, count = self._start(), self._tokens(2), _lengths(0, 1, 2, length=self.length)
        behind = torch.arange(ids.shape[1]) >= count[:, None]
        other = torch.where(behind, self._tokens(2), ids)
        right, made = self._commit(rows, ids, count)
        found, made_too = self._commit(rows, other, count)
        self._close(law, right.state, found.state)
        if "last_logits" in made:
            last, last_too = ({"last_logits": x["last_logits"]} for x in (made, made_too))
            self._close(law, last, last_too)
        law = "what stands behind past_length in a key or value buffer changes nothing"
        canvas = self._tokens(1)
        scribbled = _Rows(dict(right.state), right.past)
        for port in self.ports:
            if port.update == "append":
                tensor = right.state[port.suffix]
                garbage = torch.randn(tensor.shape, generator=self.generator, dtype=tensor.dtype)
                columns = torch.arange(tensor.shape[2])
                filled = (columns < right.past[:, None])[:, None, :, None]
                scribbled.state[port.suffix] = torch.where(filled, tensor, 100 * garbage)
        plain, beside = ({"logits": self._denoise(x, canvas)} for x in (right, scribbled))
        self._close(law, plain, beside)

    def _rows_are_apart(self) -> None:
        law = "a row gives alone what it gives beside others"
        rows, ids, count = self._start(), self._tokens(2), _lengths(2, 0, 1, length=self.length)
        together, _ = self._commit(rows, ids, count)
        canvas = self._tokens(1)
        logits = self._denoise(together, canvas)
        for row in range(_ROWS):
            one = slice(row, row + 1)
            alone = _Rows({k: v[one] for k, v in rows.state.items()}, rows.past[one])
            alone, _ = self._commit(alone, ids[one], count[one])
            right = {**alone.state, "logits": self._denoise(alone, canvas[one])}
            found = {**{k: v[one] for k, v in together.state.items()}, "logits": logits[one]}
            self._close(law, right, found)

    def _once_equals_twice(self, first: int, count: Tensor) -> None:
        """One commit of ``count`` tokens, and one of the first of them before the rest."""
        what = "two blocks" if first == self.length else f"{first} tokens and the rest"
        law = f"one commit of {what} equals two commits"
        rows, ids = self._start(), self._tokens(2)
        once, made = self._commit(rows, ids, count)
        blocks = -(-first // self.length)
        pieces = torch.cat([ids, self._tokens(1)], 1)
        twice, _ = self._commit(
            rows, pieces[:, : blocks * self.length], torch.full((_ROWS,), first)
        )
        twice, made_too = self._commit(
            twice, pieces[:, first:][:, : 2 * self.length], count - first
        )
        self._close(law, once.state, twice.state)
        canvas = self._tokens(1)
        behind_once, behind_twice = ({"logits": self._denoise(x, canvas)} for x in (once, twice))
        self._close(f"{law}, seen from the next block", behind_once, behind_twice)
        if "last_logits" in made:
            more = (count > first)[:, None]  # the second commit of the others is empty
            last, last_too = ({"last_logits": x["last_logits"] * more} for x in (made, made_too))
            self._close(law, last, last_too)


def _lengths(*blocks: int, length: int) -> Tensor:
    return torch.tensor(blocks) * length


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Byte for byte: -0.0 is not 0.0 here."""
    return b is not None and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
