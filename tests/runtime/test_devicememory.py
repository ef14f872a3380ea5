"""What the device's memory asks of the CUDA driver is what cuda.h declares."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from fixedstate.errors import BackendError
from fixedstate.runtime.devicememory import SIGNATURES, Copy2D, DeviceDriver, Scratch

TYPES = {
    "void**": ctypes.POINTER(ctypes.c_void_p),
    "void*": ctypes.c_void_p,
    "const void*": ctypes.c_void_p,
    "size_t": ctypes.c_size_t,
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUstream": ctypes.c_void_p,
    "CUarray": ctypes.c_void_p,
    "CUmemorytype": ctypes.c_int,
    "const CUDA_MEMCPY2D*": ctypes.POINTER(Copy2D),
}


@pytest.fixture(scope="module")
def header():
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        pytest.skip("cuda.h comes with Triton, which is not installed")
    path = Path(found.origin).parent / "backends" / "nvidia" / "include" / "cuda.h"
    return path.read_text(errors="replace")


def kind(declared: str) -> str:
    """The type of ``TYPE name``."""
    return re.sub(r"\s*\*", "*", re.sub(r"\s*\w+$", "", declared.strip()))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_headers(header, name):
    """ctypes does not look: a wrong type is a wrong address."""
    public = name.removesuffix("_v2")
    found = re.findall(rf"CUresult CUDAAPI {public}\(([^;]*)\);", header)
    assert list(SIGNATURES[name]) == [TYPES[kind(part)] for part in found[0].split(",")]
    if name != public:
        assert re.search(rf"#define {public}\s+(?:__CUDA_API_PT\w+\()?{name}\)?\s", header)


def test_copies_are_described_as_in_the_header(header):
    """Fields in order, with their types, and the numbers of the memory types."""
    body = re.search(r"typedef struct CUDA_MEMCPY2D_st \{(.*?)\}", header, re.DOTALL)[1]
    fields = [
        (re.search(r"(\w+)$", part.strip())[1], TYPES[kind(part)])
        for part in re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(";")
        if part.strip()
    ]
    assert fields == list(Copy2D._fields_)
    for name, value in (("HOST", "0x01"), ("DEVICE", "0x02")):
        assert re.search(rf"CU_MEMORYTYPE_{name}\s*=\s*{value}", header)


class Missing:
    """A driver's library without what is new here."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        if name == "cuMemHostAlloc":
            raise AttributeError(name)
        return getattr(self._library, name)


def test_an_old_driver_is_named():
    from cuda_stand_in import StandIn

    with pytest.raises(BackendError, match="has no cuMemHostAlloc; install a driver of CUDA 12"):
        DeviceDriver(library=Missing(StandIn()))


def test_scratch_moves_only_to_grow():
    """Old addresses stay good until everybody has let go of them."""
    import sys

    sys.path.append(str(Path(__file__).parent))
    from trt_runtime_stand_in import Cuda

    cuda = Cuda()
    with DeviceDriver(library=cuda) as driver:
        scratch = Scratch(driver)
        first = scratch.device("x", 1000)
        assert scratch.device("x", 900) == first
        array = scratch.host("x", np.dtype(np.int64), (2, 3))
        array[...] = 7
        assert scratch.replaced == set()
        assert scratch.device("x", 2000) != first
        assert scratch.replaced == {first}
        assert cuda.view(first, 1000).any() == 0
        scratch.host("x", np.dtype(np.int64), (200, 3))
        assert array.tolist() == [[7] * 3] * 2
        scratch.drop_replaced()
        assert scratch.replaced == set()
        assert first not in cuda.allocations
        scratch.free()
    assert not cuda.allocations
    assert not cuda.pinned
