"""The exception tree: every error this package raises on purpose.

    FixedStateError
    ├── UsageError          the request itself is wrong (an option, a length, a threshold): exit 2
    ├── SpecError           a model, layer or state description contradicts itself or is unknown
    ├── CheckpointError     a checkpoint is missing, damaged, partial or contradicts its config
    ├── BundleError         a bundle is missing, damaged, changed, or of a newer schema
    ├── ExportError         a model cannot be exported, or the graph that came out is not allowed
    ├── ParityError         numbers differ between two back ends by more than the tolerance
    ├── BackendError        a back end cannot do what was asked (provider, version, dtype)
    ├── CapacityError       a request does not fit; raised before its first pass
    │   └── BusyError       it would fit, but a server has no place for it now
    ├── DecodeError         decoding cannot go on (a policy that leaves slots open)
    ├── StateError          a saved state is missing, damaged, newer or of another model
    └── CalibrationError    ranges, plans or quantised graphs cannot be made or trusted; has a code

Every message says what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FixedStateError(Exception):
    """Base of every error this package raises on purpose; the command line exits with 1."""

    exit_code = 1


class UsageError(FixedStateError):
    """The request is wrong before any work starts; the command line exits with 2."""

    exit_code = 2


class SpecError(FixedStateError):
    """A ModelSpec, LayerSpec or StateSpec contradicts itself or holds an unknown key."""


class CheckpointError(FixedStateError):
    """A checkpoint is missing, damaged, partial or contradicts its own config."""


class BundleError(FixedStateError):
    """A bundle is missing, damaged, changed since it was written, or of a newer schema."""


class ExportError(FixedStateError):
    """A model cannot be exported, or the exported graph breaks a rule of the portable file."""


class ParityError(FixedStateError):
    """Two back ends disagree by more than the tolerance of their precision."""


class BackendError(FixedStateError):
    """A back end cannot do what was asked: provider, version, dtype or file."""


class CapacityError(FixedStateError):
    """A request does not fit the state buffers or the context limit; nothing was run."""


class BusyError(CapacityError):
    """Nothing is wrong with a request, but too many wait already or the server ends: ask later."""


class DecodeError(FixedStateError):
    """Decoding cannot go on: a policy leaves slots open after its last pass."""


class StateError(FixedStateError):
    """A saved state is missing, damaged, newer, or does not fit the model; nothing was changed."""


class CalibrationError(FixedStateError):
    """Ranges, plans or quantised graphs cannot be made, or not be trusted.

    Args:
        code: Names the kind of failure for programs, such as ``STALE``; never changes.
        message: What was given, what was expected and what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def require_keys(
    data: Mapping[str, Any], known: tuple[str, ...], what: str, optional: tuple[str, ...] = ()
) -> None:
    """Refuse a mapping that holds other keys than the known ones, or lacks one.

    Args:
        data: What was read.
        known: Every key it may hold.
        what: Its name, for messages.
        optional: Those of the known keys that it may lack.

    Raises:
        SpecError: naming the unknown or missing keys and the allowed ones.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"{what} must be a mapping with the keys {', '.join(known)}; got {data!r}")
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise SpecError(f"{what} holds unknown keys {unknown}; known keys: {', '.join(known)}")
    missing = [key for key in known if key not in data and key not in optional]
    if missing:
        raise SpecError(f"{what} lacks the keys {missing}")
