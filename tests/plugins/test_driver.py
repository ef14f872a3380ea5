"""The driver's door: what it declares is what cuda.h says, and every refusal names its reason."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from cuda_stand_in import StandIn

from fixedstate.errors import BackendError
from fixedstate.plugins import driver as door
from fixedstate.plugins.driver import SIGNATURES, Driver, parameters
from fixedstate.plugins.schema import OPS

SPEC = OPS["SelectiveScanCommit"]
TEXT = SPEC.text(SPEC.tiles[0], "float16")


@pytest.fixture
def library():
    return StandIn()


@pytest.fixture
def driver(library):
    with Driver(library=library) as opened:
        yield opened
    assert opened.allocated == 0
    assert not library.allocations


# --- cuda.h ---------------------------------------------------------------------------------------

HANDLES = [f"CU{name}" for name in ("context", "module", "function", "stream", "graph")]
HANDLES += ["CUgraphExec", "CUgraphNode", "CUevent"]
C_TYPES = {
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "CUdevice": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUfunction_attribute": ctypes.c_int,
    "CUstreamCaptureMode": ctypes.c_int,
    "CUjit_option*": ctypes.POINTER(ctypes.c_int),
    "int*": ctypes.POINTER(ctypes.c_int),
    "CUdevice*": ctypes.POINTER(ctypes.c_int),
    "size_t": ctypes.c_size_t,
    "size_t*": ctypes.POINTER(ctypes.c_size_t),
    "float*": ctypes.POINTER(ctypes.c_float),
    "unsigned char": ctypes.c_ubyte,
    "unsigned long long": ctypes.c_ulonglong,
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUdeviceptr*": ctypes.POINTER(ctypes.c_ulonglong),
    "char*": ctypes.POINTER(ctypes.c_char),
    "const char*": ctypes.c_char_p,
    "const char**": ctypes.POINTER(ctypes.c_char_p),
    "void*": ctypes.c_void_p,
    "const void*": ctypes.c_void_p,
    "void**": ctypes.POINTER(ctypes.c_void_p),
    **dict.fromkeys(HANDLES, ctypes.c_void_p),
    **{f"{name}*": ctypes.POINTER(ctypes.c_void_p) for name in HANDLES},
}


@pytest.fixture(scope="module")
def header():
    """cuda.h as the Triton wheel brings it."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        pytest.skip("cuda.h comes with Triton, which is not installed")
    path = Path(found.origin).parent / "backends" / "nvidia" / "include" / "cuda.h"
    return path.read_text(errors="replace")


def c_types(declared: str) -> list[object]:
    found = []
    for part in filter(None, (one.strip() for one in declared.split(","))):
        if part == "void":
            continue
        kind = re.sub(r"\s*\w+$", "", part)
        found.append(C_TYPES[re.sub(r"\s*\*", "*", kind)])
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_headers(header, name):
    """ctypes does not look: a wrong type here is a wrong address there."""
    renamed = {"cuGraphInstantiateWithFlags": "cuGraphInstantiate"}
    public = renamed.get(name, name.removesuffix("_v2"))
    found = re.findall(rf"CUresult CUDAAPI {public}\(([^;]*)\);", header)
    assert found, name
    assert list(SIGNATURES[name]) == c_types(found[0])
    if name != public:
        assert re.search(rf"#define {public}\s+(?:__CUDA_API_PT\w+\()?{name}\)?\s", header)


def test_numbers_are_the_headers(header):
    for name, value in {
        "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": door._L2_BYTES,
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": door._MULTIPROCESSORS,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": door._MAJOR,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": door._MINOR,
        "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES": door._LOCAL,
        "CU_FUNC_ATTRIBUTE_NUM_REGS": door._REGISTERS,
        "CU_JIT_INFO_LOG_BUFFER": door._INFO_LOG,
        "CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES": door._INFO_LOG_BYTES,
        "CU_JIT_ERROR_LOG_BUFFER": door._ERROR_LOG,
        "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": door._ERROR_LOG_BYTES,
        "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": door._CAPTURE_THREAD_LOCAL,
    }.items():
        found = re.search(rf"\b{name}\s*=\s*(\d+)", header)
        assert found is not None, name
        assert int(found[1]) == value, name


# --- opening --------------------------------------------------------------------------------------


