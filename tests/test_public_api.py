"""What a user may import is listed, sorted, there, and documented."""

from __future__ import annotations

import importlib
import inspect

import pytest

MODULES = ("fixedstate", "fixedstate.runtime")


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_importable(name):
    """`from module import *` and the documentation both read the list."""
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(set(module.__all__))
    missing = [entry for entry in module.__all__ if not hasattr(module, entry)]
    assert not missing


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name):
    """A name without a sentence is not an API yet."""
    module = importlib.import_module(name)
    assert module.__doc__
    silent = []
    for entry in module.__all__:
        value = getattr(module, entry)
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            continue  # a constant; its comment is in the source
        # A dataclass without a docstring gets its signature as one.
        if not (value.__doc__ or "").strip() or value.__doc__.startswith(f"{entry}("):
            silent.append(entry)
    assert not silent
