"""What an engine was made of, and whether it may run here.

An engine belongs to one bundle, one TensorRT product and version, one operating system and a few
kinds of cards. All of it stands in engine.json and is compared before a plan is read, since the
libraries themselves say little, or run the plan and only warn. Nothing here needs TensorRT.

What runs where follows NVIDIA's pages "Engine Compatibility" of TensorRT 11.1 and TensorRT-RTX 1.7
and the support matrix of TensorRT 11.4.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, SpecError, require_keys

SCHEMA = 1
"""Schema number of engine.json that this code writes; a newer one is refused."""

PRODUCTS = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
"""Targets of a build, and what they are called."""

PRECISIONS = ("fp32", "fp16", "bf16")
"""Precisions of an engine, by the dtype of its activations."""

PLUGIN_KINDS = ("aot", "python", "library")
"""Where a plugin's code is when an engine runs: in the plan, in this process, in a library."""

HARDWARE = "hardware_compatibility"
"""Flag of TensorRT: on which other cards an engine runs, one of :data:`HARDWARE_LEVELS`."""

HARDWARE_LEVELS = ("none", "same", "ampere+")
"""Only cards of the same model, of the same compute capability, or all of 8.0 and newer."""

CARD = "card"
"""Flag of TensorRT: model of the card that an engine of hardware level ``none`` was built on."""

VERSION_COMPATIBLE = "VERSION_COMPATIBLE"
"""Flag of TensorRT, by its name there: newer versions run the engine as well."""

STRIP_PLAN = "STRIP_PLAN"
"""Flag of both products, by its name there: the plans hold no weights until they are refitted."""

REFIT = "REFIT"
"""Flag of both products, by its name there: other weights may be put into a plan."""

REFIT_IDENTICAL = "REFIT_IDENTICAL"
"""Flag of both products, by its name there: the weights of the build may be put into a plan."""

TIMING_CACHE = "timing_cache"
"""Flag of TensorRT: whether a timing cache was used. TensorRT-RTX has none."""

Shape = tuple[int, ...]
Bounds = tuple[Shape, Shape, Shape]
Profile = dict[str, Bounds]
"""Least, usual and largest shape of every dynamic input."""

_TEXT = re.compile(r"[^\0-\x1f]+")
_HASH = re.compile(r"[0-9a-f]{64}")
_CAPABILITY = re.compile(r"[1-9]\d{0,2}\.\d")
_VERSION = re.compile(r"\d+(\.\d+)+[\w.+-]*")


# --- where an engine is, and where it runs -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU: its compute capability, e.g. ``8.9``, and its model, empty where not known."""

    capability: str
    name: str = ""

    def __post_init__(self) -> None:
        _check_capability(self.capability)


@dataclass(frozen=True, slots=True)
class Here:
    """What this process can run engines with.

    Attributes:
        product: One of :data:`PRODUCTS`.
        version: Of the installed package, e.g. ``1.7.1.116``; empty where there is none.
        os: See :func:`os_text`.
        cards: By index; empty where there is none, or no driver.
        device: Index of the card that is to be used.
        creators: Version of every registered plugin creator by ``namespace::name``; None where
            nobody has looked.
        texts: sha256 of the kernels that this package would launch, by file; None likewise.
    """

    product: str
    version: str
    os: str
    cards: tuple[Card, ...] = ()
    device: int = 0
    creators: Mapping[str, str] | None = None
    texts: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _check_product(self.product)

    @property
    def card(self) -> Card | None:
        """The card that is to be used; None where there is none of that index."""
        return self.cards[self.device] if 0 <= self.device < len(self.cards) else None

    @property
    def capability(self) -> str | None:
        """Compute capability of that card."""
        return self.card.capability if self.card else None


def os_text() -> str:
    """Operating system and processor as engine.json names them, e.g. ``linux-x86_64``."""
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return f"{platform.system().lower()}-{machine}"