def test_no_library_says_so(monkeypatch):
    monkeypatch.setattr(door, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(BackendError, match=r"no CUDA driver: libcuda-that-is-not-there.*function"):
        Driver()


def test_old_library_is_named_by_what_it_lacks(library):
    del library.cuGraphInstantiateWithFlags
    with pytest.raises(BackendError, match=r"no cuGraphInstantiateWithFlags; install a driver"):
        Driver(library=library)


@pytest.mark.parametrize("device", [1, -1])
def test_device_that_is_not_there(library, device):
    with pytest.raises(BackendError, match=rf"device {device} was asked for; the driver reports 1"):
        Driver(device, library=library)


def test_what_a_driver_says_about_itself(driver):
    assert driver.name == "a stand-in without a card"
    assert driver.compute_capability == (9, 0)
    assert driver.version == (13, 1)
    assert driver.multiprocessors == 2


def test_every_result_is_named(library):
    library._cuInit = lambda flags: None
    with Driver(library=library) as driver:
        with pytest.raises(BackendError, match=r"cuMemFree_v2.*INVALID_VALUE \(1\): text of 1"):
            driver.call("cuMemFree_v2", 12345)
        with pytest.raises(BackendError, match=r"cuX failed with an unknown CUresult \(4711\)"):
            driver._check("cuX", 4711)


def test_error_inside_with_is_the_one_that_is_shown(library):
    """After a fault every call fails, the ones that clean up as well."""
    library.faults[TEXT.entry] = 700

    def run():
        with Driver(library=library) as driver, driver.allocate(16) as memory:
            kernel = driver.load(TEXT.text, TEXT.entry)
            address = memory.address
            library.allocations.clear()
            library._objects.clear()
            library._objects[kernel.handle] = (kernel.module, TEXT.entry)
            raise BackendError(f"first, at {address}")

    with pytest.raises(BackendError, match="first"):
        run()


def test_close_twice(library):
    driver = Driver(library=library)
    driver.load(TEXT.text, TEXT.entry)
    driver.close()
    driver.close()
    assert not library._objects or all(isinstance(v, tuple) for v in library._objects.values())


def test_another_thread_makes_the_context_current(driver):
    found = []
    worker = threading.Thread(target=lambda: (driver.make_current(), found.append(1)))
    worker.start()
    worker.join()
    assert found == [1]


# --- texts ----------------------------------------------------------------------------------------


def test_parameters_of_every_shipped_text():
    """Pointers of inputs, int32 arguments, pointers of outputs."""
    for spec in OPS.values():
        expected = (
            ["pointer"] * len(spec.inputs)
            + ["int32"] * len(spec.argument_names)
            + ["pointer"] * len(spec.outputs)
        )
        for tile in spec.tiles:
            for io in ("float16", "bfloat16"):
                text = spec.text(tile, io)
                assert parameters(text.text, text.entry) == tuple(expected)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (".param .b8 p0[16]", "64-bit"),
        (".param .u16 p0", "64-bit"),
        (".param .align 8 .b64 p0[2]", "64-bit"),
    ],
)
def test_parameters_of_other_kinds_are_refused(declaration, message):
    with pytest.raises(BackendError, match=message):
        parameters(f".visible .entry f({declaration}) {{ ret; }}", "f")


def test_parameters_reads_what_compilers_write():
    text = """
    // .entry f(.param .u64 no)
    .visible .entry f(
        .param .u64 .ptr .global .align 16 f_param_0, /* a, b */
        .param .u32 f_param_1,
        .param .s32 $f
    ) .reqntid 32 { ret; }
    .entry nothing { ret; }
    """
    assert parameters(text, "f") == ("pointer", "int32", "int32")
    assert parameters(text, "nothing") == ()


def test_entry_that_is_not_there():
    with pytest.raises(BackendError, match=r"no entry 'g'; it has fg, f"):
        parameters(".entry fg() { ret; } .entry f() { ret; }", "g")
    with pytest.raises(BackendError, match=r"no entry 'f'; it has fg"):
        parameters(".entry fg() { ret; }", "f")
    assert parameters(".entry fg(.param .u64 p) { } .entry f(.param .u32 p) { }", "f") == ("int32",)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_compiler_log_is_in_the_message(driver, as_bytes):
    text = TEXT.text.replace("ret;", "no_such_thing;")
    with pytest.raises(BackendError, match=r"INVALID_PTX \(218\).*instruction no_such_thing"):
        driver.load(text.encode() if as_bytes else text, TEXT.entry)


def test_text_may_end_in_a_nul(driver):
    assert driver.load(TEXT.text.encode() + b"\0", TEXT.entry).entry == TEXT.entry


def test_unload(driver, library):
    kernel = driver.load(TEXT.text, TEXT.entry)
    driver.unload(kernel)
    assert kernel.module not in library._objects
    driver.unload(kernel)


# --- launches -------------------------------------------------------------------------------------


def arguments(driver):
    kernel = driver.load(TEXT.text, TEXT.entry)
    return kernel, [(kind, 64) for kind in kernel.kinds]


