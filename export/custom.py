"""A user's own torch module in the place of a checkpoint: ``fixedstate export pkg.module:build``.

The protocol is :class:`CustomModule`; docs/custom.md explains it. :func:`build_reference` tells
such a name from a checkpoint without importing anything, :func:`load_module` runs the user's code
and checks what it gives, :class:`CustomDenoiser` gives it the surface of the reference denoiser, so
that tracing and comparison are the same for both. :mod:`fixedstate.export.customlaws` finds out
whether the module keeps the laws of cached decoding.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fixedstate.bundle import DecodeDefaults, Source, sha256_of
from fixedstate.errors import ExportError, UsageError
from fixedstate.export import checkpoint_files as disk
from fixedstate.export.denoiser import BlockModel, Passed, State
from fixedstate.spec import ModelSpec
from fixedstate.state import Precision, StateSpec

Note = Callable[[str], None]

_DOTTED = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_PROTOCOL = "see docs/custom.md"


class CustomModule(Protocol):
    """What ``build()`` returns: a ``torch.nn.Module`` that also has these.

    Shapes: B rows, L block length, n blocks. ``state`` holds the carried tensors by suffix, as
    ``StateSpec.of(spec)`` names them (``ssm_state_003``); it is only read. ``past_length`` is None
    for a model without key and value ports.

    Attributes:
        spec: The model. Its LayerSpecs decide what is carried, in which shapes.
    """

    spec: ModelSpec

    def denoise(self, input_ids: Tensor, state: State, past_length: Tensor | None) -> Tensor:
        """Logits of one block behind the committed tokens.

        Args:
            input_ids: [B, L] int64.
            state: Carried tensors by suffix.
            past_length: [B] int64 committed tokens per row.

        Returns:
            [B, L, vocab_rows] float32.
        """

    def commit(
        self,
        input_ids: Tensor,
        state: State,
        past_length: Tensor | None,
        commit_length: Tensor,
    ) -> Mapping[str, Tensor]:
        """The state after the first ``commit_length`` tokens of each row.

        Args:
            input_ids: [B, n*L] int64.
            state: Carried tensors by suffix.
            past_length: [B] int64 committed tokens per row.
            commit_length: [B] int64, 0 to n*L; 0 leaves the row's state byte for byte.

        Returns:
            New tensors by suffix. Keys and values that append hold the n*L new columns only. With
            ``spec.logit_shift`` also ``last_logits`` [B, vocab_rows]: those of token
            ``commit_length - 1``, zeros where that is 0.
        """


@dataclass(frozen=True, slots=True)
class BuildReference:
    """Where ``build`` is: ``pkg.module:build`` or ``path/to/file.py:build``."""

    module: str
    attribute: str

    def __str__(self) -> str:
        """As it was given."""
        return f"{self.module}:{self.attribute}"

    @property
    def is_file(self) -> bool:
        """Whether the left side is a file."""
        return self.module.endswith(".py")


def build_reference(name: str | Path) -> BuildReference | None:
    """The module and callable that a name means; None where it is a checkpoint's.

    Decided by the text alone, a folder of that name apart, which is a checkpoint: nothing is
    imported to find out.

    Example:
        >>> build_reference("pkg.module:build")
        BuildReference(module='pkg.module', attribute='build')
        >>> build_reference("my-checkpoint") is None
        True
    """
    text = str(name)
    module, colon, attribute = text.rpartition(":")
    if not colon or Path(text).exists():
        return None
    if not (_DOTTED.match(module) or module.endswith(".py")) or not attribute.isidentifier():
        return None
    return BuildReference(module, attribute)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module that was built and is what the protocol asks for.

    Attributes:
        denoiser: The module behind the surface of the reference denoiser.
        decode: How it decodes unless told otherwise.
        tokenizer_files: Its tokenizer files by name.
        source: sha256 of the file that holds ``build``, by its name.
    """

    denoiser: CustomDenoiser
    decode: DecodeDefaults = field(default_factory=DecodeDefaults)
    tokenizer_files: dict[str, Path] = field(default_factory=dict)
    source: Source = field(default_factory=Source)