# --- identity ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PluginUse:
    """A plugin that nodes of a plan became.

    Attributes:
        name: Of the operator, e.g. ``SsdBlockDenoise``.
        namespace: Where it is registered.
        version: Of the plugin.
        kind: One of :data:`PLUGIN_KINDS`.
        library: File of kind ``library``, in the engine's folder; empty for the others.
        texts: sha256 of the compiled kernels it may launch, by file.
    """

    name: str
    namespace: str
    version: str
    kind: str
    library: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in (self.name, self.namespace, self.version):
            if not _matches(_TEXT, value):
                raise SpecError(f"a plugin needs name, namespace and version; got {value!r}")
        if self.kind not in PLUGIN_KINDS:
            raise SpecError(
                f"plugin {self.id} is of kind {self.kind!r}; expected {either(PLUGIN_KINDS)}"
            )
        if (self.kind == "library") != bool(self.library):
            raise SpecError(
                f"plugin {self.id} is of kind {self.kind!r} and names the library "
                f"{self.library!r}: plugins of kind 'library' name one, others none"
            )
        if self.library:
            check_file_name(self.library)
        check_hashes(self.texts, f"texts of plugin {self.id}")
        object.__setattr__(self, "texts", dict(sorted(self.texts.items())))

    @property
    def id(self) -> str:
        """``namespace::name``."""
        return f"{self.namespace}::{self.name}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "texts": dict(self.texts)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PluginUse:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, tuple(item.name for item in fields(cls)), "plugin")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Identity:
    """All that an engine was made of: two builds of one identity are the same engine.

    It is known before a build, so it is also the key under which an engine is kept. Capabilities,
    layers and plugins may be given in any order.

    Attributes:
        product: One of :data:`PRODUCTS`.
        version: Of the TensorRT that built it.
        package: Version of this package, whose passes made what TensorRT was given.
        os: Where it runs, see :func:`os_text`.
        capabilities: Compute capabilities it was built for.
        bundle: sha256 of bundle.json.
        weights: sha256 of the bundle's weights.
        graphs: sha256 of the bundle's graph by role.
        precision: One of :data:`PRECISIONS`.
        fp32_layers: Indices of the layers that stayed float32.
        flags: Of the builder: scalars, or tuples of them.
        profiles: Optimization profiles by role, in their order.
        plugins: What nodes became; function bodies are not listed.

    Raises:
        SpecError: for values that no engine can have.
    """

    product: str
    version: str
    package: str
    os: str
    capabilities: tuple[str, ...]
    bundle: str
    weights: str
    graphs: Mapping[str, str]
    precision: str
    fp32_layers: tuple[int, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    profiles: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)
    plugins: tuple[PluginUse, ...] = ()

    def __post_init__(self) -> None:
        _check_product(self.product)
        if not _matches(_VERSION, self.version):
            raise SpecError(f"version {self.version!r} is none, such as 1.7.1.116")
        for name in ("package", "os"):
            if not _matches(_TEXT, getattr(self, name)):
                raise SpecError(f"{name} is {getattr(self, name)!r}; expected a text")
        if not self.capabilities:
            raise SpecError("no compute capability is given; an engine is built for one or more")
        for capability in self.capabilities:
            _check_capability(capability)
        check_hashes({"bundle": self.bundle, "weights": self.weights}, "identity")
        check_hashes(self.graphs, "graphs of the identity")
        if self.precision not in PRECISIONS:
            raise SpecError(f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}")
        for layer in self.fp32_layers:
            if type(layer) is not int or layer < 0:
                raise SpecError(f"float32 layer {layer!r} is no index")
        for name in ("flags", "profiles"):
            if not isinstance(getattr(self, name), Mapping):
                raise SpecError(f"{name} are {getattr(self, name)!r}; expected values by name")
        if set(self.profiles) != set(self.graphs):
            raise SpecError(
                f"there are profiles for {listed(self.profiles)} and graphs for "
                f"{listed(self.graphs)}: every role needs both"
            )
        store = object.__setattr__
        store(self, "capabilities", tuple(sorted(set(self.capabilities), key=_number)))
        store(self, "fp32_layers", tuple(sorted(set(self.fp32_layers))))
        store(self, "graphs", dict(sorted(self.graphs.items())))
        store(self, "flags", {name: _flag(name, self.flags[name]) for name in sorted(self.flags)})
        store(self, "profiles", {role: _profiles(self.profiles[role]) for role in self.graphs})
        store(self, "plugins", tuple(sorted(self.plugins, key=lambda plugin: plugin.id)))
        names = [plugin.id for plugin in self.plugins]
        if len(set(names)) < len(names):
            raise SpecError(f"a plugin is named twice: {', '.join(names)}")
        self._check_flags()

    def _check_flags(self) -> None:
        name = PRODUCTS[self.product]
        if self.product == "tensorrt-rtx":
            for flag in (HARDWARE, CARD, VERSION_COMPATIBLE, TIMING_CACHE):
                if self.flags.get(flag, False) is not False:
                    instead = (
                        "it keeps what it compiles at run time in a runtime cache"
                        if flag == TIMING_CACHE
                        else "its engines name their compute capabilities and run on one version"
                    )
                    raise SpecError(f"{name} has no flag {flag!r}: {instead}; leave it out")
            return
        level = self.flags.get(HARDWARE, "none")
        if level not in HARDWARE_LEVELS:
            raise SpecError(f"flag {HARDWARE!r} is {level!r}; expected {either(HARDWARE_LEVELS)}")
        for flag in (VERSION_COMPATIBLE, TIMING_CACHE):
            if type(self.flags.get(flag, False)) is not bool:
                raise SpecError(f"flag {flag!r} is {self.flags[flag]!r}; expected true or false")
        if type(self.flags.get(CARD, "")) is not str:
            raise SpecError(f"flag {CARD!r} is {self.flags[CARD]!r}; expected a card's model")
        oldest = self.capabilities[0]
        if level == "ampere+" and _number(oldest) < (8, 0):
            raise SpecError(
                f"flag {HARDWARE!r} is 'ampere+' for compute capability {oldest}; it starts at 8.0"
            )

    @property
    def is_stripped(self) -> bool:
        """Whether its plans hold no weights."""
        return bool(self.flags.get(STRIP_PLAN, False))

    @property
    def key(self) -> str:
        """sha256 over all of it: where the user's cache keeps the engine."""
        values = {"what": "fixedstate engine", "schema": SCHEMA, **self.to_dict()}
        return hashlib.sha256(_canonical(values).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **values,
            "capabilities": list(self.capabilities),
            "graphs": dict(self.graphs),
            "fp32_layers": list(self.fp32_layers),
            "flags": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in self.flags.items()
            },
            "profiles": {
                role: [
                    {name: [list(shape) for shape in bounds] for name, bounds in profile.items()}
                    for profile in profiles
                ]
                for role, profiles in self.profiles.items()
            },
            "plugins": [plugin.to_dict() for plugin in self.plugins],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Identity:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, tuple(item.name for item in fields(cls)), "identity")
        for name in ("capabilities", "fp32_layers", "plugins"):
            if not isinstance(data[name], list):
                raise SpecError(f"{name} are {data[name]!r}; expected a list")
        return cls(
            **{
                **data,
                "capabilities": tuple(data["capabilities"]),
                "fp32_layers": tuple(data["fp32_layers"]),
                "plugins": tuple(PluginUse.from_dict(plugin) for plugin in data["plugins"]),
            }
        )

    def differences(self, other: Identity) -> list[str]:
        """One line per value in which another identity differs from this engine's."""
        ours, theirs = _flat(self.to_dict()), _flat(other.to_dict())
        lines = []
        for name in dict.fromkeys((*ours, *theirs)):
            has, wants = (side.get(name, "nothing") for side in (ours, theirs))
            if has != wants:
                if short(has) != short(wants):
                    has, wants = short(has), short(wants)
                lines.append(f"{name}: engine has {has}, here is {wants}")
        return lines

    def rebuild(self, product: str = "", capability: str | None = None) -> str:
        """The command that builds such an engine again.

        Args:
            product: That it is to run on; empty for the same one.
            capability: Of the card it is to run on; None for those it was built for.
        """
        words = ["fixedstate build BUNDLE", f"--target {product or self.product}"]
        words.append(f"--precision {self.precision}")
        if self.fp32_layers:
            words.append("--fp32-layers " + ",".join(map(str, self.fp32_layers)))
        words.append("--compute-capability " + (capability or ",".join(self.capabilities)))
        return " ".join(words)

    def runtime_cache(self, capability: str) -> str:
        """File name under which TensorRT-RTX's runtime cache for this engine is kept.

        An engine's folder never changes, so what is compiled on a card is kept elsewhere, one file
        per engine and kind of card; write it with :func:`fixedstate.bundle.write_atomic`.

        Raises:
            BackendError: for TensorRT, which has none.
        """
        if self.product != "tensorrt-rtx":
            raise BackendError(
                f"{PRODUCTS[self.product]} has no runtime cache: it compiles everything while it "
                "builds, with a timing cache"
            )
        _check_capability(capability)
        return f"{self.key}-{capability}.runtime"


