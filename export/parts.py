"""Parts of a model as models of their own: the embedding, one layer, the head.

A part computes with the code of the whole denoiser, and is traced and finished by the same stages;
only what enters and what leaves differs. Hidden values take the place of ids and logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fixedstate.export.denoiser import Denoiser, Passed, State
from fixedstate.export.islands import is_island
from fixedstate.export.passinfo import PassInfo
from fixedstate.export.stored import TORCH_DTYPES
from fixedstate.plugins.torch_ops import PLAIN, BlockOps
from fixedstate.ports import Port
from fixedstate.spec import LayerSpec, ModelSpec
from fixedstate.state import TOP_K, Precision

_EMBEDDING = ("embedding.", "self_conditioning.")
_HEAD = ("norm.", "head.")
_NOTHING = LayerSpec("none", None, direction="forward")
"""A layer that adds nothing: a model has at least one."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a model.

    Attributes:
        name: What reports call it.
        spec: The model with the layers of the part only.
        layers: Their places in the whole model.
        embeds: Whether ids enter, through the embedding; else hidden values.
        heads: Whether logits leave, through the head; else hidden values.
        top_k: Tokens that its ``top_k`` head gives.
    """

    name: str
    spec: ModelSpec
    layers: tuple[int, ...] = ()
    embeds: bool = False
    heads: bool = False
    top_k: int = TOP_K

    @property
    def key(self) -> tuple[ModelSpec, bool, bool]:
        """Parts of one key have one graph and differ by their weights."""
        return self.spec, self.embeds, self.heads

    @property
    def whole(self) -> bool:
        """Whether it is a model by itself, from ids to logits."""
        return self.embeds and self.heads

    def name_of(self, name: str) -> str:
        """What the whole model calls a weight of the part."""
        if not name.startswith("layers."):
            return name
        _, index, rest = name.split(".", 2)
        return f"layers.{self.layers[int(index)]}.{rest}"

    def tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The part's own tensors of the whole model's, still read one at a time."""
        names = {}
        tied = self.spec.tied_embeddings or self.spec.self_conditioning_width > 0
        for name in tensors:
            if name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                if int(index) in self.layers:
                    names[f"layers.{self.layers.index(int(index))}.{rest}"] = name
            elif name.startswith(_EMBEDDING):
                if self.embeds or (self.heads and tied and name == "embedding.weight"):
                    names[name] = name
            elif self.heads and name.startswith(_HEAD):
                names[name] = name
        return _Renamed(tensors, names)

    def model(
        self,
        tensors: Mapping[str, Tensor],
        precision: Precision | None = None,
        ops: BlockOps = PLAIN,
    ) -> Denoiser:
        """The part as a model.

        Args:
            tensors: Of the part, by its own names.
            precision: As for :class:`Denoiser`.
            ops: Likewise.
        """
        if self.whole:
            return Denoiser(self.spec, tensors, precision, ops, self.top_k)
        return PartDenoiser(self, tensors, precision, ops)


class _Renamed(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def parts_of(spec: ModelSpec, reduced: bool = False, top_k: int = TOP_K) -> list[Part]:
    """The embedding, every layer, the head, and two layers from end to end.

    Args:
        spec: The whole model.
        reduced: Whether it has reduced heads: then also its end, from the last mixer on, where
            they leave out the tokens that are not asked for.
        top_k: Tokens that a ``top_k`` head gives.
    """
    parts = [Part("embedding", _with(spec), embeds=True)]
    for index, layer in enumerate(spec.layers):
        if (layer.mixer, layer.mlp) != ("none", "none"):
            parts.append(Part(f"layers.{index}", _with(spec, layer), (index,)))
    parts.append(Part("head", _with(spec), heads=True, top_k=top_k))
    if reduced:
        parts.append(_end(spec, top_k))
    ends = _two_layers(spec)
    name = f"ends+layers.{'+'.join(str(index) for index in ends)}"
    cut = _with(spec, *(spec.layers[index] for index in ends))
    return [*parts, Part(name, cut, ends, embeds=True, heads=True, top_k=top_k)]


def _end(spec: ModelSpec, top_k: int) -> Part:
    """The last layer with a mixer, what is behind it, and the head."""
    last = max(index for index, layer in enumerate(spec.layers) if layer.mixer != "none")
    places = tuple(range(last, len(spec.layers)))
    cut = _with(spec, *(spec.layers[index] for index in places))
    return Part(f"layers.{last}+head", cut, places, heads=True, top_k=top_k)


def _with(spec: ModelSpec, *layers: LayerSpec) -> ModelSpec:
    return replace(spec, layers=layers or (_NOTHING,))


def _two_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Two layers, of two kinds where the model has two, as near to each other as can be."""
    count = len(spec.layers)
    pairs = [(one, two) for one in range(count) for two in range(one + 1, count)]

    def rank(pair: tuple[int, ...]) -> tuple[bool, int, bool, int]:
        layers = [spec.layers[index] for index in pair]
        kinds = [layer.mixer for layer in layers]
        carries = any(layer.stateful for layer in layers)
        return not carries, kinds.count("none"), kinds[0] == kinds[1], pair[1] - pair[0]

    return min(pairs, key=rank) if pairs else (0,)


class PartDenoiser(Denoiser):
    """A denoiser into which hidden values enter, or that gives hidden values.

    Passes go through all its layers: it may stand in the middle of a model, where a commit pass
    goes on behind the last state.
    """

    def __init__(
        self,
        part: Part,
        tensors: Mapping[str, Tensor],
        precision: Precision | None = None,
        ops: BlockOps = PLAIN,
    ) -> None:
        super().__init__(part.spec, tensors, precision, ops, part.top_k)
        self.part = part
        self._last_stateful = len(part.spec.layers)  # none ends the pass

    @property
    def dtype(self) -> torch.dtype:
        """What its activations are computed in."""
        for name in self._names:
            if not is_island(name):
                return self.weight(name).dtype
        return TORCH_DTYPES[self.precision.io]

    def ports(self, role: str) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """Everything the role could read, and what it gives; a graph may read less."""
        spec, state = self.spec, self.state_spec
        usual, given = super().ports(role)
        tokens = usual[0].shape[1]
        stream = "float32" if spec.residual_fp32 else self.precision.io
        enters = usual[0] if self.part.embeds else Port("hidden", stream, ("B", tokens, spec.width))
        inputs = [enters, *(port.past for port in state.committed)]
        if self.part.embeds and role != "commit":
            inputs += [port.past for port in state.stepped]
        if role != "full":
            inputs.append(Port("past_length", "int64", ("B",)))
        if role.startswith("commit"):
            inputs.append(Port("commit_length", "int64", ("B",)))
        inputs += [port for port in usual if port.name == "open_slots"]
        if self.part.heads:
            return tuple(inputs), given
        present = {port.present.name for port in state.committed}
        outputs = [port for port in given if port.name in present]
        outputs.append(Port("hidden_out", stream, ("B", tokens, spec.width)))
        return tuple(inputs), tuple(outputs)

    def _embed(self, ids: Tensor, state: State, info: PassInfo) -> Tensor:
        return super()._embed(ids, state, info) if self.part.embeds else ids

    def passes(self, role: str, ids: Tensor, state: State, **lengths: Tensor | None) -> Passed:
        """One pass of any role; the head's are those of the whole model."""
        if self.part.heads:
            return super().passes(role, ids, state, **lengths)
        info = PassInfo(self.spec, role, ids.shape[1], **lengths)
        x, made = self._run(ids, state, info)
        return Passed(made, hidden=x)
