"""Compiles the kernels to the PTX texts of the package: ``make ptx``.

    python -m fixedstate.plugins.compile            compile, assemble, write plugins/ptx, print
    python -m fixedstate.plugins.compile --check    compile and compare with what is there
    python -m fixedstate.plugins.compile --table    compile, assemble and print only

One version of Triton gives the same bytes everywhere; another one is refused. A text is refused
unless it is what a TensorRT plugin can launch (one thread block per program, the parameter list of
the table, at most 48 KiB of shared memory) and holds nothing of the machine it was made on. Each
is assembled for seven GPU generations by the assemblers that come with Triton, without spills.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fixedstate.errors import BackendError
from fixedstate.plugins.ptx import ISA, SHARED_LIMIT, TARGET, file_name
from fixedstate.plugins.schema import KERNEL_IO, OPS, KernelSpec, Tile

TRITON = "3.8.0"
"""The version whose output the texts are."""

SMS = (80, 87, 89, 90, 100, 110, 120)
"""Generations each text is assembled for: A100, Orin, Ada, Hopper, Blackwell, Thor, RTX 50."""

REGISTER_CAP = 254
"""Most registers of a thread in the largest forms, written into their texts: one below what a GPU
has, so that 255 always means a text of another make. Others get what the assembler finds best.
"""

FOLDER = Path(__file__).resolve().parent / "ptx"
"""Where the texts lie in a source tree."""

_POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int64": "*i64"}


@dataclass(frozen=True, slots=True)
class Text:
    """One compiled kernel.

    Attributes:
        name: Its file name.
        entry: Name of its ``.entry``.
        threads: Threads per thread block.
        shared: Bytes of dynamic shared memory.
        ptx: The text.
        seconds: Time to compile it.
    """

    name: str
    entry: str
    threads: int
    shared: int
    ptx: str
    seconds: float

    @property
    def listing(self) -> dict[str, Any]:
        """Its entry in ``index.json``."""
        return {
            "entry": self.entry,
            "threads": self.threads,
            "shared": self.shared,
            "sha256": hashlib.sha256(self.ptx.encode()).hexdigest(),
        }


def signature(spec: KernelSpec, io: str) -> list[str]:
    """What the kernel's parameters are, in order: pointers, int32 arguments, pointers."""
    pointers = [[_POINTERS[p.dtype_for(io)] for p in ps] for ps in (spec.inputs, spec.outputs)]
    return [*pointers[0], *["i32"] * len(spec.argument_names), *pointers[1]]


def constants(spec: KernelSpec, tile: Tile) -> dict[str, int | bool]:
    """Compile-time parameters of the kernel in a shipped text."""
    values: dict[str, int | bool] = dict(tile.constants)
    if "BLOCK_P" in values:
        values |= {"ONE_CHUNK": tile.longest_block is not None, "SPLIT": True, "UPCAST": False}
    return values


def _cap(tile: Tile) -> int | None:
    large = "BLOCK_P" in tile.constants and (tile.longest_block or 64) > 32
    return REGISTER_CAP if large else None


def _triton() -> Any:
    # Paths of this machine would come with the line numbers; Triton reads this while it compiles.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    if triton.__version__ != TRITON:
        raise BackendError(
            f"Triton {triton.__version__} is installed, the texts are made with {TRITON}: "
            f"pip install triton=={TRITON}"
        )
    return triton


def build(spec: KernelSpec, tile: Tile, io: str) -> Text:
    """Compiles one text.

    Raises:
        BackendError: for another Triton, or a text that must not be shipped; says why.
    """
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fixedstate.plugins import kernels

    kernel = getattr(kernels, spec.torch_name)
    given = constants(spec, tile)
    types: dict[str, str] = {}
    values: dict[tuple[int], int | bool] = {}
    hints: dict[tuple[int], list[list[Any]]] = {}
    parameters = signature(spec, io)
    symbols = [*spec.input_names, *spec.argument_names, *spec.output_names]
    names = kernel.arg_names
    if set(names[len(parameters) :]) != set(given):
        raise BackendError(
            f"{spec.torch_name} has compile-time parameters {names[len(parameters) :]}; its tile "
            f"{tile.label} fixes {sorted(given)}"
        )
    for place, name in enumerate(names):
        if place >= len(parameters):
            types[name], values[place,] = "constexpr", given[name]
            continue
        symbol = symbols[place]
        pointer = parameters[place].startswith("*")
        if name != (f"{symbol}_ptr" if pointer else symbol):
            raise BackendError(
                f"parameter {place} of {spec.torch_name} is {name!r}; the table says {symbol!r}"
            )
        types[name] = parameters[place]
        # Loads of 16 bytes need addresses known to be multiples of it. The scan does better
        # without (E gets no hint): with four channels per thread, one token's values would have
        # to change threads through shared memory.
        if pointer or (symbol in spec.multiples and symbol != "E"):
            hints[place,] = [["tt.divisibility", 16]]

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        compiled = triton.compile(
            ASTSource(kernel, types, values, hints),
            target=GPUTarget("cuda", int(TARGET[3:]), 32),
            options={
                "num_warps": tile.warps,
                "num_stages": 1,  # a loop that is to be pipelined says so itself
                "maxnreg": _cap(tile),
                "ptx_version": int(ISA.replace(".", "")),
            },
        )
    seconds = time.perf_counter() - start
    data = compiled.metadata
    name = file_name(spec, tile, io)
    for what in ("global_scratch_size", "profile_scratch_size", "tmem_size"):
        if getattr(data, what, 0):
            raise BackendError(f"{name}: {what} is {getattr(data, what)}; a plugin has none")
    if data.num_ctas != 1 or data.launch_cooperative_grid or data.launch_pdl:
        raise BackendError(f"{name}: a plugin launches plain thread blocks, no clusters")
    text = clean(compiled.asm["ptx"], spec.torch_name, parameters, name)
    examine(text, spec.torch_name, parameters, tile, int(data.shared), name)
    return Text(name, spec.torch_name, tile.threads, int(data.shared), text, seconds)