def refusal(
    identity: Identity, here: Here, folder: Path | None = None, *, refits: bool = False
) -> str | None:
    """Why an engine cannot run here: both sides of all that differs, and what to do.

    Args:
        identity: Of the engine.
        here: What there is to run it with.
        folder: The engine's, where its plugin libraries are looked for.
        refits: Whether the folder holds what plans without weights are refitted from.

    Returns:
        One sentence; None where nothing speaks against it.
    """
    reasons: list[str] = []
    remedies: list[str] = []
    fits = here.card is not None and _fits(identity, here.card)
    command = identity.rebuild(here.product, None if fits else here.capability)
    for reason, remedy in (
        *_product_reasons(identity, here),
        *_weight_reasons(identity, refits),
        *_card_reasons(identity, here),
        *_plugin_reasons(identity, here, folder),
    ):
        reasons.append(reason)
        remedies.append(remedy or f"build it again: `{command}`")
    if not reasons:
        return None
    where = f"the engine {folder}" if folder else "this engine"
    remedies = list(dict.fromkeys(remedies))
    return f"{where} cannot run here: {'; '.join(reasons)}: {'; '.join(remedies)}"


_Reasons = Iterator[tuple[str, str]]  # what is wrong, and what to do if not to build it again


def _product_reasons(identity: Identity, here: Here) -> _Reasons:
    name = PRODUCTS[identity.product]
    compatible = identity.flags.get(VERSION_COMPATIBLE, False)
    built = f"it was built by {name} {identity.version}"
    if compatible:
        built += " for it and newer versions"
    if here.product != identity.product:
        there = f"{PRODUCTS[here.product]} {here.version}".strip()
        yield f"{built}, asked to run it is {there}", ""
    elif not here.version:
        extra = {"tensorrt": "trt", "tensorrt-rtx": "rtx"}[identity.product]
        yield (
            f"{built}, here is no {name}",
            f"install fixedstate[{extra}] with {name} {identity.version}",
        )
    elif not _runs(identity.version, here.version, compatible):
        yield f"{built}, here is {name} {here.version}", ""
    if here.os != identity.os:
        yield f"it was built for {identity.os}, here is {here.os}", ""


