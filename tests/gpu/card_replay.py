"""A chain of Mamba-2 layers, committed block after block by two CUDA graphs.

Every layer has two state buffers. The graph ``ping`` reads the even one and writes the odd one,
``pong`` the other way round, and blocks take them in turn, as a runtime does that never copies a
state. Judged:

* warm-up and capture leave every live buffer as it was;
* the same blocks launched kernel by kernel give the same bytes;
* sampled blocks and layers equal the float64 reference, and go on from the bytes before them;
* no device memory is taken meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from card import Card, Tensor, decode, empty, encode, start
from card_errors import Row, compare

from fixedstate.plugins.driver import Driver, Function, Stream
from fixedstate.plugins.ptx import Ptx
from fixedstate.plugins.schema import OPS, Launch

SPEC = OPS["SsdBlockCommit"]

SOURCES = 8
"""Different inputs of the first layer, taken in turn."""


class Chain:
    """Layers with their weights, activations and two states each, on the device."""

    def __init__(
        self, stack: ExitStack, driver: Driver, sizes: dict[str, int], layers: int, io: str
    ) -> None:
        rng = np.random.default_rng(11)
        self.driver = driver
        self.io = io
        self.layers = layers
        self.block_len = sizes["L"]
        self.found = SPEC.sizes(SPEC.shapes(sizes)[: len(SPEC.inputs)], sizes["L"])
        by_name = dict(zip((p.name for p in SPEC.ports), SPEC.shapes(sizes), strict=True))
        dtypes = {port.name: port.dtype_for(io) for port in SPEC.ports}

        def put(array: np.ndarray) -> Tensor:
            return stack.enter_context(Tensor(driver, array))

        def random(name: str) -> np.ndarray:
            shape = by_name[name]
            if name == "dt":
                return rng.uniform(0.01, 0.1, shape)
            if name == "a":
                return -rng.uniform(0.5, 2.0, shape)
            # with these sizes outputs neither fade nor grow over 24 layers and any number of blocks
            if name == "d":
                return np.full(shape, 0.75)
            size = {"b": 3.0, "c": by_name["c"][-1] ** -0.5}[name]
            return size * rng.standard_normal(shape)

        self.weights = [
            {name: encode(random(name), dtypes[name]) for name in ("dt", "a", "b", "c", "d")}
            for _ in range(layers)
        ]
        self.on_device = [{k: put(v) for k, v in layer.items()} for layer in self.weights]
        self.inputs = [encode(rng.standard_normal(by_name["x"]), io) for _ in range(SOURCES)]
        self.bank = [put(array) for array in self.inputs]
        # activations[i] enters layer i and activations[i + 1] leaves it
        self.activations = [put(empty(io, by_name["x"])) for _ in range(layers + 1)]
        self.initial = [
            rng.standard_normal(by_name["state"]).astype(np.float32) for _ in range(layers)
        ]
        unset = empty("float32", by_name["state"])
        self.even = [put(array) for array in self.initial]
        self.odd = [put(unset) for _ in range(layers)]
        self.spare = [put(array) for array in (self.initial[0], unset)]

    def reset(self) -> None:
        """The states before the first block; the other buffer of each pair holds no numbers."""
        self.driver.synchronize()
        for tensor in (*self.even, *self.odd):
            tensor.reset()

    def feed(self, block: int, stream: Stream) -> None:
        """Put a block's input where the first layer reads it."""
        target, source = self.activations[0], self.bank[block % SOURCES]
        self.driver.copy(target.address, source.address, self.inputs[0].nbytes, stream.handle)

    def run(
        self,
        kernel: Function,
        text: Ptx,
        launch: Launch,
        stream: Stream,
        read: Sequence[Tensor],
        write: Sequence[Tensor],
    ) -> None:
        """Launch all layers once."""
        for layer in range(self.layers):
            address = {name: tensor.address for name, tensor in self.on_device[layer].items()}
            address["x"] = self.activations[layer].address
            address["y"] = self.activations[layer + 1].address
            address["state"] = read[layer].address
            address["new_state"] = write[layer].address
            start(kernel, text, SPEC, launch, address, stream)

    def digest(self) -> str:
        """Of both states of every layer."""
        whole = hashlib.sha256()
        for tensor in (*self.even, *self.odd):
            whole.update(tensor.read().tobytes())
        return whole.hexdigest()

    def guards(self) -> list[str]:
        """Which guards were written."""
        groups = {"even": self.even, "odd": self.odd, "activations": self.activations}
        return [
            f"bytes around {name}[{i}] were written"
            for name, tensors in groups.items()
            for i, tensor in enumerate(tensors)
            if not tensor.guarded()
        ]

    def judge(self, layer: int, read: Tensor, write: Tensor, row: Row) -> list[str]:
        """One layer of the block that has just been run, against the reference."""
        inputs = {
            name: decode(array, SPEC.inputs[SPEC.input_names.index(name)].dtype_for(self.io))
            for name, array in self.weights[layer].items()
        }
        inputs["x"] = decode(self.activations[layer].read(), self.io)
        inputs["state"] = decode(read.read(), "float32")
        y, state = SPEC.reference(inputs, self.block_len)
        problems = compare(row, SPEC, "y", self.io, self.activations[layer + 1].read(), y)
        return problems + compare(row, SPEC, "new_state", "float32", write.read(), state)


def measure(card: Card) -> dict[str, Any]:
    """The chain in float16 and, shorter, in bfloat16."""
    runs = [("float16", 6 if card.small else 1000), ("bfloat16", 3 if card.small else 50)]
    result: dict[str, Any] = {"problems": [], "cut": [], "runs": []}
    for io, blocks in runs:
        if card.left() < 0:
            result["cut"].append(f"{io}: all of it")
            continue
        found = _replay(card, io, blocks)
        result["problems"] += [f"{io}: {text}" for text in found.pop("problems")]
        if found["blocks"] < blocks:
            result["cut"].append(f"{io}: {blocks - found['blocks']} of {blocks} blocks")
        result["runs"].append(found)
    return result


