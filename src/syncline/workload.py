"""A workload: what a model costs, layer by layer, in the order in which forward uses the layers.

It is all that a simulation needs to know about a model: how long a rank computes on a layer, and
how many bytes of parameters the layer has. `measure/derive.py` makes one by counting operations,
`measure/layers.py` by measuring them. A file of it is JSON with a format and a version
(docs/simulate.md); a version never changes, and files of older versions are read.

No torch here: a workload is read and written without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syncline.config.words import brief
from syncline.device import Kind
from syncline.errors import ConfigError
from syncline.files import write_atomically
from syncline.sizes import Size

FORMAT, VERSION = "syncline-workload", 2
_WAY_OUT = "Give a file that simulate --write-workload wrote, or write it once more."

NEW_IN_2 = {
    "": ("update_s", "update_spread", "reads", "spread", "made_by", "machine"),
    "layers": ("kind", "flops", "moved_bytes"),
    "times": ("spread",),
}
"""Fields that version 1 does not have: of the file, of a layer, of its times for other samples."""

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
    spread: Seconds | None = None


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long a rank reads the samples of one shard, in line."""

    samples: Samples
    read_s: Seconds
    spread: Seconds | None = None


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
    kind: Kind | None = None
    flops: Annotated[float, Meta(ge=0)] | None = None
    """Floating-point operations of forward, per sample."""
    moved_bytes: Annotated[float, Meta(ge=0)] | None = None
    """Activations that forward reads and writes, bytes per sample; at least, and without the
    parameters, whose `size_bytes` it reads once for all samples."""

    def for_samples(self, samples: int, known: int) -> Layer | None:
        """Return the layer with times for this many samples; None if they are not known.

        `known` is for how many samples its times hold. Between two sizes times are interpolated.
        """
        here = LayerTimes(known, self.forward_s, self.backward_s, self.spread)
        every = {one.samples: one for one in (*self.times, here)}
        found = _between(every, samples)
        if found is None:
            return None
        low, high, part = every[found[0]], every[found[1]], found[2]
        spread = None
        if low.spread is not None and high.spread is not None:
            spread = low.spread + part * (high.spread - low.spread)
        return msgspec.structs.replace(
            self,
            forward_s=low.forward_s + part * (high.forward_s - low.forward_s),
            backward_s=low.backward_s + part * (high.backward_s - low.backward_s),
            spread=spread,
            times=tuple(one for size, one in sorted(every.items()) if size != samples),
        )


