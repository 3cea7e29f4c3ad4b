"""A workload: what a model costs, layer by layer, in the order in which forward uses the layers.

It is all that a simulation needs to know about a model: how long a rank computes on a layer, and
how many bytes of parameters the layer has. `measure/derive.py` makes one by counting operations.

No torch here: a workload is read and written without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from syncline.errors import ConfigError
from syncline.files import write_atomically
from syncline.sizes import Size

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer on one rank, with the name of its module: the model itself is "".

    Times are those of one forward and one backward, of the number of samples it was derived for.
    """

    name: str
    size_bytes: Bytes
    forward_s: Seconds
    backward_s: Seconds


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's layers in order of use; loading a rank's batch of a step takes `input_s`."""

    name: str
    layers: tuple[Layer, ...]
    input_s: Seconds = 0.0
    parameters: tuple[Size, ...] = ()
    """The trained parameters in their order of first use, unused ones last. Empty if only the
    layers' sizes are known."""
    num_statistics: Annotated[int, Meta(ge=0)] = 0
    """Numbers in the running statistics of norm layers, which are averaged in every step."""
    num_counters: Annotated[int, Meta(ge=0)] = 0
    """Norm layers that count the batches they have seen."""
    samples: Annotated[int, Meta(ge=1)] | None = None
    """Samples of one forward, for which the layers' times hold; None if that is not known."""

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)

    def sizes(self) -> tuple[Size, ...]:
        """Return the trained parameters; one for each layer, if only layers are known."""
        return self.parameters or tuple(
            Size(f"{layer.name}.parameters", number, max(1, layer.size_bytes // 4))
            for number, layer in enumerate(self.layers)
        )

    def times_s(self) -> dict[int, tuple[float, float]]:
        """Return forward and backward seconds by the number of a parameter.

        A layer's forward reads all its parameters and its backward comes before any of their
        gradients, so its time belongs to the last of them. The time of a layer without parameters
        belongs to the last parameter used before it.
        """
        last_of = {size.layer: size.number for size in self.sizes() if size.is_used}
        found: dict[int, tuple[float, float]] = {}
        number = next(iter(last_of.values()), 0)
        for layer in self.layers:
            number = last_of.get(layer.name, number)
            forward_s, backward_s = found.get(number, (0.0, 0.0))
            found[number] = (forward_s + layer.forward_s, backward_s + layer.backward_s)
        return found


def read(path: str | Path) -> Workload:
    """Read a workload from JSON; raise ConfigError if the file is not one."""
    way_out = "Give the path of a JSON file that Syncline wrote, or write it once more."
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Workload)
    except OSError as error:
        found = f"cannot be read ({(error.strerror or type(error).__name__).lower()})"
        raise ConfigError(str(path), found, "a workload is a file", way_out) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rule = "a workload is JSON with a name and layers"
        raise ConfigError(str(path), str(error), rule, way_out) from None


def write(workload: Workload, path: str | Path) -> None:
    """Write a workload as JSON, whole or not at all."""
    write_atomically(Path(path), msgspec.json.format(msgspec.json.encode(workload)) + b"\n")
