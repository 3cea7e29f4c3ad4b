"""A workload: what a model costs, layer by layer, in the order in which forward uses the layers.

It is all that a simulation needs to know about a model: how long a rank computes on a layer, and
how many bytes of parameters the layer has. `measure/derive.py` makes one by counting operations.
A file of it is JSON with a format and a version (docs/simulate.md); a version never changes.

No torch here: a workload is read and written without it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syncline.config.words import printable
from syncline.errors import ConfigError
from syncline.files import write_atomically
from syncline.sizes import Size

FORMAT, VERSION = "syncline-workload", 1

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0, le=2**53)]
Samples = Annotated[int, Meta(ge=1, le=2**31)]

ELEMENT_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"complex64": 8, "complex128": 16},
}
"""The types that trained parameters may have, and the bytes of an element."""


class LayerTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer's times for another number of samples."""

    samples: Samples
    forward_s: Seconds
    backward_s: Seconds


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One layer on one rank, with the name of its module: the model itself is "".

    Times are those of one forward and one backward, of the number of samples it was derived for.
    """

    name: str
    size_bytes: Bytes
    forward_s: Seconds
    backward_s: Seconds
    times: tuple[LayerTimes, ...] = ()
    """Times for other numbers of samples."""
    input_bytes: Bytes | None = None
    """Activations that go into the layer, bytes per sample."""
    output_bytes: Bytes | None = None
    """Activations that come out of it, bytes per sample."""
    spread: Seconds | None = None
    """The standard deviation of its measured times, relative to their mean."""

    def for_samples(self, samples: int, known: int) -> Layer | None:
        """Return the layer with times for this many samples; None if they are not known.

        `known` is for how many samples its times hold. Between two sizes times are interpolated.
        """
        points = {one.samples: (one.forward_s, one.backward_s) for one in self.times}
        points[known] = (self.forward_s, self.backward_s)
        below = max((size for size in points if size <= samples), default=None)
        above = min((size for size in points if size >= samples), default=None)
        if below is None or above is None:
            return None
        part = (samples - below) / (above - below) if above > below else 0.0
        low, high = points[below], points[above]
        forward_s, backward_s = (a + part * (b - a) for a, b in zip(low, high, strict=True))
        return msgspec.structs.replace(self, forward_s=forward_s, backward_s=backward_s)


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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
    samples: Samples | None = None
    """Samples of one forward, for which the layers' times hold; None if that is not known."""

    def for_samples(self, samples: int) -> Workload:
        """Return the workload of this many samples; raise ValueError if that is not known."""
        if self.samples is None:
            raise ValueError("it does not say for how many samples its times are")
        if samples == self.samples:
            return self
        layers = [layer.for_samples(samples, self.samples) for layer in self.layers]
        unknown = [one for one, now in zip(self.layers, layers, strict=True) if now is None]
        if unknown:
            known = sorted({self.samples, *(times.samples for times in unknown[0].times)})
            raise ValueError(
                f"layer {unknown[0].name!r} has times for {', '.join(map(str, known))} samples"
            )
        return msgspec.structs.replace(
            self,
            layers=tuple(layer for layer in layers if layer is not None),
            input_s=self.input_s * samples / self.samples,
            samples=samples,
        )

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
    """Read a workload from JSON; raise ConfigError if the file is not one, or is damaged."""
    way_out = "Give a file that simulate --write-workload wrote, or write it once more."
    try:
        found = msgspec.json.decode(Path(path).read_bytes())
        _check_header(found)
        workload = msgspec.convert(found, Workload)
        _check(workload)
    except OSError as error:
        problem = f"cannot be read ({(error.strerror or type(error).__name__).lower()})"
        raise ConfigError(str(path), problem, "a workload is a file", way_out) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        problem = printable(str(error) or type(error).__name__)
        rule = f"a workload is JSON with format {FORMAT}, version {VERSION}, a name and layers"
        raise ConfigError(str(path), problem, rule, way_out) from None
    return workload


def _check_header(found: Any) -> None:
    """Take format and version out; raise ValueError if they are not ours."""
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    form, version = found.pop("format", None), found.pop("version", None)
    if form != FORMAT:
        raise ValueError("it says no format" if form is None else f"its format is {form!r:.40}")
    if type(version) is not int or version < 1:
        raise ValueError("it says no version")
    if version > VERSION:
        raise ValueError(f"its version is {version}, of a newer Syncline")


def _check(workload: Workload) -> None:
    """Raise ValueError for what cannot be, though each value by itself could."""
    if not workload.layers:
        raise ValueError("it has no layers")
    for layer in workload.layers:
        sizes = [workload.samples, *(times.samples for times in layer.times)]
        if len({*sizes}) < len(sizes):
            raise ValueError(f"layer {layer.name!r:.40} has two times for one number of samples")
    if not math.isfinite(workload.forward_s + workload.backward_s):
        raise ValueError("the times of all layers have no finite sum")
    numbers = sorted(size.number for size in workload.parameters)
    if numbers != list(range(len(numbers))):
        raise ValueError("the parameters' numbers do not count from 0, each once")
    for size in workload.parameters:
        if not 1 <= size.num_elements <= 2**50:
            raise ValueError(f"parameter {size.name!r:.40} has {size.num_elements} elements")
        if ELEMENT_BYTES.get(size.dtype) != size.element_bytes:
            kind = f"{size.dtype!r:.40} of {size.element_bytes} bytes"
            raise ValueError(f"parameter {size.name!r:.40} has elements of type {kind}")


def write(workload: Workload, path: str | Path) -> None:
    """Write a workload as JSON, whole or not at all."""
    found = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(workload)}
    write_atomically(Path(path), msgspec.json.format(msgspec.json.encode(found)) + b"\n")
