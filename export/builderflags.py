"""How TensorRT's builder is set, in one value: every flag it gets, and what engine.json says of it.

Precision is not among the flags: networks are strongly typed, so it stands in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fixedstate.errors import UsageError, require_keys
from fixedstate.export.targets import ENTERPRISE, FLAGS, RTX
from fixedstate.runtime.identity import (
    CARD,
    HARDWARE,
    HARDWARE_LEVELS,
    REFIT,
    REFIT_IDENTICAL,
    STRIP_PLAN,
    TIMING_CACHE,
    VERSION_COMPATIBLE,
)

LEVELS = range(6)
"""What ``optimization_level`` can be; 3 is TensorRT's own choice."""

NEED_A_CARD = (REFIT, STRIP_PLAN)
"""Flags for which the builder runs something on a card, TensorRT-RTX's too (measured on 1.7)."""

_HARDWARE = {"same": "SAME_COMPUTE_CAPABILITY", "ampere+": "AMPERE_PLUS"}


@dataclass(frozen=True, slots=True)
class BuilderFlags:
    """Everything that is set on a builder, its network and its configuration.

    Attributes:
        strongly_typed: The network keeps the dtypes of the graph; nothing else is possible.
        tf32: Products of float32 matrices may be rounded to 10 bits; never, since prefix sums of
            the scans are such products.
        optimization_level: 0 (fast build) to 5; TensorRT only.
        hardware: On which other cards the engine runs, one of
            :data:`fixedstate.runtime.identity.HARDWARE_LEVELS`; TensorRT only.
        version_compatible: Newer versions run the engine too; TensorRT only.
        more: Further flags by TensorRT's names, of :data:`fixedstate.export.targets.FLAGS`.

    Raises:
        UsageError: for values that are none.
    """

    strongly_typed: bool = True
    tf32: bool = False
    optimization_level: int = 3
    hardware: str = "none"
    version_compatible: bool = False
    more: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.strongly_typed or self.tf32:
            raise UsageError(
                "networks are strongly typed and TF32 is off: choose --precision fp16 or bf16"
            )
        if self.optimization_level not in LEVELS:
            raise UsageError(
                f"optimization level {self.optimization_level!r}: expected {LEVELS[0]} to "
                f"{LEVELS[-1]}"
            )
        if self.hardware not in HARDWARE_LEVELS:
            raise UsageError(
                f"hardware compatibility {self.hardware!r} is unknown; use one of "
                f"{', '.join(HARDWARE_LEVELS)}"
            )
        for name in self.more:
            if name not in FLAGS:
                raise UsageError(f"builder flag {name} is not one of {', '.join(FLAGS)}")

    @property
    def is_stripped(self) -> bool:
        """Whether plans get no weights."""
        return STRIP_PLAN in self.more

    @property
    def named(self) -> tuple[str, ...]:
        """:attr:`more` with the way of refitting that STRIP_PLAN takes where none is asked for.

        TensorRT would take the same one; named, it stands in engine.json. An engine is refitted
        with the weights it was built from, for which REFIT would cost speed for nothing.
        """
        if self.is_stripped and REFIT not in self.more:
            return (*self.more, REFIT_IDENTICAL)
        return self.more

    def refusals(self, target: str, cards: bool) -> list[str]:
        """Why a product cannot be set so on a machine; empty where it can.

        Args:
            target: ``tensorrt-rtx`` or ``tensorrt``.
            cards: Whether the machine that builds has a card.
        """
        found = []
        if target == RTX:
            others = {
                "optimization level": self.optimization_level != BuilderFlags().optimization_level,
                "hardware compatibility": self.hardware != "none",
                "version compatibility": self.version_compatible,
            }
            found += [
                f"{name}: {RTX} has none; its engines name their compute capabilities and run on "
                f"one version: leave it out, or build with --target {ENTERPRISE}"
                for name, asked in others.items()
                if asked
            ]
        found += [
            f"builder flag {name}: the builder runs a kernel on a card for it, and here is no "
            "NVIDIA card with a driver: build where there is one, or leave the flag out"
            for name in self.more
            if name in NEED_A_CARD and not cards
        ]
        return found

    def identity(self, target: str, timing_cache: bool, card: str) -> dict[str, Any]:
        """The flags of an engine's identity, as :mod:`fixedstate.runtime.identity` names them.

        Args:
            target: The product.
            timing_cache: Whether one is used.
            card: Model of the card that builds; empty where there is none.
        """
        values: dict[str, Any] = {"STRONGLY_TYPED": self.strongly_typed, "TF32": self.tf32}
        values["PROFILING_VERBOSITY"] = "DETAILED"
        values.update(dict.fromkeys(self.named, True))
        if target == ENTERPRISE:
            values["BUILDER_OPTIMIZATION_LEVEL"] = self.optimization_level
            values[HARDWARE] = self.hardware
            values[VERSION_COMPATIBLE] = self.version_compatible
            values[TIMING_CACHE] = timing_cache
            if card and self.hardware == "none":
                values[CARD] = card
        return values

    def network(self, trt: Any) -> int:
        """The flags of ``create_network``; in TensorRT 11 strong typing needs none."""
        typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return 0 if typed is None else 1 << int(typed)

    def apply(self, trt: Any, config: Any, target: str, capabilities: Sequence[str]) -> None:
        """Set a builder configuration.

        Args:
            trt: The product's module.
            config: Its ``IBuilderConfig``.
            target: The product.
            capabilities: Cards that the engine is for.

        Raises:
            UsageError: for a flag or a card that the installed version does not have.
        """
        config.clear_flag(trt.BuilderFlag.TF32)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        for name in self.named:
            config.set_flag(_member(trt, "BuilderFlag", name))
        if target == RTX:
            config.num_compute_capabilities = len(capabilities)
            for index, one in enumerate(capabilities):
                name = "SM" + one.replace(".", "")
                config.set_compute_capability(_member(trt, "ComputeCapability", name), index)
            return
        config.builder_optimization_level = self.optimization_level
        if self.hardware != "none":
            name = _HARDWARE[self.hardware]
            level = _member(trt, "HardwareCompatibilityLevel", name)
            config.hardware_compatibility_level = level
        if self.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "more": list(self.more)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuilderFlags:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, tuple(item.name for item in fields(cls)), "BuilderFlags")
        return cls(**{**data, "more": tuple(data["more"])})


def _member(trt: Any, kind: str, name: str) -> Any:
    found = getattr(getattr(trt, kind), name, None)
    if found is None:
        raise UsageError(
            f"{kind} {name} is unknown to version {trt.__version__}: install a newer one, or leave "
            "it out"
        )
    return found
