"""The form of a trace file, checked as it is read: nothing in it is trusted or executed."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from planner.memory.section_rows import check_sections

SCHEMA = 1
MAX_FILE_BYTES = 64_000_000
_Text = Annotated[str, Field(min_length=1, max_length=300)]
_Count = Annotated[int, Field(ge=1, le=2**40)]
_Exponent = Annotated[int, Field(ge=0, le=4)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TraceParameter(_Strict):
    """One kind of parameter tensor, as `planner.model.ParameterShape` has it."""

    name: _Text
    shape: Annotated[tuple[_Count, ...], Field(max_length=8)]
    group: Literal["embedding", "layer", "head"]
    layers: Annotated[tuple[Annotated[int, Field(ge=0, lt=4096)], ...], Field(max_length=4096)]

    @property
    def numel(self) -> int:
        """Elements of all these tensors."""
        return prod(self.shape) * (len(self.layers) or 1)


class TraceCost(_Strict):
    """`count` times rows and tokens to their powers, in FLOPs or bytes of a kind of operation."""

    kind: Literal["products", "attention", "elementwise"]
    unit: Literal["flops", "bytes"]
    rows: _Exponent
    tokens: _Exponent
    count: Annotated[int, Field(ge=0)]


class TraceVariant(_Strict):
    """One attention, dtype and checkpointing over a range of sequence lengths.

    `name` is the key of its template, `rows` whether it holds for one row only, `kinds` names the
    kind of every layer.
    """

    name: _Text
    key: _Text
    rows: Literal["any", "one"]
    first: Annotated[int, Field(ge=1)]
    last: Annotated[int, Field(ge=1)]
    kinds: Annotated[tuple[_Text, ...], Field(min_length=1, max_length=4096)]
    forward: Annotated[tuple[TraceCost, ...], Field(max_length=200)]
    backward: Annotated[tuple[TraceCost, ...], Field(max_length=200)]


class TraceFile(_Strict):
    """What a trace says of its model beside the templates."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    config: dict[str, Any]
    architecture: _Text
    transformers: _Text
    torch: _Text
    date: _Text
    vocab_size: _Count
    hidden_size: _Count
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    ties_embeddings: bool
    longest: _Count
    parameters: Annotated[tuple[TraceParameter, ...], Field(min_length=1, max_length=20_000)]
    variants: Annotated[tuple[TraceVariant, ...], Field(max_length=500)]

    @model_validator(mode="after")
    def _fits_together(self) -> TraceFile:
        for variant in self.variants:
            if len(variant.kinds) != self.num_layers:
                raise ValueError(f"{variant.name} has kinds of {len(variant.kinds)} layers")
        for parameter in self.parameters:
            _check_layers(parameter, self.num_layers)
        return self


def _check_layers(parameter: TraceParameter, num_layers: int) -> None:
    in_layer = parameter.group == "layer"
    if in_layer != bool(parameter.layers) or any(n >= num_layers for n in parameter.layers):
        raise ValueError(f"{parameter.name} has layers that the model has not")
    if in_layer and f".{parameter.layers[0]}." not in parameter.name:
        raise ValueError(f"{parameter.name} does not name its layer")


_TEMPLATE_KEYS = ("monomials", "sections", "templates")


def read_trace(data: Any) -> TraceFile:
    """Check a trace file's JSON; raises ValueError with the first fault."""
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    head = {key: value for key, value in data.items() if key not in _TEMPLATE_KEYS}
    try:
        file = TraceFile.model_validate(head)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from None
    check_sections(data.get("monomials"), data.get("sections"), data.get("templates"))
    missing = [v.name for v in file.variants if v.name not in data["templates"]]
    if missing:
        raise ValueError(f"the template {missing[0]} is missing")
    return file