def load_module(reference: BuildReference, notes: Note) -> Loaded:
    """Run the user's code and take the module that it builds.

    Args:
        reference: What to run.
        notes: Told what is run, before it is.

    Raises:
        ExportError: where there is no such module or callable, where its code raises, or where
            what it gives is not what :class:`CustomModule` asks for.
    """
    notes(f"running code from {reference.module}")
    with _importable(reference):
        code = _imported(reference)
        module = _built(reference, code)
    denoiser = CustomDenoiser(str(reference), module)
    return Loaded(
        denoiser,
        _decode(reference, module),
        _tokenizer_files(reference, module, denoiser.spec),
        _source(code),
    )


@contextlib.contextmanager
def _importable(reference: BuildReference) -> Iterator[None]:
    """Imports as ``python -m`` has them (the current folder first), or ``python file.py``."""
    before = list(sys.path)
    sys.path.insert(0, str(Path(reference.module).parent if reference.is_file else Path()))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _imported(reference: BuildReference) -> ModuleType:
    if reference.is_file:
        return _executed(reference)
    try:
        return importlib.import_module(reference.module)
    except ModuleNotFoundError as err:
        wanted = reference.module
        if err.name is not None and (wanted == err.name or wanted.startswith(f"{err.name}.")):
            raise ExportError(
                f"{reference}: there is no module {err.name!r} beside you or installed, nor a "
                f"checkpoint folder {str(reference)!r}: give pkg.module:build, path/to/file.py:"
                "build, or a checkpoint"
            ) from err
        raise _failed(reference, "its import", err) from err
    except (Exception, SystemExit) as err:
        raise _failed(reference, "its import", err) from err


def _executed(reference: BuildReference) -> ModuleType:
    file = Path(reference.module)
    if not file.is_file():
        raise ExportError(
            f"{reference}: there is no file {reference.module}: give path/to/file.py:build"
        )
    name = f"_export_of_{file.stem}"  # its own, so that it replaces no module of that name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[name] = code  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(code)
    except (Exception, SystemExit) as err:
        del sys.modules[name]
        raise _failed(reference, "its import", err) from err
    return code


def _failed(reference: object, what: str, err: BaseException) -> ExportError:
    return ExportError(
        f"{reference}: {what} failed: {type(err).__name__}: {err} (--debug shows where)"
    )


def _built(reference: BuildReference, code: ModuleType) -> nn.Module:
    build = getattr(code, reference.attribute, None)
    if not callable(build):
        found = "is missing" if build is None else f"is of type {type(build).__name__}"
        raise ExportError(
            f"{reference}: {reference.attribute!r} in {reference.module} {found}, expected a "
            f"callable without required arguments; {_PROTOCOL}"
        )
    try:
        with torch.no_grad():
            module = build()
    except (Exception, SystemExit) as err:
        raise _failed(reference, f"{reference.attribute}()", err) from err
    if not isinstance(module, nn.Module):
        raise ExportError(
            f"{reference}: {reference.attribute}() gave a value of type "
            f"{type(module).__name__}, expected a torch.nn.Module; {_PROTOCOL}"
        )
    return module


def _decode(reference: BuildReference, module: nn.Module) -> DecodeDefaults:
    decode = getattr(module, "decode", None)
    if decode is None:
        return DecodeDefaults()
    if not isinstance(decode, DecodeDefaults):
        raise ExportError(
            f"{reference}: the module's attribute decode is of type {type(decode).__name__}, "
            "expected fixedstate.bundle.DecodeDefaults: give one, or name the attribute otherwise"
        )
    return decode


