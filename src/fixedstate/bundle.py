"""What is on disk: the bundle folder, its manifest, and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fixedstate.errors import BundleError, SpecError, UsageError, require_keys
from fixedstate.ports import Port
from fixedstate.spec import ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports, top_k_of

SCHEMA = 2
"""Schema number this code writes; every older one opens for ever, a newer one is refused."""

MANIFEST = "bundle.json"
PARITY = "parity.json"
WEIGHTS = "weights.safetensors"
QUANTIZATION = "quantization.json"
"""How a quantised bundle was made, and how far it is from what it was made of."""

NAMES = "names.json"
"""What a folder holds that was exported for another runtime."""

_KEYS = (
    "schema",
    "model",
    "precision",
    "state",
    "graphs",
    "weights",
    "decode",
    "files",
    "source",
    "sha256",
)
_SEAL = b',\n "sha256": "'  # the last entry of bundle.json: the hash of every byte before it
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class DecodeDefaults:
    """How a bundle decodes unless told otherwise.

    Attributes:
        steps: S, denoise passes per block at most; None for one pass per slot (L).
        threshold: Confidence at which a slot is revealed early; None for the fixed quota only.
        temperature: 0 for the most likely token.
        prefill_blocks: Whole prompt blocks committed per pass.
        train_length: Tokens of a training sequence, for reports; None if not known.
    """

    steps: int | None = None
    threshold: float | None = None
    temperature: float = 0.0
    prefill_blocks: int = 16
    train_length: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DecodeDefaults:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, tuple(item.name for item in fields(cls)), "DecodeDefaults")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph file of a bundle and the ports it really has."""

    role: str
    file: str
    sha256: str
    min_onnxruntime: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def top_k(self) -> int:
        """Tokens that its ``top_k`` head gives for a slot."""
        return top_k_of(self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "min_onnxruntime": self.min_onnxruntime,
            "inputs": [port.to_dict() for port in self.inputs],
            "outputs": [port.to_dict() for port in self.outputs],
        }

    @classmethod
    def from_dict(cls, role: str, data: Mapping[str, Any]) -> Graph:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, ("file", "sha256", "min_onnxruntime", "inputs", "outputs"), "graph")
        return cls(
            role,
            data["file"],
            data["sha256"],
            data["min_onnxruntime"],
            tuple(Port.from_dict(port) for port in data["inputs"]),
            tuple(Port.from_dict(port) for port in data["outputs"]),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights came from: published or shipped name, revision, licence, file hashes."""

    name: str = ""
    revision: str = ""
    licence: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        return {
            "name": self.name,
            "revision": self.revision,
            "licence": self.licence,
            "files": dict(sorted(self.files.items())),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Source:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, ("name", "revision", "licence", "files"), "source")
        return cls(data["name"], data["revision"], data["licence"], dict(data["files"]))


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: values only; graphs and weights stay on disk until a back end loads them.

    Attributes:
        path: Its folder.
        spec: The model.
        precision: Dtypes of its ports.
        state: Its carried tensors.
        graphs: Graph by role, ``role@target`` copies included.
        weights: sha256 of ``weights.safetensors``.
        decode: How it decodes unless told otherwise.
        files: sha256 of the other files (tokenizer, licence), by name.
        source: Where the weights came from.
        digest: sha256 of bundle.json: the bundle's identity.
    """

    path: Path
    spec: ModelSpec
    precision: Precision
    state: StateSpec
    graphs: dict[str, Graph]
    weights: str
    decode: DecodeDefaults
    files: dict[str, str]
    source: Source
    digest: str = ""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify_weights: bool = True) -> Bundle:
        """Open a bundle folder and check every hash in it.

        Args:
            path: The folder.
            verify_weights: False skips the hash of the weights file, the slow one.

        Raises:
            BundleError: for a missing, damaged, changed or newer bundle, naming file and remedy.
        """
        folder = Path(path)
        raw = _read_manifest(folder)
        data = manifest_data(
            folder / MANIFEST,
            raw,
            SCHEMA,
            foreign="it is not a bundle manifest",
            damaged="export again",
            newer="export again",
        )
        try:
            bundle = cls._from_data(folder, data, hashlib.sha256(raw).hexdigest())
        except (SpecError, KeyError, TypeError, AttributeError, ValueError) as err:
            raise BundleError(f"{folder / MANIFEST} is damaged: {err}") from err
        if _sealed(raw.rpartition(_SEAL)[0]) != raw:
            raise BundleError(
                f"{folder / MANIFEST} was changed after the export: its last entry is not the "
                "sha256 of the rest: copy the bundle again or export again"
            )
        bundle._verify(verify_weights)
        return bundle

    @classmethod
    def _from_data(cls, folder: Path, data: Mapping[str, Any], digest: str) -> Bundle:
        require_keys(data, _KEYS, MANIFEST)
        spec = ModelSpec.from_dict(data["model"])
        bundle = cls(
            path=folder,
            spec=spec,
            precision=Precision.from_dict(data["precision"]),
            state=StateSpec.from_dict(data["state"]),
            graphs={role: Graph.from_dict(role, g) for role, g in data["graphs"].items()},
            weights=data["weights"],
            decode=DecodeDefaults.from_dict(data["decode"]),
            files=dict(data["files"]),
            source=Source.from_dict(data["source"]),
            digest=digest,
        )
        for role, graph in bundle.graphs.items():
            if (graph.inputs, graph.outputs) != graph_ports(spec, bundle.state, role, graph.top_k):
                raise SpecError(f"the ports of graph {role!r} do not fit the model")
        for name in bundle.hashes():
            if Path(name).name != name or name in ("", ".", ".."):
                raise SpecError(f"file name {name!r} would leave the bundle's folder")
        return bundle

    @property
    def is_quantized(self) -> bool:
        """Whether it was written by a plan of quantisation, which ``quantization.json`` holds."""
        return QUANTIZATION in self.files

    def hashes(self) -> dict[str, str]:
        """sha256 by file name, for every file of the bundle but the manifest and parity.json."""
        graphs = {graph.file: graph.sha256 for graph in self.graphs.values()}
        return {**graphs, WEIGHTS: self.weights, **self.files}

    def _verify(self, verify_weights: bool) -> None:
        verify_files(
            self.path,
            self.hashes(),
            unread=() if verify_weights else (WEIGHTS,),
            noun="bundle",
            event="export",
            remedy="export again",
        )

    def graph(self, role: str, target: str = "") -> Graph:
        """The graph of a role: its ``role@target`` copy where the bundle lists one.

        Raises:
            BundleError: where the bundle has no such graph.
        """
        for name in (f"{role}@{target}", role) if target else (role,):
            if name in self.graphs:
                return self.graphs[name]
        raise BundleError(
            f"{self.path} has no graph {role!r} (it has {', '.join(sorted(self.graphs))}): "
            "export it again with that role"
        )

    def manifest(self) -> bytes:
        """The bytes of bundle.json: sorted, without time, host or path; sealed by their hash."""
        data = {
            "schema": SCHEMA,
            "model": self.spec.to_dict(),
            "precision": self.precision.to_dict(),
            "state": self.state.to_dict(),
            "graphs": {role: graph.to_dict() for role, graph in sorted(self.graphs.items())},
            "weights": self.weights,
            "decode": self.decode.to_dict(),
            "files": dict(sorted(self.files.items())),
            "source": self.source.to_dict(),
        }
        return _sealed(json.dumps(data, indent=1, ensure_ascii=False).encode()[: -len(b"\n}")])