def _parameters(text: str, entry: str) -> list[str]:
    return re.findall(rf"\.param \.(\w+)[^,\n]*\b{entry}_param_\d+(?=,?\n)", text)


def clean(text: str, entry: str, parameters: Sequence[str], name: str) -> str:
    """The text without comments and without Triton's two scratch pointers at its end.

    Raises:
        BackendError: if the kernel uses one of them, or there are not two.
    """
    text = re.sub(r"//[^\n]*", "", text)
    text = "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
    found = len(_parameters(text, entry))
    if found != len(parameters) + 2:
        raise BackendError(
            f"{name}: {found} parameters; expected {len(parameters)} and Triton's two pointers to "
            "scratch memory"
        )
    for place in (found - 1, found - 2):
        scratch = f"{entry}_param_{place}"
        if len(re.findall(rf"\b{scratch}\b", text)) != 1:
            raise BackendError(f"{name}: the kernel uses {scratch}, Triton's scratch memory")
        text = re.sub(rf",\n[^\n]*\b{scratch}\n", "\n", text)
    return text


def examine(
    text: str, entry: str, parameters: Sequence[str], tile: Tile, shared: int, name: str
) -> None:
    """Refuses a text that a plugin could not launch, or that says where it was made.

    Raises:
        BackendError: naming the text and what is wrong with it.
    """
    wrong = []
    wanted = ["u64" if kind.startswith("*") else "u32" for kind in parameters]
    if (given := _parameters(text, entry)) != wanted:
        wrong.append(f"parameters are {given}, expected {wanted}")
    if (entries := re.findall(r"\.entry (\w+)", text)) != [entry]:
        wrong.append(f"entries are {entries}, expected {entry}")
    directives = {"version": ISA, "target": TARGET, "reqntid": tile.threads, "maxnreg": _cap(tile)}
    for directive, value in directives.items():
        said = re.findall(rf"^\.{directive} (.*)$", text, re.M)
        if said != ([] if value is None else [str(value)]):
            wrong.append(f".{directive} is {', '.join(said) or 'missing'}, expected {value}")
    if shared > SHARED_LIMIT:
        wrong.append(f"{shared} bytes of shared memory, at most {SHARED_LIMIT} can be had")
    for mark in (".loc", ".file", ".debug", ".section", "/", "\\", "python", ".explicitcluster"):
        if mark in text:
            wrong.append(f"it contains {mark!r}")
    if not text.isascii():
        wrong.append("it is not ASCII")
    if wrong:
        raise BackendError(f"{name}: {'; '.join(wrong)}")


# --- assembling ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assembled:
    """What the assembler says of a text on one GPU generation.

    Attributes:
        sm: The generation.
        registers: Per thread.
        spills: Bytes stored and loaded because registers ran out.
    """

    sm: int
    registers: int
    spills: int