def _weight_reasons(identity: Identity, refits: bool) -> _Reasons:
    """Plans without weights would run, and compute with whatever is in memory."""
    if identity.is_stripped and not refits:
        yield f"its plans hold no weights (builder flag {STRIP_PLAN}) and are not refitted here", ""


def _runs(built: str, here: str, compatible: bool) -> bool:
    """Whether a version runs what another one built.

    Across major versions the support matrix names 10 to 11, and 8 to 10, which has no plugins of
    ours.
    """
    if built == here:
        return True
    ours, theirs = _version_numbers(built), _version_numbers(here)
    if not compatible or theirs < ours:
        return False
    return ours[0] == theirs[0] or (ours[0], theirs[0]) == (10, 11)


def _card_reasons(identity: Identity, here: Here) -> _Reasons:
    level = identity.flags.get(HARDWARE, "none")
    wanted = " and ".join(identity.capabilities)
    built = f"it was built for compute capability {wanted}"
    if level == "ampere+":
        built = "it was built for compute capability 8.0 and newer"
    if not here.cards:
        yield (
            f"{built}, here is no NVIDIA card with a driver",
            "run it on a machine with such a card, or the bundle on ONNX Runtime",
        )
        return
    if here.card is None:
        last = len(here.cards) - 1
        yield (
            f"{built}, card {here.device} was asked for and there "
            + (f"are cards 0 to {last}" if last else "is card 0 only"),
            "choose a card that is there",
        )
        return
    others = [
        str(index)
        for index, card in enumerate(here.cards)
        if index != here.device and _fits(identity, card)
    ]
    if _fits(identity, here.card):
        return
    remedy = f"choose card {others[0]}, which it fits" if others else ""
    if _capability_fits(identity, here.card.capability):
        model = identity.flags[CARD]
        built = f"it was built on {model} and for no other model ({HARDWARE} is {level!r})"
        yield f"{built}, card {here.device} is {here.card.name}", remedy
    else:
        yield f"{built}, card {here.device} has {here.card.capability}", remedy


def _capability_fits(identity: Identity, capability: str) -> bool:
    if identity.flags.get(HARDWARE, "none") == "ampere+":
        return _number(capability) >= (8, 0)
    return capability in identity.capabilities


def _fits(identity: Identity, card: Card) -> bool:
    model = identity.flags.get(CARD, "")
    alone = identity.flags.get(HARDWARE, "none") == "none" and model and card.name
    return _capability_fits(identity, card.capability) and (not alone or card.name == model)


def _plugin_reasons(identity: Identity, here: Here, folder: Path | None) -> _Reasons:
    for plugin in identity.plugins:
        if plugin.kind == "aot":
            continue  # its kernels stand in the plan
        needs = f"it needs plugin {plugin.id} version {plugin.version}"
        origin, remedy = "", ""
        if plugin.kind == "library":
            path = (folder or Path()) / plugin.library
            origin = f" of library {path}"
            if not path.is_file():
                yield f"{needs}{origin}, which is missing", "copy the engine's folder whole"
                continue
            remedy = f"load {path} before the engine"
        else:
            remedy = "call fixedstate.plugins.library.register_rtx() in this process first"
        if here.creators is not None and plugin.id not in here.creators:
            yield f"{needs}{origin}, for which no creator is registered here", remedy
        elif here.creators is not None and here.creators[plugin.id] != plugin.version:
            yield f"{needs}{origin}, here is version {here.creators[plugin.id]}", ""
        if plugin.kind == "python" and here.texts is not None:
            for file, digest in plugin.texts.items():
                found = here.texts.get(file, "")
                if found != digest:
                    built = f"it was built with kernel {file} of sha256 {short(digest)}"
                    yield f"{built}, here is {short(found) or 'none'}", ""


