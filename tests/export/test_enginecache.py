"""The user's cache of engines: built once, whole or not there, the oldest removed first."""

from __future__ import annotations

import errno
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_engine import fill_engine, identity_of, write_placeholder_bundle

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, BundleError, UsageError
from fixedstate.export.enginecache import EngineCache, default_root
from fixedstate.runtime.enginefile import MANIFEST, EngineFolder
from fixedstate.runtime.identity import Identity

ROOT = Path(__file__).resolve().parents[2]
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))

CHILD = """
import os, sys, time
from pathlib import Path
from sample_engine import fill_engine, identity_of
from fixedstate.bundle import Bundle
from fixedstate.export.enginecache import EngineCache

root, place, precision = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
bundle = Bundle.open(place / "my.bundle")
identity = identity_of(bundle, precision=precision)
cache = EngineCache(root, notes=lambda text: print(text, file=sys.stderr, flush=True))

def say(word):
    with open(place / "log", "a") as log:
        log.write(f"{word}\\n")

def wait_for(name):
    while not (place / name).exists():
        time.sleep(0.005)

def build(folder):
    say(f"build {precision}")
    fill_engine(folder, bundle, identity)

"""
"""Head of the programs below; each runs in a process of its own."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Bundle:
    return write_placeholder_bundle(tmp_path_factory.mktemp("bundles") / "my.bundle")


@pytest.fixture
def place(tmp_path, shared) -> Path:
    """A folder with a bundle and room for a cache, for children to work in."""
    shutil.copytree(shared.path, tmp_path / "my.bundle")
    return tmp_path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path, said) -> EngineCache:
    return EngineCache(tmp_path / "engines", notes=said.append)


@contextmanager
def child(place: Path, program: str, precision: str = "fp16") -> Iterator[subprocess.Popen]:
    """A process that runs a program after CHILD; killed if it still runs at the end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", CHILD + program, place / "engines", place, precision]
    process = subprocess.Popen(
        list(map(str, command)),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Until a child has made a file."""
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.005)


def log_of(place: Path) -> list[str]:
    return (place / "log").read_text().split("\n")[:-1] if (place / "log").exists() else []


def builder(
    bundle: Bundle, identity: Identity, filler: int = 0, built: list[str] | None = None
) -> Callable[[Path], None]:
    """What makes an engine of an identity; notes its key."""

    def build(folder: Path) -> None:
        assert os.listdir(folder) == []
        if built is not None:
            built.append(identity.key)
        fill_engine(folder, bundle, identity, filler=filler)

    return build


def variants(bundle: Bundle, count: int) -> list[Identity]:
    """Identities that differ in a flag."""
    return [identity_of(bundle, flags={"number": number}) for number in range(count)]


def never(folder: Path) -> None:
    raise AssertionError("nothing was to be built")


# --- one process ----------------------------------------------------------------------------------


def test_an_engine_is_built_once_and_found_again(cache, shared, said):
    """Under its key, as the folder that -o would have made."""
    identity = identity_of(shared)
    assert cache.find(identity) is None
    assert not cache.root.exists()
    assert cache.entries() == []
    path = cache.make(identity, builder(shared, identity))
    assert path == cache.root / identity.key
    assert EngineFolder.open(path).identity == identity
    assert cache.find(identity) == cache.make(identity, never) == path
    with cache.held(identity, never) as engine:
        assert engine == EngineFolder.open(path)
    (entry,) = cache.entries()
    assert (entry.key, entry.path) == (identity.key, path)
    assert entry.nbytes == sum(file.stat().st_size for file in path.iterdir())
    other = replace(identity, package="0.2.0")
    assert cache.find(other) is None
    assert said == []


def edited(path: Path) -> None:
    plan = path / "denoise.plan"
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")


def cut(path: Path) -> None:
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:100])


def emptied(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def a_dead_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


DAMAGE = {
    edited: "denoise.plan was changed after the build: sha256 ",
    cut: "engine.json is damaged (100 bytes, not JSON)",
    emptied: "holds no engine.json",
    a_file: "is not a folder",
    a_dead_link: "does not exist",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_built_again_and_said_so(cache, shared, said, damage):
    """Never used, never a reason to stop."""
    identity = identity_of(shared)
    path = cache.make(identity, builder(shared, identity))
    damage(path)
    assert cache.find(identity) is None
    assert said == []
    built = []
    assert cache.make(identity, builder(shared, identity, built=built)) == path
    assert built == [identity.key]
    (note,) = said
    assert note.startswith(f"the cached engine {path} is built again: ")
    assert DAMAGE[damage] in note
    assert cache.find(identity) == path


def test_an_entry_of_another_identity_is_built_again(cache, shared, said):
    """Whole, but moved there from another name."""
    first, second = variants(shared, 2)
    cache.make(first, builder(shared, first))
    shutil.copytree(cache.root / first.key, cache.root / second.key)
    assert cache.find(second) is None
    path = cache.make(second, builder(shared, second))
    assert EngineFolder.open(path).identity == second
    assert f"{path} holds the engine of another identity" in said[0]


def test_a_failed_build_leaves_nothing(cache, shared):
    """What it raises is passed on, a fault of ours or not."""
    identity = identity_of(shared)
    for error in (RuntimeError("no"), BackendError("no"), KeyboardInterrupt()):

        def fail(folder: Path, error: BaseException = error) -> None:
            fill_engine(folder, shared, identity)
            raise error

        with pytest.raises(type(error)):
            cache.make(identity, fail)
        assert cache.entries() == []
        assert sorted(os.listdir(cache.root)) == [f"{identity.key}.lock"]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_room(folder: Path) -> None:
        raise full

    with pytest.raises(BundleError, match="No space left on device; nothing was left behind"):
        cache.make(identity, no_room)
    assert cache.find(identity) is None


def test_what_is_no_engine_of_that_identity_is_refused(cache, shared):
    """A build that leaves nothing, one that goes on after the manifest, one of something else."""
    identity = identity_of(shared)
    other = replace(identity, precision="bf16")

    def goes_on(folder: Path) -> None:
        fill_engine(folder, shared, identity)
        (folder / "commit.plan").write_bytes(b"later")

    for build, words in (
        (lambda folder: None, "the build left no whole engine: .*holds no engine.json"),
        (goes_on, "commit.plan was changed after the build"),
        (builder(shared, other), "another engine than was asked for: precision: engine has bf16, "),
    ):
        with pytest.raises(BackendError, match=words):
            cache.make(identity, build)
        assert cache.entries() == []


# --- bytes ----------------------------------------------------------------------------------------


def size_of(cache: EngineCache, bundle: Bundle, filler: int) -> int:
    """Bytes of one engine."""
    identity = identity_of(bundle, flags={"number": -1})
    cache.make(identity, builder(bundle, identity, filler))
    (entry,) = cache.clear()
    return entry.nbytes


def test_the_least_recently_used_goes_first(tmp_path, cache, shared, said):
    """By when it was asked for; neither reading its files nor the order of building counts."""
    size = size_of(cache, shared, 4096)
    small = EngineCache(cache.root, limit_bytes=3 * size + 100, notes=said.append)
    first, second, third, fourth = variants(shared, 4)
    for identity in (first, second, third):
        small.make(identity, builder(shared, identity, 4096))
    assert small.find(first) is not None
    (small.root / second.key / "denoise.plan").read_bytes()
    assert [entry.key for entry in small.entries()] == [second.key, third.key, first.key]
    small.make(fourth, builder(shared, fourth, 4096))
    assert small.find(second) is None
    assert {entry.key for entry in small.entries()} == {first.key, third.key, fourth.key}
    (note,) = said
    limit = 3 * size + 100
    removed = small.root / second.key
    assert note == f"the engine cache was above its limit of {limit} bytes: {removed} was removed"
    assert not (small.root / f"{second.key}.used").exists()


def test_an_engine_above_the_limit_stays_alone(cache, shared, said):
    """It was just paid for; everything else goes."""
    first, second = variants(shared, 2)
    small = EngineCache(cache.root, limit_bytes=1, notes=said.append)
    small.make(first, builder(shared, first))
    small.make(second, builder(shared, second))
    (entry,) = small.entries()
    assert entry.key == second.key
    assert said[-1] == (
        f"the engine cache holds {entry.nbytes} bytes of engines in use, above its limit of 1"
    )


def test_a_clock_that_was_set_back_changes_no_order(cache, shared, monkeypatch):
    """The engine asked for last is the newest, whatever the time says."""
    first, second = variants(shared, 2)
    cache.make(first, builder(shared, first))
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    cache.make(second, builder(shared, second))
    assert [entry.key for entry in cache.entries()] == [first.key, second.key]
    assert cache.find(first) is not None
    assert [entry.key for entry in cache.entries()] == [second.key, first.key]


@settings(max_examples=12)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=10))
def test_any_sequence_of_uses_keeps_the_last_ones(tmp_path_factory, shared, steps):
    """Against a list: room for two engines, made or looked for."""
    cache = EngineCache(tmp_path_factory.mktemp("engines"))
    identities = variants(shared, 4)
    size = size_of(cache, shared, 9)
    cache.limit_bytes = 2 * size + size // 2
    kept: list[int] = []
    for number, look in steps:
        identity = identities[number]
        if look:
            assert (cache.find(identity) is not None) == (number in kept)
            if number not in kept:
                continue
        else:
            built: list[str] = []
            cache.make(identity, builder(shared, identity, 9, built))
            assert bool(built) == (number not in kept)
        kept = [*[other for other in kept if other != number], number][-2:]
        assert [entry.key for entry in cache.entries()] == [identities[n].key for n in kept]


def test_clear_removes_all_but_locks(cache, shared):
    """Engines, their stamps, what killed builds left; twice is once."""
    identities = variants(shared, 3)
    for identity in identities:
        cache.make(identity, builder(shared, identity))
    left = cache.root / f".{'a' * 64}.x1.partial"
    left.mkdir()
    (left / "denoise.plan").write_bytes(b"half")
    (cache.root / f"{'b' * 64}.used").touch()
    (cache.root / "a friend's file").write_text("stays")
    assert {entry.key for entry in cache.clear()} == {identity.key for identity in identities}
    names = set(os.listdir(cache.root))
    assert all(name.endswith(".lock") for name in names - {"a friend's file"})
    assert "a friend's file" in names
    assert cache.clear() == []


# --- several processes ----------------------------------------------------------------------------


def test_processes_that_want_one_engine_build_it_once(place):
    """Started together, they all get it; those that wait say so."""
    program = """
wait_for("go")
def slow(folder):
    build(folder)
    time.sleep(0.5)
print(cache.make(identity, slow))
"""
    with child(place, program) as one, child(place, program) as two, child(place, program) as three:
        (place / "go").touch()
        answers = [finish(process) for process in (one, two, three)]
    assert log_of(place) == ["build fp16"]
    (path,) = {out for out, _ in answers}
    EngineFolder.open(path)
    notes = [err for _, err in answers if err]
    assert all(note == f"another process builds or loads {path}: waiting" for note in notes)


def test_threads_that_want_one_engine_build_it_once(cache, shared):
    """Of one cache object too."""
    identity, built, paths = identity_of(shared), [], []

    def slow(folder: Path) -> None:
        time.sleep(0.2)
        builder(shared, identity, built=built)(folder)

    threads = [
        threading.Thread(target=lambda: paths.append(cache.make(identity, slow))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert built == [identity.key]
    assert paths == [cache.root / identity.key] * 4


def test_different_engines_are_built_at_the_same_time(place):
    """Each build waits for the other one to have begun."""
    program = """
def both(folder):
    (place / precision).touch()
    wait_for({"fp16": "bf16", "bf16": "fp16"}[precision])
    build(folder)
print(cache.make(identity, both))
"""
    with child(place, program, "fp16") as one, child(place, program, "bf16") as two:
        paths = {finish(one)[0], finish(two)[0]}
    assert len(paths) == 2
    assert sorted(log_of(place)) == ["build bf16", "build fp16"]


def test_a_killed_build_leaves_nothing_that_counts(place):
    """Between the plans and the manifest; the next one who asks builds and cleans up."""
    program = """
def half(folder):
    (folder / "denoise.plan").write_bytes(b"half of a plan")
    (place / "begun").touch()
    time.sleep(600)
cache.make(identity, half)
"""
    bundle, said = Bundle.open(place / "my.bundle"), []
    identity = identity_of(bundle)
    cache = EngineCache(place / "engines", notes=said.append)
    with child(place, program) as process:
        wait_for(place / "begun", process)
        assert cache.find(identity) is None  # while it is built
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert list(cache.root.glob(f".{identity.key}.*.partial"))
    assert cache.entries() == []
    assert cache.find(identity) is None
    path = cache.make(identity, builder(bundle, identity))
    assert EngineFolder.open(path).identity == identity
    assert not list(cache.root.glob(".*"))
    assert said == []


def test_leftovers_of_other_engines_go_at_the_next_build(place):
    """They would fill the disk beside the limit."""
    bundle = Bundle.open(place / "my.bundle")
    first, second = variants(bundle, 2)
    cache = EngineCache(place / "engines")
    cache.root.mkdir()
    for suffix in ("partial", "old"):
        folder = cache.root / f".{first.key}.abc.{suffix}"
        folder.mkdir()
        (folder / "denoise.plan").write_bytes(b"half")
    cache.make(second, builder(bundle, second))
    assert not list(cache.root.glob(".*"))


def test_kills_at_any_moment(place):
    """Whole or not there, time after time, and never a lock that stays."""
    program = """
(place / "begun").touch()
for number in range(10**6):
    identity = identity_of(bundle, precision=precision, flags={"number": number % 3})
    cache.make(identity, lambda folder: fill_engine(folder, bundle, identity))
    cache.clear()
"""
    bundle = Bundle.open(place / "my.bundle")
    cache = EngineCache(place / "engines")
    moments = random.Random(7)
    for _ in range(6):
        (place / "begun").unlink(missing_ok=True)
        with child(place, program) as process:
            wait_for(place / "begun", process)
            time.sleep(moments.uniform(0.0, 0.25))
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        for entry in cache.entries():
            assert EngineFolder.open(entry.path).identity.key == entry.key
        for identity in variants(bundle, 3):
            path = cache.make(identity, builder(bundle, identity))
            assert EngineFolder.open(path).identity == identity
        assert not list(cache.root.glob(".*"))


def test_an_engine_in_use_is_not_removed(place):
    """Neither to make room nor by clear, as long as another process holds it."""
    program = """
with cache.held(identity, build) as engine:
    (place / "held").touch()
    wait_for("go on")
    assert (engine.path / "denoise.plan").is_file()
print("done")
"""
    bundle, said = Bundle.open(place / "my.bundle"), []
    cache = EngineCache(place / "engines", limit_bytes=1, notes=said.append)
    held, other = identity_of(bundle), identity_of(bundle, precision="bf16")
    with child(place, program) as process:
        wait_for(place / "held", process)
        cache.make(other, builder(bundle, other))
        assert {entry.key for entry in cache.entries()} == {held.key, other.key}
        assert "bytes of engines in use, above its limit of 1" in said[-1]
        assert [entry.key for entry in cache.clear()] == [other.key]
        assert said[-1] == f"the cached engine {cache.root / held.key} is in use and stays"
        assert cache.find(held) is not None
        (place / "go on").touch()
        assert finish(process)[0] == "done"
    assert [entry.key for entry in cache.clear()] == [held.key]


# --- places that cannot be used -------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, shared, monkeypatch):
    """Before anything is built, with what to do instead."""
    (tmp_path / "file").write_text("x")
    identity = identity_of(shared)
    cache = EngineCache(tmp_path / "file" / "engines")
    for use in (
        lambda: cache.make(identity, never),
        lambda: cache.held(identity, never).__enter__(),
    ):
        with pytest.raises(UsageError) as caught:
            use()
        assert str(caught.value) == (
            f"the engine cache {cache.root} cannot be written: Not a directory; give the engine a "
            "folder of its own with -o, or set XDG_CACHE_HOME to a folder that can"
        )
    assert cache.find(identity) is None

    def refuse(*args, **options):
        raise READ_ONLY

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="cannot be written: Read-only file system"):
        EngineCache(tmp_path / "engines").make(identity, never)


def test_a_cache_that_can_only_be_read_still_finds(cache, shared, monkeypatch):
    """A folder shared with a container: its stamps stay as they are."""
    identity = identity_of(shared)
    path = cache.make(identity, builder(shared, identity))
    before = (cache.root / f"{identity.key}.used").stat().st_mtime_ns

    def refuse(*args, **options):
        raise READ_ONLY

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.find(identity) == path
    monkeypatch.undo()
    assert (cache.root / f"{identity.key}.used").stat().st_mtime_ns == before


def test_the_users_cache_folder(tmp_path, monkeypatch):
    """Where the system says; a user without a home is told, instead of a folder named ~."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == EngineCache().root == tmp_path / "fixedstate" / "engines"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "fixedstate" / "engines"
    monkeypatch.delenv("HOME")

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UsageError, match="there is no home folder for the engine cache"):
        EngineCache()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_byte_is_refused(tmp_path, limit):
    with pytest.raises(UsageError, match=f"limited to {limit} bytes; expected 1 or more"):
        EngineCache(tmp_path, limit_bytes=limit)
