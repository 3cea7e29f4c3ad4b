"""What every import ends with: a workload of layers, of which only some have parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from syncline.measure.imports.source import MOST_S, Source
from syncline.sizes import Size
from syncline.workload import ELEMENT_BYTES, Layer, Workload


@dataclass(frozen=True)
class Parameter:
    """A parameter of an imported layer."""

    name: str
    num_elements: int
    dtype: str = "float32"

    @property
    def size_bytes(self) -> int:
        return self.num_elements * ELEMENT_BYTES[self.dtype]


@dataclass
class ImportedLayer:
    """A layer as a file describes it. Files with totals only have one parameter for each layer."""

    name: str
    forward_s: float
    backward_s: float
    parameters: list[Parameter] = field(default_factory=list)
    input_bytes: int | None = None
    output_bytes: int | None = None

    @property
    def size_bytes(self) -> int:
        return sum(parameter.size_bytes for parameter in self.parameters)


@dataclass(frozen=True)
class Imported:
    """A workload, and what a reader of it should know: what was assumed or left out."""

    workload: Workload
    notes: tuple[str, ...] = ()


def float32_parameters(source: Source, at: int, size_bytes: int) -> list[Parameter]:
    """Return one parameter of some bytes, or none for none."""
    if size_bytes % 4:
        rule = "parameters are taken as float32, so that their bytes divide by 4"
        raise source.error(at, f"got {size_bytes}", rule)
    return [Parameter("parameters", size_bytes // 4)] if size_bytes else []


def assemble(
    source: Source,
    name: str,
    layers: Sequence[ImportedLayer],
    samples: int | None,
    *,
    input_s: float = 0.0,
    notes: Sequence[str] = (),
) -> Imported:
    """Return the workload of layers in their order of use, with each parameter by itself.

    Layers without parameters send nothing, so the parameters are listed: a workload without a list
    has one for each layer.
    """
    kept = [layer for layer in layers if layer.parameters]
    rule = "a workload has parameters to exchange, and time to compute"
    if not kept:
        raise source.error(0, "no layer has parameters", rule)
    total_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    if not 0 < total_s <= MOST_S:
        raise source.error(0, f"all layers together take {total_s:g} s", rule)
    sizes = [(layer, parameter) for layer in kept for parameter in layer.parameters]
    return Imported(
        Workload(
            name,
            tuple(
                Layer(
                    layer.name,
                    layer.size_bytes,
                    layer.forward_s,
                    layer.backward_s,
                    input_bytes=layer.input_bytes,
                    output_bytes=layer.output_bytes,
                )
                for layer in layers
            ),
            input_s,
            tuple(
                Size(
                    f"{layer.name}.{parameter.name}",
                    number,
                    parameter.num_elements,
                    ELEMENT_BYTES[parameter.dtype],
                    parameter.dtype,
                )
                for number, (layer, parameter) in enumerate(sizes)
            ),
            samples=samples,
        ),
        tuple(notes),
    )