def assemble(text: Text, sm: int) -> Assembled:
    """Assembles a text as a driver will.

    Raises:
        BackendError: if the assembler refuses it.
    """
    folder = Path(_triton().__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / ("ptxas-blackwell" if sm >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "text.ptx")
        source.write_text(text.ptx, encoding="ascii")
        done = subprocess.run(
            [program, "-v", f"-arch=sm_{sm}", source, "-o", Path(scratch, "text.cubin")],
            capture_output=True,
            text=True,
        )
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    if done.returncode or registers is None or spills is None:
        raise BackendError(f"{text.name}: sm_{sm}: {done.stderr.strip() or done.stdout.strip()}")
    return Assembled(sm, int(registers[1]), int(spills[1]) + int(spills[2]))


def table(rows: Iterable[tuple[Text, Sequence[Assembled]]]) -> str:
    """Registers per generation, shared memory, bytes and seconds of each text, as Markdown."""
    sms = " | ".join(f"sm_{sm}" for sm in SMS)
    lines = [f"| text | {sms} | spills | shared | bytes | s |", "|---" * (len(SMS) + 5) + "|"]
    for text, found in rows:
        cells = [text.name.removesuffix(".ptx"), *(str(one.registers) for one in found)]
        cells += [str(sum(one.spills for one in found)), str(text.shared)]
        cells += [str(len(text.ptx)), f"{text.seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- writing ------------------------------------------------------------------------------------


def jobs(only: Sequence[str] = ()) -> list[tuple[KernelSpec, Tile, str]]:
    """Every text to be made, in a fixed order, or those whose file name starts with one of these.

    Raises:
        BackendError: for a name that none starts with.
    """
    every = [(spec, tile, io) for spec in OPS.values() for io in KERNEL_IO for tile in spec.tiles]
    for start in only:
        if not any(file_name(*job).startswith(start) for job in every):
            raise BackendError(f"no text is called {start!r}, e.g. {file_name(*every[0])!r}")
    return [job for job in every if file_name(*job).startswith(tuple(only) or "")]


def listing(texts: Iterable[Text]) -> str:
    """The bytes of ``index.json``."""
    entries = {text.name: text.listing for text in sorted(texts, key=lambda text: text.name)}
    return json.dumps({"triton": TRITON, "texts": entries}, indent=1) + "\n"


def _replace(path: Path, content: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content.encode())
    os.replace(fresh, path)


def write(texts: Sequence[Text], folder: Path) -> None:
    """Puts texts and index into a folder and removes texts that are no longer made.

    The index comes last: a text that it does not describe yet, or no longer, is not used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for text in texts:
        _replace(folder / text.name, text.ptx)
    _replace(folder / "index.json", listing(texts))
    for path in folder.glob("*.ptx"):
        if path.name not in {text.name for text in texts}:
            path.unlink()


def differences(texts: Sequence[Text], folder: Path, whole: bool) -> list[str]:
    """How a folder differs from these texts; with ``whole`` it may hold nothing else."""
    found = []
    for text in texts:
        path = folder / text.name
        if not path.is_file():
            found.append(f"{text.name} is missing")
        elif path.read_bytes() != text.ptx.encode():
            found.append(f"{text.name} differs")
    if whole:
        names = {text.name for text in texts}
        found += [f"{p.name} is not made" for p in folder.glob("*.ptx") if p.name not in names]
    path = folder / "index.json"
    there = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if there.get("triton") != TRITON:
        found.append(f"index.json is of Triton {there.get('triton')}, not {TRITON}")
    listed = there.get("texts", {})
    found += [f"index.json: {t.name}" for t in texts if listed.get(t.name) != t.listing]
    if whole and path.is_file() and path.read_bytes() != listing(texts).encode():
        found.append("index.json differs")
    return found


def _place(job: tuple[KernelSpec, Tile, str]) -> tuple[str, int, str]:
    spec, tile, io = job
    return spec.name, spec.tiles.index(tile), io


def _build_place(place: tuple[str, int, str]) -> Text:
    # a spec holds functions and read-only mappings, which do not travel to another process
    name, number, io = place
    return build(OPS[name], OPS[name].tiles[number], io)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser("fixedstate.plugins.compile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with the folder, write nothing")
    what.add_argument("--table", action="store_true", help="assemble and print, write nothing")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the texts")
    parser.add_argument("--only", nargs="+", default=[], metavar="START", help="names start so")
    parser.add_argument("--json", type=Path, help="write what the table says to this file")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except BackendError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _run(options: argparse.Namespace) -> int:
    chosen = jobs(options.only)
    if options.only and not (options.check or options.table) and options.out == FOLDER:
        raise BackendError("--only makes an incomplete folder: give --out, --check or --table")
    _triton()
    if options.jobs > 1 and len(chosen) > 1:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool:
            texts = list(pool.map(_build_place, [_place(job) for job in chosen]))
    else:
        texts = [build(*job) for job in chosen]

    if options.check:
        found = differences(texts, options.out, whole=not options.only)
        same = [f"{len(texts)} texts are what this source compiles to"]
        sys.stdout.write("\n".join(found or same) + "\n")
        return 1 if found else 0

    pairs = [(text, sm) for text in texts for sm in SMS]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        done = list(threads.map(lambda pair: assemble(*pair), pairs))
    rows = [(text, done[k * len(SMS) :][: len(SMS)]) for k, text in enumerate(texts)]
    size = sum(len(text.ptx) for text in texts)
    sys.stdout.write(f"{table(rows)}\n\n{len(texts)} texts, {size:,} bytes\n")
    if options.json:
        report = [
            {"name": text.name, "bytes": len(text.ptx), "seconds": round(text.seconds, 2)}
            | text.listing
            | {"sms": [asdict(one) for one in found]}
            for text, found in rows
        ]
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    spilling = [
        f"{text.name} on sm_{one.sm}" for text, found in rows for one in found if one.spills
    ]
    if spilling:
        raise BackendError(f"registers spill: {', '.join(spilling)}")
    if not options.table:
        write(texts, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
