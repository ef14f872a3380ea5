"""What the published diffusion formats share: a conditioning that is a constant, and a mask id."""

from __future__ import annotations

from collections.abc import Callable

from fixedstate.errors import CheckpointError
from fixedstate.export.adaln import EMBEDDER, Modulation
from fixedstate.export.published import Piece
from fixedstate.export.published_config import PublishedConfig
from fixedstate.export.weights import Shape

Note = Callable[[str], None]


class DiffusionConfig(PublishedConfig):
    """A config whose model is conditioned on a timestep, which inference holds at 0."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.needed: dict[str, Shape] = {}

    def constant_timestep(self) -> None:
        """Refuse a model that sees the timestep: its conditioning is no constant.

        Raises:
            CheckpointError: where the config says so.
        """
        key = self.keys["time"]
        if self.flag(key, False):
            raise CheckpointError(
                f"config.json has {key} true, expected false: the norms then depend on the "
                "timestep of each pass, and only a constant one can be folded into the weights"
            )
        if self.get(key) is None:
            self.note(f"config.json does not state {key}: taken as false, the default")

    def embedder(self) -> int:
        """Width C of the conditioning; the shapes of the embedder's tensors are noted."""
        first, first_bias, second, second_bias = EMBEDDER
        width, columns = self.shape(first, 2)
        self.agree("cond", width, first)
        shapes = ((width, columns), (width,), (width, width), (width,))
        self.needed |= dict(zip((first, first_bias, second, second_bias), shapes, strict=True))
        return width

    def modulations(self, at: str, parts: int, width: int, cond: int) -> tuple[Modulation, ...]:
        """The places that one linear map modulates, two or three of its parts each."""
        self.needed |= {f"{at}.weight": (parts * width, cond), f"{at}.bias": (parts * width,)}
        return tuple(Modulation(at, parts, first) for first in range(0, parts - 1, 3))

    def piece(self, key: str, *shape: int) -> Piece:
        """A whole tensor of that shape."""
        self.needed[key] = shape
        return Piece(key)

    def layer_count(self, first: str) -> int:
        """Layers in the weights, which the config must agree with.

        Args:
            first: A tensor of the first layer, as ``blocks.0.norm1.weight``.
        """
        prefix = first.partition(".")[0] + "."
        found = {
            int(name.split(".")[1])
            for name in self.shapes
            if name.startswith(prefix) and name.split(".")[1].isdigit()
        }
        count = max(found, default=-1) + 1
        if not count:
            self.shape(first, 1)
        stated = self.size("n_layer")
        if stated is not None and stated != count:
            raise self.conflict(self.keys["n_layer"], stated, f"{count} layers", "")
        return count