def other_model(identity: Identity, bundle: Bundle) -> str | None:
    """Why an engine is not that of a bundle: other weights or other graphs, both sides named.

    Returns:
        One sentence; None where it is. Decode defaults and files beside may differ.
    """
    reasons = []
    if identity.weights != bundle.weights:
        reasons.append(
            f"it was built from weights {short(identity.weights)}, {bundle.path} has "
            f"{short(bundle.weights)}"
        )
    for role, digest in identity.graphs.items():
        found = {
            graph.sha256
            for name, graph in sorted(bundle.graphs.items())
            if name.partition("@")[0] == role
        }
        if digest not in found:
            has = " or ".join(short(value) for value in sorted(found)) or "none"
            reasons.append(
                f"its {role} was built from graph {short(digest)}, {bundle.path} has {has}"
            )
    if not reasons:
        return None
    return (
        f"the engine is not of this bundle: {'; '.join(reasons)}: give the bundle it was built "
        f"from, or build it again: `{identity.rebuild()}`"
    )


# --- checks of values ----------------------------------------------------------------------------


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    """Whether a value, of whatever type a file held, is a text of that pattern."""
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _check_product(product: str) -> None:
    if product not in PRODUCTS:
        raise SpecError(f"product {product!r} is none of {', '.join(PRODUCTS)}")


def _check_capability(capability: str) -> None:
    if not _matches(_CAPABILITY, capability):
        raise SpecError(f"compute capability {capability!r} is none, such as 8.9")


def check_hashes(hashes: Mapping[str, str], what: str) -> None:
    """Refuse what is no mapping of names to sha256.

    Raises:
        SpecError: naming the value.
    """
    if not isinstance(hashes, Mapping):
        raise SpecError(f"{what} are {hashes!r}; expected sha256 by name")
    for name, value in hashes.items():
        if not _matches(_HASH, value):
            raise SpecError(f"{what}: {value!r} of {name!r} is no sha256")


def check_file_name(name: str) -> None:
    """Refuse a name that is no plain file name inside a folder.

    Raises:
        SpecError: naming it.
    """
    if not _matches(_TEXT, name) or Path(name).name != name or name in (".", ".."):
        raise SpecError(f"file name {name!r} would leave the engine's folder")


def _flag(name: str, value: Any) -> Any:
    """A flag's value as it comes back from JSON, a list as a tuple."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if type(item) not in (str, bool, int, float) or (
            isinstance(item, float) and not math.isfinite(item)
        ):
            raise SpecError(f"flag {name!r} is {value!r}; expected texts, numbers, true or false")
    return tuple(value) if isinstance(value, list) else value


def _profiles(given: Iterable[Mapping[str, Any]]) -> tuple[Profile, ...]:
    made = []
    for profile in given:
        shapes: Profile = {}
        for name, bounds in sorted(profile.items()):
            least, usual, most = (tuple(shape) for shape in bounds)
            shapes[name] = (least, usual, most)
        made.append(shapes)
    return tuple(made)


# --- words ---------------------------------------------------------------------------------------


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Leaves of nested mappings by path, as JSON text: there 1 is not true, and not 1.0."""
    found: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{path}."))
        elif path == "plugins":
            by_id = {f"{item['namespace']}::{item['name']}": item for item in value}
            found.update(_flat(by_id, f"{path}."))
        elif prefix == "profiles.":
            found.update(_flat({str(index): item for index, item in enumerate(value)}, f"{path}."))
        else:
            found[path] = value if isinstance(value, str) else _canonical(value)
    return found


def short(value: str) -> str:
    """The head of a sha256; any other text as it is."""
    return f"{value[:16]}..." if _HASH.fullmatch(value) else value


def listed(names: Iterable[str]) -> str:
    """Sorted names in a row; ``nothing`` for none."""
    return ", ".join(sorted(names)) or "nothing"


def either(names: Sequence[str]) -> str:
    """Two or more names, quoted, as a choice."""
    return ", ".join(map(repr, names[:-1])) + f" or {names[-1]!r}"
