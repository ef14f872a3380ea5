"""How a tensor of a checkpoint stands in the graphs: one definition for model, file, comparison.

The PyTorch denoiser computes with these tensors, and the weights file holds them byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fixedstate.errors import ExportError
from fixedstate.export.islands import is_island
from fixedstate.state import Precision

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""PyTorch's dtype of every name a precision knows."""

_EXPONENTS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}
"""The integer of a float's size, and the bits of its exponent."""

_TURNED = ("_proj.weight", "head.weight")
_CONV = "conv1d.weight"


class WeightSource(Protocol):
    """Where the weights of graphs come from, one at a time."""

    def load(self, name: str) -> Tensor:
        """The weight of that name, in the shape and dtype that the graphs have."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """What becomes of one tensor of the checkpoint layout.

    Attributes:
        source: Its name there.
        make: (tensor, io dtype) -> the tensor as graphs hold it, contiguous.
    """

    source: str
    make: Callable[[Tensor, torch.dtype], Tensor]


def stored(names: Iterable[str]) -> dict[str, Stored]:
    """What graphs hold for tensors of the checkpoint layout, by the graphs' names.

    ``A_log`` becomes ``A``, a linear weight is turned to [in, out], a convolution loses its middle
    axis and has a bias always: a zero one where the checkpoint has none.

    Example:
        >>> list(stored(["embedding.weight", "layers.0.mixer.A_log"]))
        ['embedding.weight', 'layers.0.mixer.A']
    """
    names = list(names)
    out: dict[str, Stored] = {}
    for name in names:
        if name.endswith("A_log"):
            out[name.removesuffix("_log")] = Stored(name, _decay)
        elif name.endswith(_CONV):
            bias = name.removesuffix("weight") + "bias"
            if bias not in names:
                out[bias] = Stored(name, _no_bias)
            out[name] = Stored(name, _taps)
        elif name.endswith(_TURNED):
            out[name] = Stored(name, _turned)
        else:
            out[name] = Stored(name, _island if is_island(name) else _cast)
    return out


def _decay(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A = -exp(A_log), float32; that of Mamba-1 as [N, E], like its state."""
    del dtype
    a = -torch.exp(tensor.float())
    return a.T.contiguous() if a.ndim == 2 else a


def _taps(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).reshape(tensor.shape[0], -1).contiguous()


def _no_bias(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(tensor.shape[0], dtype=dtype, device=tensor.device)


def _turned(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).T.contiguous()


def _island(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    del dtype
    return tensor.float().contiguous()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).contiguous()


class StoredWeights:
    """The weights of a checkpoint as graphs of a precision hold them.

    Args:
        tensors: Own checkpoint layout; read one at a time.
        precision: Of the bundle.
    """

    def __init__(self, tensors: Mapping[str, Tensor], precision: Precision) -> None:
        self._tensors = tensors
        self._dtype = TORCH_DTYPES[precision.io]
        self._stored = stored(tensors)

    def load(self, name: str) -> Tensor:
        """The weight of that name.

        Raises:
            ExportError: where the checkpoint's values do not fit the dtype.
        """
        what = self._stored[name]
        given = self._tensors[what.source]
        made = what.make(given, self._dtype)
        if nonfinite(made):
            largest = float(torch.max(given.min().abs(), given.max().abs()))
            raise ExportError(
                f"tensor {what.source} holds values up to {largest:.3g}, which do not fit "
                f"{str(made.dtype)[6:]} as weight {name}: export at --precision fp32"
            )
        return made


class ModuleWeights:
    """The parameters and buffers of a module as they are.

    Args:
        module: Whose qualified names are the graphs' names.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }

    def load(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._tensors[name]


def nonfinite(tensor: Tensor) -> int:
    """How many elements of a float tensor are NaN or infinite.

    Those have every bit of the exponent set, which is quick to look for in integers; in pieces, as
    that takes little memory.
    """
    if tensor.dtype not in _EXPONENTS:
        return int(tensor.numel() - torch.isfinite(tensor).sum())
    kind, exponent = _EXPONENTS[tensor.dtype]
    count = 0
    for piece in torch.split(tensor.reshape(-1).view(kind), 1 << 20):
        bits = piece & exponent
        if piece.numel() and int(bits.max()) == exponent:
            count += int((bits == exponent).sum())
    return count


def as_stored(tensors: Mapping[str, Tensor], precision: Precision) -> Mapping[str, Tensor]:
    """The weights a bundle of that precision holds, back in float32: what its graphs compute with.

    Args:
        tensors: Own checkpoint layout; each is read and rounded when it is asked for.
        precision: Of the bundle; its float32 islands are not rounded.
    """
    return _AsStored(tensors, precision)


class _AsStored(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], precision: Precision) -> None:
        self._tensors = tensors
        self._dtype = TORCH_DTYPES[precision.io]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor.float() if is_island(name) else tensor.to(self._dtype).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