def _tokenizer_files(
    reference: BuildReference, module: nn.Module, spec: ModelSpec
) -> dict[str, Path]:
    given = getattr(module, "tokenizer", None)
    if given is None:
        return {}
    if not isinstance(given, (str, Path)):
        raise ExportError(
            f"{reference}: the module's attribute tokenizer is of type {type(given).__name__}, "
            "expected the path of tokenizer.json or of its folder"
        )
    path = Path(given)
    folder = path if path.is_dir() else path.parent
    files = disk.tokenizer_files(folder)
    if path.name not in (folder.name, "tokenizer.json") or "tokenizer.json" not in files:
        raise ExportError(
            f"{reference}: the module's tokenizer {given} is no tokenizer.json and no folder that "
            "holds one: correct the path"
        )
    size = disk.tokenizer_size(folder)
    if size is not None and size > spec.vocab_rows:
        raise ExportError(
            f"{reference}: the tokenizer has ids up to {size - 1}, the model's vocabulary has "
            f"{spec.vocab_rows} rows: use the tokenizer that belongs to the model"
        )
    return files if path.is_dir() else {"tokenizer.json": path}


def _source(code: ModuleType) -> Source:
    """No name and no folder: two exports of one file are alike wherever it stands."""
    try:
        file = Path(inspect.getsourcefile(code) or "")
    except TypeError:  # compiled code
        return Source()
    return Source(files={file.name: sha256_of(file)} if file.is_file() else {})


class CustomDenoiser(BlockModel):
    """A user's module with the surface of the reference denoiser.

    Args:
        name: What to call it in messages.
        module: Taken over: put into evaluation mode, without gradients.

    Raises:
        ExportError: where the module is not what :class:`CustomModule` asks for, or asks for what
            the protocol cannot carry.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.spec = _spec(name, module)
        _check_tensors(name, module)
        _check_copies(name, module)
        self.precision = Precision()
        self.state_spec = StateSpec.of(self.spec)
        self.module = module
        self.eval().requires_grad_(False)
        self._positions = any(port.kind == "key" for port in self.state_spec.ports)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in: float32, or float64 in a copy that judges."""
        found = [t.dtype for t in _tensors(self.module).values() if t.is_floating_point()]
        return found[0] if found else torch.float32

    def at(self, precision: Precision) -> CustomDenoiser:
        """Itself: a custom module has one precision."""
        assert precision == self.precision
        return self

    def double(self) -> CustomDenoiser:
        """Itself in float64, where the module can be run so; else unchanged.

        What judges a comparison is then the module as it is: a port beyond the tolerance fails.
        """
        super().double()
        length = self.spec.block_len
        ids, count = torch.zeros(1, length, dtype=torch.int64), torch.tensor([length])
        try:
            with torch.inference_mode():
                state, past = self.zero_state(1, length), torch.zeros_like(count)
                made = [*self.commit(ids, state, past, count).values()]
                made.append(self.denoise(ids, state, past))
            runs = all(tensor.dtype == torch.float64 for tensor in made)
        except Exception:  # the module's own: it has float32 written into it
            runs = False
        if not runs:
            super().float()
        return self

    def passes(self, role: str, ids: Tensor, state: State, **lengths: Tensor | None) -> Passed:
        """One pass of the role ``denoise`` or ``commit``."""
        past = lengths.get("past_length")
        if not self._positions:
            past = None
        elif past is None:
            past = ids.new_zeros(ids.shape[0])  # nothing the role gives depends on it
        whole = self._whole(ids, state)
        module: Any = self.module
        if role == "denoise":
            return Passed({}, logits=module.denoise(ids, whole, past))
        assert role == "commit"
        made = dict(module.commit(ids, whole, past, lengths["commit_length"]))
        last = made.pop("last_logits", None)
        return Passed(made, last_logits=last)

    def _whole(self, ids: Tensor, state: State) -> dict[str, Tensor]:
        """Every state, also what the role's ports leave out because nothing it gives needs it.

        A commit pass ends at the last layer that carries anything: its cached keys and values are
        no inputs. The module gets empty columns for them, as many as the other layers have, and
        what it makes of those is dropped with the rest of the layer.
        """
        dtype = self.dtype
        columns = 1
        for port in self.state_spec.appended:
            if port.suffix in state:
                columns = state[port.suffix].shape[2]
        whole = {}
        for port in self.state_spec.ports:
            if port.suffix in state:
                whole[port.suffix] = state[port.suffix].to(dtype)
            else:
                rest = port.past.resolve(B=1, C=1)[1:]
                shape = (ids.shape[0], rest[0], columns, rest[2])
                whole[port.suffix] = torch.zeros(shape, dtype=dtype)
        return whole


