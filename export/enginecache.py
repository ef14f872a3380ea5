"""The user's cache of engines: one folder per identity, built once, bounded in bytes.

Several processes may use it at once. A lock file per identity, held while an engine is built or in
use, lets one of them build and the others wait; the operating system releases it when a process
ends, however that happens. Entries appear whole or not at all, and are checked like any engine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from fixedstate.bundle import staged_folder
from fixedstate.errors import BackendError, BundleError, UsageError
from fixedstate.runtime.enginefile import EngineFolder
from fixedstate.runtime.identity import Identity

LIMIT_BYTES = 64 << 30
"""Bytes that the cache keeps unless told otherwise."""

Say = Callable[[str], None]

_KEY = re.compile(r"[0-9a-f]{64}")
_USED = ".used"  # a file whose modification time says when the engine was last asked for
_LOCK = ".lock"
_EVICTING = "evict"


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine of the cache.

    Attributes:
        key: Of its identity.
        path: Its folder.
        nbytes: Of all its files.
        used: When it was last asked for, in nanoseconds since 1970.
    """

    key: str
    path: Path
    nbytes: int
    used: int


class EngineCache:
    """Engines by identity, the least recently used ones removed first.

    Args:
        root: Its folder; None for ``engines`` in the user's cache folder.
        limit_bytes: What it may hold after a build; the engine just built always stays.
        notes: Told what happens beside: a damaged entry, one removed, another process waited for.

    Raises:
        UsageError: where there is no home folder, or the limit is below 1.
    """

    def __init__(
        self,
        root: Path | None = None,
        limit_bytes: int = LIMIT_BYTES,
        notes: Say | None = None,
    ) -> None:
        if limit_bytes < 1:
            raise UsageError(
                f"the engine cache is limited to {limit_bytes} bytes; expected 1 or more"
            )
        self.root = default_root() if root is None else root
        self.limit_bytes = limit_bytes
        self._say = notes or (lambda _: None)

    # --- engines

    def find(self, identity: Identity) -> Path | None:
        """The folder of an engine that was built already; None where there is none, or not whole.

        Does not wait, and works where the cache can only be read. What it gives may be removed by
        another process's build at any time: :meth:`held` prevents that.
        """
        opened = self._open(identity.key)[0]
        if opened is None:
            return None
        with contextlib.suppress(OSError):
            self._touch(identity.key)
        return opened.path

    def make(self, identity: Identity, build: Callable[[Path], None]) -> Path:
        """The folder of an engine, built where there is none; see :meth:`held`."""
        with self.held(identity, build) as engine:
            return engine.path

    @contextlib.contextmanager
    def held(self, identity: Identity, build: Callable[[Path], None]) -> Iterator[EngineFolder]:
        """An engine that no other process removes inside the block, built where there is none.

        A damaged entry is built anew. Leave the block as soon as the plans are loaded: other
        processes that want the same engine wait for its end. One thread cannot hold an engine
        twice.

        Args:
            identity: Of the engine.
            build: Makes it in the empty folder it is given; what it raises is passed on and leaves
                nothing behind.

        Raises:
            UsageError: where the cache cannot be written.
            BackendError: where what was built is no whole engine of that identity.
        """
        key = identity.key
        with self._locked(key):
            self._sweep(key)
            engine, damage = self._open(key)
            if engine is None:
                path = self.root / key
                if path.exists() or path.is_symlink():
                    self._say(f"the cached engine {path} is built again: {damage}")
                with staged_folder(path, force=True) as folder:
                    build(folder)
                    _accept(folder, identity)
                engine = EngineFolder.open(path, verify=False)
            with _explained(self.root, "written"):
                self._touch(key)
            self._evict(key)
            yield engine

    # --- what is there

    def entries(self) -> list[Entry]:
        """Every engine that is there, damaged ones too, the least recently used first.

        Raises:
            UsageError: where the cache cannot be read.
        """
        found = []
        with _explained(self.root, "read"):
            names = os.listdir(self.root) if self.root.is_dir() else []
        for name in names:
            path = self.root / name
            if _KEY.fullmatch(name) and path.is_dir():
                found.append(Entry(name, path, _bytes_of(path), self._used(name)))
        return sorted(found, key=lambda entry: (entry.used, entry.key))

    def clear(self) -> list[Entry]:
        """Remove every engine that is not in use, and what killed builds left behind.

        Returns:
            What was removed.

        Raises:
            UsageError: where the cache cannot be written.
        """
        removed = []
        entries = {entry.key: entry for entry in self.entries()}
        for key in sorted({*entries, *self._left_behind()}):
            with self._free(key) as free:
                if not free:
                    self._say(f"the cached engine {self.root / key} is in use and stays")
                    continue
                self._sweep(key)
                if key in entries and self._remove(key):
                    removed.append(entries[key])
        for stamp in self.root.glob(f"*{_USED}"):
            if not (self.root / stamp.name.removesuffix(_USED)).exists():
                stamp.unlink(missing_ok=True)
        return removed

    # --- parts

    def _open(self, key: str) -> tuple[EngineFolder | None, str]:
        """The engine of an entry, or what is wrong with it."""
        try:
            engine = EngineFolder.open(self.root / key)
        except BundleError as err:
            return None, str(err)
        if engine.identity.key != key:
            return None, f"{engine.path} holds the engine of another identity"
        if engine.identity.is_stripped and not engine.refits:
            return None, f"{engine.path} holds nothing that its plans could be refitted from"
        return engine, ""

    def _evict(self, kept: str) -> None:
        """Remove engines, the least recently used first, until the limit is kept.

        Those that a process holds stay. One process at a time does this: two that count the same
        bytes would remove twice as much.
        """
        with self._locked(_EVICTING):
            for key in self._left_behind() - {kept}:
                with self._free(key) as free:
                    if free:
                        self._sweep(key)
            entries = self.entries()
            total = sum(entry.nbytes for entry in entries)
            for entry in entries:
                if total <= self.limit_bytes:
                    return
                if entry.key == kept:
                    continue
                with self._free(entry.key) as free:
                    if free:
                        self._sweep(entry.key)
                        self._remove(entry.key)
                        total -= entry.nbytes
                        self._say(
                            f"the engine cache was above its limit of {self.limit_bytes} bytes: "
                            f"{entry.path} was removed"
                        )
            if total > self.limit_bytes:
                self._say(
                    f"the engine cache holds {total} bytes of engines in use, above its limit of "
                    f"{self.limit_bytes}"
                )

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a lock, waiting for it."""
        lock = self._lock(name)
        with _explained(self.root, "written"):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if name != _EVICTING:
                    self._say(f"another process builds or loads {self.root / name}: waiting")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _free(self, key: str) -> Iterator[bool]:
        """Whether nobody holds an entry's lock; if so, it is held inside the block."""
        lock, free = self._lock(key), True
        with _explained(self.root, "written"):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                free = False
        try:
            yield free
        finally:
            if free:
                lock.release()

    def _lock(self, name: str) -> FileLock:
        """The lock of an entry. Its file is never removed: a waiting process may have it open."""
        with _explained(self.root, "written"):
            self.root.mkdir(parents=True, exist_ok=True)
        return FileLock(self.root / f"{name}{_LOCK}", thread_local=False)

    def _sweep(self, key: str) -> None:
        """Remove what a killed build left; the caller holds the lock, so none is at work."""
        for path in self.root.glob(f".{key}.*"):
            shutil.rmtree(path, ignore_errors=True)

    def _left_behind(self) -> set[str]:
        """Keys of which a killed build left something."""
        parts = (path.name.split(".") for path in self.root.glob(".*.*"))
        return {part[1] for part in parts if _KEY.fullmatch(part[1])}

    def _remove(self, key: str) -> bool:
        """Remove an entry at once for everybody who looks; the caller holds the lock."""
        with _explained(self.root, "written"):
            retired = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".old", dir=self.root))
            try:
                (self.root / key).rename(retired / "old")
            except FileNotFoundError:
                return False
            finally:
                shutil.rmtree(retired, ignore_errors=True)
                (self.root / f"{key}{_USED}").unlink(missing_ok=True)
        return True

    def _used(self, key: str) -> int:
        for path in (self.root / f"{key}{_USED}", self.root / key):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime_ns
        return 0

    def _touch(self, key: str) -> None:
        """Make an entry the most recently used one, also where the clock was set back."""
        stamps = [self._used(path.name.removesuffix(_USED)) for path in self.root.glob(f"*{_USED}")]
        now = max(time.time_ns(), *(stamp + 1 for stamp in stamps), 0)
        stamp = self.root / f"{key}{_USED}"
        stamp.touch()
        os.utime(stamp, ns=(now, now))