def _between(sizes: Collection[int], samples: int) -> tuple[int, int, float] | None:
    """Return the nearest sizes below and above, and how far between them `samples` is.

    None if the sizes do not reach so far.
    """
    below = max((size for size in sizes if size <= samples), default=None)
    above = min((size for size in sizes if size >= samples), default=None)
    if below is None or above is None:
        return None
    return below, above, (samples - below) / (above - below) if above > below else 0.0


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
    update_s: Seconds | None = None
    """The optimizer's update of all parameters, on one rank; None for what the cluster says."""
    update_spread: Seconds | None = None
    reads: tuple[Reading, ...] = ()
    """How long a shard's samples are read, by their number. They win over `input_s`, which is a
    rank's batch however many shards that has."""
    spread: Seconds | None = None
    """The standard deviation of the compute time of a whole step, relative to its mean."""
    made_by: str = ""
    """How the times were found: "measured", "derived", "imported"."""
    machine: dict[str, str | int | float | bool] = {}
    """Facts about the machine, or the device, that they are of."""

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
        if self.reads and self.read_of(samples) is None:
            known = sorted(one.samples for one in self.reads)
            raise ValueError(f"it has reads of {', '.join(map(str, known))} samples")
        return msgspec.structs.replace(
            self,
            layers=tuple(layer for layer in layers if layer is not None),
            input_s=self.input_s * samples / self.samples,
            samples=samples,
        )

    def read_of(self, samples: int) -> float | None:
        """Return how long a shard of this many samples is read; None if that is not known."""
        seconds = {one.samples: one.read_s for one in self.reads}
        found = _between(seconds, samples)
        if found is None:
            return None
        below, above, part = found
        return seconds[below] + part * (seconds[above] - seconds[below])

    def shard_input_s(self, shards: float) -> float:
        """Return how long a rank with this many shards loads each of them."""
        read_s = None if self.samples is None else self.read_of(self.samples)
        return self.input_s / shards if read_s is None else read_s

    def update_bytes_per_s(self, otherwise: float) -> float:
        """Return the bytes of parameters that a rank's optimizer updates in a second."""
        if self.update_s is None:
            return otherwise
        size_bytes = sum(size.size_bytes for size in self.sizes() if size.is_used)
        return size_bytes / self.update_s if self.update_s else math.inf

    @property
    def crowding(self) -> float:
        """How many times as long layers took because those that were measured shared cores."""
        ranks, threads, cores = (self.machine.get(name) for name in ("ranks", "threads", "cores"))
        if not (isinstance(ranks, int) and isinstance(threads, int) and isinstance(cores, int)):
            return 1.0
        return max(1.0, ranks * threads / max(1, cores))

    def scaled(
        self, forward: float, backward: float, is_one: Callable[[Layer], bool] | None = None
    ) -> Workload:
        """Return the workload with the times of all or some layers multiplied, each way."""

        def timed(one: Layer) -> Layer:
            times = {"forward_s": one.forward_s * forward, "backward_s": one.backward_s * backward}
            return msgspec.structs.replace(one, **times) if is_one is None or is_one(one) else one

        return msgspec.structs.replace(self, layers=tuple(map(timed, self.layers)))

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

    def activations(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of a forward's activations, in and out, of the layers that say them."""
        return {
            layer.name: (self.samples * layer.input_bytes, self.samples * layer.output_bytes)
            for layer in self.layers
            if self.samples is not None
            and layer.input_bytes is not None
            and layer.output_bytes is not None
        }

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
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        problem = f"cannot be read ({(error.strerror or type(error).__name__).lower()})"
        raise ConfigError(str(path), problem, "a workload is a file", _WAY_OUT) from None
    return parse(data, str(path))


def parse(data: bytes, source: str = "the workload") -> Workload:
    """Return the workload of a file's bytes; errors name it `source`."""
    try:
        found = msgspec.json.decode(data)
        if _version_of(found) == 1:
            _check_fields_of_1(found)
        workload = msgspec.convert(found, Workload)
        _check(workload)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        problem = brief(str(error) or type(error).__name__)
        rule = f"a workload is JSON with format {FORMAT}, version 1 or 2, a name and layers"
        raise ConfigError(source, problem, rule, _WAY_OUT) from None
    return workload


def _version_of(found: Any) -> int:
    """Take format and version out, return the version; raise ValueError if they are not ours."""
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    form, version = found.pop("format", None), found.pop("version", None)
    if form != FORMAT:
        raise ValueError("it says no format" if form is None else f"its format is {form!r:.40}")
    if type(version) is not int or version < 1:
        raise ValueError("it says no version")
    if version > VERSION:
        raise ValueError(f"its version is {version}, of a newer Syncline")
    return version


def _check_fields_of_1(found: dict[str, Any]) -> None:
    """Raise ValueError for fields that version 1 does not have."""
    layers = [one for one in _list(found.get("layers")) if isinstance(one, dict)]
    times = [each for one in layers for each in _list(one.get("times")) if isinstance(each, dict)]
    for where, tables in (("", [found]), ("layers", layers), ("times", times)):
        if new := sorted({key for table in tables for key in table} & {*NEW_IN_2[where]}):
            raise ValueError(f"its version is 1, which has no field `{new[0]}`: version 2 has it")


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _check(workload: Workload) -> None:
    """Raise ValueError for what cannot be, though each value by itself could."""
    if not workload.layers:
        raise ValueError("it has no layers")
    for layer in workload.layers:
        sizes = [workload.samples, *(times.samples for times in layer.times)]
        if len({*sizes}) < len(sizes):
            raise ValueError(f"layer {layer.name!r:.40} has two times for one number of samples")
    if len({one.samples for one in workload.reads}) < len(workload.reads):
        raise ValueError("it has two reads of one number of samples")
    if workload.reads and workload.samples is None:
        raise ValueError("it has reads, and does not say for how many samples its times are")
    if (
        workload.samples is not None
        and workload.reads
        and workload.read_of(workload.samples) is None
    ):
        raise ValueError(f"it has no read of {workload.samples} samples")
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