def _spec(name: str, module: nn.Module) -> ModelSpec:
    """The module's spec, where the protocol can carry it; its methods are there."""
    spec = getattr(module, "spec", None)
    if not isinstance(spec, ModelSpec):
        found = "missing" if spec is None else f"of type {type(spec).__name__}"
        raise ExportError(
            f"{name}: the module's attribute spec is {found}, expected a ModelSpec that says what "
            f"its layers carry; {_PROTOCOL}"
        )
    for method in ("denoise", "commit"):
        if not callable(getattr(module, method, None)):
            raise ExportError(f"{name}: the module has no method {method!r}; {_PROTOCOL}")
    if spec.objective == "full":
        raise ExportError(
            f"{name}: objective 'full' has neither denoise nor commit: a custom module is "
            "block-causal ('block') or 'causal'"
        )
    if spec.self_conditioning_width:
        raise ExportError(
            f"{name}: self_conditioning_width {spec.self_conditioning_width} needs state from pass "
            "to pass, which denoise of a custom module cannot give: set it to 0"
        )
    if not StateSpec.of(spec).committed:
        raise ExportError(
            f"{name}: no layer of spec carries anything, so that commit would give nothing: a "
            "layer of direction 'forward' or 'block' with a mixer is needed"
        )
    return spec


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by qualified name; shared ones by every name they have."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _check_tensors(name: str, module: nn.Module) -> None:
    """Refuse weights that a float32 graph on any machine cannot hold."""
    for key, tensor in _tensors(module).items():
        if tensor.device.type != "cpu":
            raise ExportError(
                f"{name}: {key} is on the device {tensor.device}, expected cpu: end build() with "
                "module.cpu()"
            )
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            raise ExportError(
                f"{name}: {key} is {tensor.dtype}, expected torch.float32: end build() with "
                "module.float()"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ExportError(f"{name}: {key} holds NaN or infinity: train or load it again")
    for path, part in module.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, Tensor):
                where = f"{path}.{attribute}" if path else attribute
                raise ExportError(
                    f"{name}: {where} is a tensor that the module does not know as its own: make "
                    f"it one by register_buffer({attribute!r}, ...) or nn.Parameter"
                )


def _check_copies(name: str, module: nn.Module) -> None:
    """The comparison runs a copy in float64; tried here without copying the tensors."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(module).values()}
    try:
        copy.deepcopy(module, shared)
    except Exception as err:
        raise ExportError(
            f"{name}: the module cannot be copied, which the comparison needs: "
            f"{type(err).__name__}: {err}; keep files, locks and the like outside the module"
        ) from err


def refuse_options(reference: BuildReference, precision: str, **options: Any) -> None:
    """Options that describe a checkpoint do not go with a module, which says all that itself.

    Raises:
        UsageError: naming the option and where to say it instead.
    """
    if precision != "fp32":
        raise UsageError(
            f"{reference}: --precision {precision} was given, but a custom module is exported as "
            "it computes, in float32: leave the option out"
        )
    for option, value in options.items():
        if value is not None and value is not False:
            flag = "--" + option.replace("_", "-")
            raise UsageError(
                f"{reference}: {flag} was given, but a custom module says this itself (spec, "
                "denoise, commit): leave the option out"
            )