def default_root() -> Path:
    """Folder of the user's engines, e.g. ``~/.cache/fixedstate/engines``.

    Raises:
        UsageError: where the user has no home folder.
    """
    try:
        root = Path(platformdirs.user_cache_dir("fixedstate", appauthor=False)) / "engines"
    except RuntimeError:  # newer versions of that package
        root = Path("~")
    if not root.is_absolute():
        raise UsageError(
            "there is no home folder for the engine cache: give the engine a folder of its own "
            "with -o, or set HOME or XDG_CACHE_HOME to an absolute path"
        )
    return root


@contextlib.contextmanager
def _explained(root: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, NotImplementedError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else err
        raise UsageError(
            f"the engine cache {root} cannot be {what}: {reason}; give the engine a folder of its "
            "own with -o, or set XDG_CACHE_HOME to a folder that can"
        ) from err


def _accept(folder: Path, identity: Identity) -> None:
    """Refuse what a build left that is not the engine asked for."""
    try:
        engine = EngineFolder.open(folder)
    except BundleError as err:
        raise BackendError(f"the build left no whole engine: {err}") from err
    if engine.identity.key != identity.key:
        lines = "; ".join(engine.identity.differences(identity))
        raise BackendError(f"the build made another engine than was asked for: {lines}")


def _bytes_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if path.is_file():
                total += path.stat().st_size
    return total