def _sealed(content: bytes) -> bytes:
    """An unfinished JSON object with the hash of its bytes as the last entry."""
    return content + _SEAL + hashlib.sha256(content).hexdigest().encode() + b'"\n}\n'


def manifest_data(
    file: Path, raw: bytes, newest: int, *, foreign: str, damaged: str, newer: str
) -> dict[str, Any]:
    """The values of a manifest whose schema this version reads.

    Args:
        file: The manifest, in the folder that it describes.
        raw: Its bytes.
        newest: The newest schema.
        foreign: What to say of a file that names none.
        damaged: What to do about one that is not JSON.
        newer: What to do about a newer schema, beside a newer fixedstate.

    Raises:
        BundleError: for each of these.
    """
    try:
        data = json.loads(raw)
    except ValueError as err:
        raise BundleError(f"{file} is damaged ({len(raw)} bytes, not JSON): {damaged}") from err
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise BundleError(f"{file} names no schema: {foreign}")
    if schema > newest:
        raise BundleError(
            f"{file.parent} has schema {schema}, this version reads up to {newest}: install a "
            f"newer fixedstate or {newer}"
        )
    return dict(data)


def verify_files(
    folder: Path,
    hashes: Mapping[str, str],
    *,
    unread: Collection[str],
    noun: str,
    event: str,
    remedy: str,
) -> None:
    """Hold the files of a folder against the hashes in its manifest.

    Args:
        folder: The folder.
        hashes: sha256 by file name.
        unread: Files that only have to be there.
        noun: What the folder is.
        event: What made it.
        remedy: What to do about a changed file, beside copying the folder again.

    Raises:
        BundleError: naming the first file that is missing, cannot be read or was changed.
    """
    for name, expected in hashes.items():
        file = folder / name
        if not file.is_file():
            raise BundleError(f"{file} is missing: the {noun} is incomplete, copy it whole")
        if name in unread:
            continue
        found = readable_sha256(file)
        if found != expected:
            raise BundleError(
                f"{file} was changed after the {event}: sha256 {found[:16]}..., expected "
                f"{expected[:16]}...: copy the {noun} again or {remedy}"
            )