def test_wrong_argument_lists_never_reach_the_driver(driver, library):
    kernel, given = arguments(driver)
    block = (TEXT.threads, 1, 1)
    for wrong in (given[:-1], [*given, ("int32", 1)], given[::-1], [("int64", 1), *given[1:]]):
        with pytest.raises(BackendError, match=r"takes \(pointer, .*was given"):
            kernel.launch((1, 1, 1), block, 0, 0, wrong)
    with pytest.raises(BackendError, match="argument 0 .* no address: 0"):
        kernel.launch((1, 1, 1), block, 0, 0, [("pointer", 0), *given[1:]])
    where = kernel.kinds.index("int32")
    wide = list(given)
    wide[where] = ("int32", 2**31)
    with pytest.raises(BackendError, match="expected an int32"):
        kernel.launch((1, 1, 1), block, 0, 0, wide)
    for grid, threads, shared in (
        ((0, 1, 1), block, 0),
        ((1, 1), block, 0),
        ((1, 1, 1), (-1, 1, 1), 0),
        ((1, 1, 1), block, -1),
    ):
        with pytest.raises(BackendError, match="three positive sizes"):
            kernel.launch(grid, threads, shared, 0, given)
    assert library.launches == []


def test_what_the_driver_refuses_is_named(driver, library):
    kernel, given = arguments(driver)
    with pytest.raises(BackendError, match="INVALID_VALUE"):
        kernel.launch((1, 1, 1), (TEXT.threads + 32, 1, 1), TEXT.shared, 0, given)
    with pytest.raises(BackendError, match="ILLEGAL_ADDRESS"):
        kernel.launch((1, 1, 1), (TEXT.threads, 1, 1), TEXT.shared, 0, given)
    library.faults[TEXT.entry] = 700
    with pytest.raises(
        BackendError, match=r"cuLaunchKernel failed with CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        kernel.launch((1, 1, 1), (TEXT.threads, 1, 1), TEXT.shared, 0, given)


# --- memory, streams, graphs ----------------------------------------------------------------------


def test_memory(driver):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with driver.upload(values.T) as memory:
        assert driver.allocated == 48
        np.testing.assert_array_equal(memory.read(np.float32, (4, 3)), values.T)
        memory.fill(0xFF)
        memory.write(values[0], 16)
        np.testing.assert_array_equal(memory.read(np.float32, (4,), 16), values[0])
        assert np.isnan(memory.read(np.float32, (4,))).all()
        for offset, count in ((-4, 1), (44, 2), (48, 1)):
            with pytest.raises(BackendError, match="of device memory of 48 bytes"):
                memory.write(np.zeros(count, np.float32), offset)
            with pytest.raises(BackendError, match="of device memory of 48 bytes"):
                memory.read(np.float32, (count,), offset)
    memory.free()
    assert driver.allocated == 0
    with pytest.raises(BackendError, match="was freed before this copy"):
        memory.read(np.float32, (1,))
    with pytest.raises(BackendError, match="0 bytes of device memory"):
        driver.allocate(0)
    with pytest.raises(BackendError, match="OUT_OF_MEMORY"):
        driver.allocate(1 << 40)
    free, total = driver.free_bytes()
    assert 0 < free <= total


def test_graph_runs_what_was_captured_and_not_before(driver):
    ones = np.ones(4, np.int64)
    with (
        driver.upload(ones) as source,
        driver.upload(0 * ones) as target,
        driver.stream() as stream,
    ):
        with stream.capture() as graph:
            with pytest.raises(BackendError, match="not captured to its end"):
                graph.launch(stream)
            driver.copy(target.address, source.address, 16, stream.handle)
            driver.copy(target.address + 16, source.address, 16, stream.handle)
        assert graph.nodes == 2
        assert not target.read(np.int64, (4,)).any()
        with graph:
            graph.launch(stream)
            np.testing.assert_array_equal(target.read(np.int64, (4,)), ones)
            target.fill(0)
            graph.launch(stream.handle)
            np.testing.assert_array_equal(target.read(np.int64, (4,)), ones)
        with pytest.raises(BackendError, match="destroyed"):
            graph.launch(stream)


def test_stream_can_be_used_after_a_capture_that_failed(driver, library):
    with driver.stream() as stream:
        with pytest.raises(KeyError):
            with stream.capture():
                raise KeyError("mine")
        stream.synchronize()
        with stream.capture() as graph:
            pass
        with graph:
            assert graph.nodes == 0


def test_events(driver):
    with driver.stream() as stream, driver.event() as first, driver.event() as last:
        first.record(stream)
        last.record(stream.handle)
        last.synchronize()
        assert last.milliseconds_since(first) >= 0