def _replay(card: Card, io: str, blocks: int) -> dict[str, Any]:
    sizes = {"B": 1, "T": 32, "L": 32, "H": 80, "P": 64, "G": 1, "N": 128, "W": 1}
    if card.small:
        sizes |= {"T": 4, "L": 4, "H": 2, "P": 16, "N": 16}
    layers = 3 if card.small else 24
    driver = card.driver
    tile = SPEC.tiles_for(sizes, sizes["L"])[0]
    text = SPEC.text(tile, io)
    kernel = driver.load(text.text, text.entry)
    problems: list[str] = []
    row = Row(text.entry, SPEC.name, io, tile.label, SPEC.tactic(tile))
    with ExitStack() as stack:
        stream = stack.enter_context(driver.stream())
        chain = Chain(stack, driver, sizes, layers, io)
        launch = SPEC.launch(chain.found, tile)

        def layers_once(read: Sequence[Tensor], write: Sequence[Tensor]) -> None:
            chain.run(kernel, text, launch, stream, read, write)

        before = chain.digest()
        scratch = [[tensor] * layers for tensor in chain.spare]
        chain.feed(0, stream)
        layers_once(scratch[0], scratch[1])  # warm-up, away from the live states
        stream.synchronize()
        graphs = []
        for read, write in ((chain.even, chain.odd), (chain.odd, chain.even)):
            with stream.capture() as graph:
                layers_once(read, write)
            graphs.append(stack.enter_context(graph))
        stream.synchronize()
        if chain.digest() != before:
            problems.append("warm-up or capture changed a live state")
        for name, graph in zip(("ping", "pong"), graphs, strict=True):
            if graph.nodes != layers:
                problems.append(f"graph {name} holds {graph.nodes} launches, not {layers}")

        held, free = driver.allocated, driver.free_bytes()[0]
        sampled = {1, blocks // 2, blocks - 1}
        marks: dict[int, str] = {}
        done = 0
        carried: list[bytes] = []
        for block in range(blocks):
            if block % 16 == 0 and card.left() < 0:
                break
            read, write = (chain.even, chain.odd) if block % 2 == 0 else (chain.odd, chain.even)
            chain.feed(block, stream)
            graphs[block % 2].launch(stream)
            done += 1
            if block in sampled:
                stream.synchronize()
                for layer in {0, layers // 2, layers - 1}:
                    for found in chain.judge(layer, read[layer], write[layer], row):
                        problems.append(f"block {block}, layer {layer}: {found}")
                entered = [tensor.read().tobytes() for tensor in read]
                if carried and entered != carried:
                    problems.append(f"block {block} did not start from the states before it")
            carried = []
            if block + 1 in sampled:
                stream.synchronize()
                carried = [tensor.read().tobytes() for tensor in write]
            if _marked(block, blocks):
                stream.synchronize()
                marks[block] = _digest(chain.activations[-1])
        stream.synchronize()
        by_graphs = chain.digest()
        if driver.allocated != held:
            problems.append(f"{driver.allocated - held} bytes of device memory were taken")
        taken = free - driver.free_bytes()[0]

        chain.reset()
        if chain.digest() != before:
            problems.append("the states could not be set back")
        for block in range(done):
            read, write = (chain.even, chain.odd) if block % 2 == 0 else (chain.odd, chain.even)
            chain.feed(block, stream)
            layers_once(read, write)
            if block in marks:
                stream.synchronize()
                if _digest(chain.activations[-1]) != marks[block]:
                    problems.append(f"block {block}: outputs differ from those of single launches")
        stream.synchronize()
        if chain.digest() != by_graphs:
            problems.append(f"after {done} blocks, states differ from those of single launches")
        problems += chain.guards()
        last = decode(chain.activations[-1].read(), io)
        size = float(np.abs(last).max())
        if not 0.1 < size < 1e3:
            problems.append(f"the chain's outputs came to {size:.3g}: it no longer tests anything")

        timed = 4 if card.small else 200
        graph_us = _per_block(driver, stream, timed, lambda n: graphs[n % 2].launch(stream))
        pairs = ((chain.even, chain.odd), (chain.odd, chain.even))
        plain_us = _per_block(driver, stream, timed, lambda n: layers_once(*pairs[n % 2]))
        state_bytes = 2 * layers * chain.initial[0].nbytes
    driver.unload(kernel)
    return {
        "problems": problems,
        "io": io,
        "tile": tile.label,
        "layers": layers,
        "blocks": done,
        "sizes": sizes,
        "state_bytes": state_bytes,
        "free_bytes_taken": taken,
        "graph_us_per_block": graph_us,
        "single_launches_us_per_block": plain_us,
        "bytes_per_block": layers * SPEC.bytes_moved(chain.found, io),
        "largest_output": size,
        "worst": row.worst,
        "inside": row.inside,
        "used": row.used,
    }


def _marked(block: int, blocks: int) -> bool:
    return block % max(1, blocks // 10) == 0 or block == blocks - 1


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.read().tobytes()).hexdigest()


def _per_block(driver: Driver, stream: Stream, count: int, launch: Any) -> float:
    """Microseconds per call of ``launch``: the median of five series."""
    series = []
    for _ in range(5):
        with driver.event() as first, driver.event() as last:
            first.record(stream)
            for number in range(count):
                launch(number)
            last.record(stream)
            last.synchronize()
            series.append(1e3 * last.milliseconds_since(first) / count)
    return round(float(np.median(series)), 2)