def readable_sha256(file: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal.

    Raises:
        BundleError: where it cannot be read.
    """
    try:
        return sha256_of(file)
    except OSError as err:
        raise BundleError(f"{file} cannot be read: {err.strerror or err}") from err


def _read_manifest(folder: Path) -> bytes:
    if not folder.exists():
        raise BundleError(f"{folder} does not exist: give the folder that `export -o` wrote")
    if not folder.is_dir():
        raise BundleError(f"{folder} is not a folder: a bundle is the folder `export -o` wrote")
    try:
        return (folder / MANIFEST).read_bytes()
    except FileNotFoundError as err:
        if (folder / NAMES).is_file():
            raise BundleError(
                f"{folder} was exported for another runtime (it holds {NAMES}, a bundle holds "
                f"{MANIFEST}): make a bundle of its checkpoint with `fixedstate export`, without "
                "--names"
            ) from err
        raise BundleError(
            f"{folder} holds no {MANIFEST}: it is not a bundle; make one with `fixedstate export`"
        ) from err
    except OSError as err:
        raise BundleError(f"{folder / MANIFEST} cannot be read: {err.strerror or err}") from err


def sha256_of(file: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def check_target(target: Path, force: bool) -> None:
    """Refuse an output path that cannot be written, before any work starts.

    Raises:
        UsageError: where something is there already (without force), or the parent folder is
            missing or not writable.
    """
    if target.exists() or target.is_symlink():
        if not force:
            raise UsageError(f"{target} exists: choose another name or add --force to replace it")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is not a folder: make it first or choose another -o")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{parent} is not writable: choose another -o or change its permissions")


@contextlib.contextmanager
def staged_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder that appears under ``target`` whole when the block ends well, else not at all.

    Work is done in a sibling folder that is renamed at the end. With ``force`` an older target
    stays untouched until then.

    Raises:
        UsageError: where the target cannot be written (see :func:`check_target`).
        BundleError: where the disk is full or a file cannot be written.
    """
    check_target(target, force)
    parent = target.absolute().parent
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=parent))
    except OSError as err:
        raise BundleError(f"cannot write beside {target}: {err.strerror}") from err
    try:
        yield staging
        staging.chmod(0o777 & ~umask())
        _sync(staging)
        if target.exists() or target.is_symlink():
            _replace(target, staging)
        else:
            staging.rename(target)
    except OSError as err:
        raise BundleError(
            f"writing {target} failed: {err.strerror or err}; nothing was left behind"
        ) from err
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(target: Path, staging: Path) -> None:
    """Put the staged folder in the place of an older target, which goes back if that fails."""
    parent = target.absolute().parent
    retired = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=parent))
    try:
        target.rename(retired / "old")
        try:
            staging.rename(target)
        except BaseException:
            (retired / "old").rename(target)
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            retired.rmdir()  # empty, or an older target that could not go back: that one stays
        raise
    shutil.rmtree(retired, ignore_errors=True)


def umask() -> int:
    """The process's file mode mask: files appear with the modes a user expects."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def write_atomic(file: Path, *pieces: bytes | memoryview) -> None:
    """Write a file of these pieces, one behind the other, that appears whole or not at all.

    Raises:
        UsageError: where a device, a pipe or a folder stands there: it would be replaced.
        BundleError: where the disk is full or the folder is not writable.
    """
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is not a regular file: choose another name")
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.absolute().parent)
        with os.fdopen(handle, "wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o666 & ~umask())
        Path(temporary).replace(file)
    except OSError as err:
        raise BundleError(f"writing {file} failed: {err.strerror or err}") from err
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
