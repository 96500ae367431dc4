"""What a training step runs on one GPU, kernel by kernel, for any size: read from traced lists.

`runners.trace.operations` writes operations.json: for every family, attention and compute dtype the
kernels of each section of a step, with sizes as products of named dimensions. Here they become
arrays, once for a model, so that a time is a few array operations over all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.memory.kinds import CHECKPOINTED, FROZEN, MOE, PLAIN, SLIDING, kind_name
from planner.memory.templates import monomial_values
from planner.model import ModelSpec
from planner.speed.rates import layout_number
from planner.speed.stream_kinds import stream_number
from planner.workload import Attention, Loss, Precision, TrainingWorkload

Floats = NDArray[np.float64]
FORWARD, BACKWARD, RECOMPUTE = range(3)
PHASES = ("forward", "backward", "recompute")
_FORWARD_SECTIONS, _BACKWARD_SECTIONS = (
    ("embed", "head", "loss"),
    ("loss_backward", "embed_backward"),
)
_AT_START, _AT_END = ("embed", "embed_backward"), ("head", "loss", "loss_backward")
# What a part of a split model runs only where it holds that section.
SECTIONS = {"embedding": "embed", "head": "loss", "loss": "loss"}
# Losses by chunks were traced with so many of them.
_TRACED_CHUNKS = 3
_TRAITS = (SLIDING, MOE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of elements: `constants` x rows^`rows` x tokens^`tokens`, one for each monomial."""

    constants: Floats
    rows: Floats
    tokens: Floats

    def at(self, b: Any, s: Any) -> Any:
        """Return the sizes for b rows of s tokens: [monomials, *shape of b and s]."""
        shape = (-1,) + (1,) * max(np.ndim(b), np.ndim(s))
        constants, rows, tokens = (
            a.reshape(shape) for a in (self.constants, self.rows, self.tokens)
        )
        return constants * np.power(b, rows) * np.power(s, tokens)


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of one kind and dtype: layouts, and sizes [(batch, m, n, k), products] by number.

    `counts` [parts, products] says how often each runs in each of the `parts` (phase, name).
    """

    kind: str
    dtype: str
    layouts: Floats
    sizes: NDArray[np.int64]
    parts: tuple[tuple[int, str], ...]
    counts: Floats


@dataclass(frozen=True, slots=True)
class Streams:
    """Operations bound by memory: number of the kind, size by number, bytes of an element.

    `parts` and `counts` are as those of `Products`.
    """

    kinds: NDArray[np.int64]
    sizes: NDArray[np.int64]
    element_bytes: Floats
    parts: tuple[tuple[int, str], ...]
    counts: Floats


@dataclass(frozen=True, slots=True)
class OperationList:
    """Everything of one micro-batch. `attention` counts layers by (phase, kind, whether it slides).

    `launches` counts kernels by phase.
    """

    sizes: Sizes
    products: tuple[Products, ...]
    streams: Streams
    attention: Mapping[tuple[int, str, bool], int]
    launches: tuple[float, float, float]


@cache
def _data() -> Any:
    return json.loads(files("planner.speed").joinpath("operations.json").read_text())


def list_key(spec: ModelSpec, workload: TrainingWorkload) -> str:
    """Return the name of a workload's list; of what was not traced, that of the nearest one."""
    known = _data()["variants"]
    compute = _compute_of(workload)
    adapters = f"/lora_{workload.lora_targets}" if workload.lora_rank else ""
    direct = "_direct" if spec.family == "deepseek_v2" else ""
    chosen = [str(workload.attention), "sdpa", "eager"]
    if _is_fused_in_fp32(spec, workload):
        chosen.insert(0, "triton")
    for tail in dict.fromkeys((adapters, "")):
        for attention in chosen:
            key = f"{spec.family}/{attention}{direct}/{compute}{tail}"
            if key in known:
                return key
    raise KeyError(f"{spec.family}: its operations were not traced")


def _compute_of(workload: TrainingWorkload) -> str:
    precision = workload.precision
    return "bf16" if precision is Precision.MIXED else str(precision)


def _is_fused_in_fp32(spec: ModelSpec, workload: TrainingWorkload) -> bool:
    """Whether SDPA has a fused kernel in fp32 where the traced model, whose heads share keys, had none.

    Then it runs what our kernel's list says: one attention, and nothing repeated for it.
    """
    is_sdpa = workload.attention is Attention.SDPA and workload.precision is Precision.FP32
    return is_sdpa and spec.num_heads == spec.num_kv_heads and not workload.packed


def forward_layer_rows(
    spec: ModelSpec, workload: TrainingWorkload, kind: str
) -> list[tuple[list[Any], int]]:
    """Return (row, count) of what the forward of one layer of a kind runs, as it was traced."""
    data = _data()
    sections = _sections(data["variants"][list_key(spec, workload)], kind)
    return [(data["rows"][index], count) for index, count in sections["layer"]]


def _loss_key(workload: TrainingWorkload) -> str | None:
    if workload.loss is Loss.HF:
        return None
    return f"llama/sdpa/{_compute_of(workload)}/{workload.loss}"


def operation_list(
    spec: ModelSpec, workload: TrainingWorkload, kinds: Sequence[str]
) -> OperationList:
    """Return the list of a micro-batch whose layers are of these kinds."""
    key = list_key(spec, workload)
    counted = tuple(sorted(Counter(kinds).items()))
    return _operation_list(spec, key, counted, workload.lora_rank, _loss_key(workload))


@lru_cache(maxsize=256)
def _operation_list(
    spec: ModelSpec,
    key: str,
    kinds: tuple[tuple[str, int], ...],
    lora_rank: int,
    loss: str | None,
) -> OperationList:
    rows: Counter[tuple[str, int, str]] = Counter()
    attention: Counter[tuple[int, str, bool]] = Counter()
    for row, phase, group, count in _rows_of(key, kinds, loss):
        if row[0].startswith("attention"):
            attention[phase, row[0], group.endswith(SLIDING)] += round(count)
        elif not (row[0] == "repeat" and spec.num_heads == spec.num_kv_heads):
            rows[json.dumps(row), phase, group.split(":")[0]] += count  # type: ignore[assignment]
    return _as_arrays(spec, rows, attention, lora_rank)


def _rows_of(
    key: str, kinds: tuple[tuple[str, int], ...], loss: str | None
) -> list[tuple[list[Any], int, str, float]]:
    """(row, phase, "section:trait", count) of a micro-batch."""
    data = _data()
    variant = data["variants"][key]
    every: list[tuple[list[Any], int, str, float]] = []

    def add(section: Sequence[Sequence[int]], phase: int, group: str, times: float) -> None:
        every.extend((data["rows"][i], phase, group, n * times) for i, n in section)

    for kind, count in kinds:
        traits = kind.split("+")
        plain = kind_name([trait for trait in _TRAITS if trait in traits])
        sections = _sections(variant, plain)
        group = f"layer:{SLIDING if SLIDING in traits else PLAIN}"
        add(sections["layer"], FORWARD, group, count)
        if FROZEN in traits:
            continue
        add(sections["layer_backward"], BACKWARD, group, count)
        if CHECKPOINTED in traits:
            add(sections["layer"], RECOMPUTE, group, count)
    around = _sections(variant, kind_name([t for t in _TRAITS if t in kinds[0][0].split("+")]))
    lossy = next(iter(data["variants"][loss].values())) if loss else around
    for name in _FORWARD_SECTIONS:
        add((lossy if name == "loss" else around)[name], FORWARD, name, 1)
    for name in _BACKWARD_SECTIONS:
        add((lossy if name == "loss_backward" else around)[name], BACKWARD, name, 1)
    return every


def _sections(variant: Mapping[str, Any], kind: str) -> Any:
    """The sections of a kind of layer, or of the nearest that was traced."""
    base = kind.replace(f"{SLIDING}+", "").replace(SLIDING, PLAIN)
    return variant.get(kind) or variant.get(base) or next(iter(variant.values()))


class _Monomials:
    """Numbers distinct monomials."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, monomial: str) -> int:
        """Return the number of a monomial, new or known."""
        return self.numbers.setdefault(monomial, len(self.numbers))


def _as_arrays(
    spec: ModelSpec,
    rows: Mapping[tuple[str, int, str], float],
    attention: Mapping[tuple[int, str, bool], int],
    lora_rank: int,
) -> OperationList:
    monomials = _Monomials()
    products: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    streams: list[tuple[Any, ...]] = []
    launches = [0.0, 0.0, 0.0]
    for (text, phase, group), times in rows.items():
        row = json.loads(text)
        count = times
        if any("chunk" in str(part) for part in row):
            row = [p.replace("chunk", "batch*seq") if isinstance(p, str) else p for p in row]
            count = times / _TRACED_CHUNKS
        launches[phase] += count
        if row[0] in ("mm", "grouped"):
            kind, layout, dtype, *sizes = row
            kind = "bmm" if kind == "mm" and sizes[0] != "1" else kind
            numbers = [monomials.number(size) for size in sizes]
            products.setdefault((kind, dtype), []).append(
                (phase, count, layout_number(layout), numbers, group)
            )
        else:
            kind, dtype, monomial, element_bytes = row
            number = stream_number(kind, dtype)
            streams.append((phase, count, number, monomials.number(monomial), element_bytes, group))
    for (phase, _, _), count in attention.items():
        launches[phase] += count
    return OperationList(
        _sizes(spec, tuple(monomials.numbers), lora_rank),
        tuple(_products(key, found) for key, found in products.items()),
        _streams(streams),
        dict(attention),
        (launches[0], launches[1], launches[2]),
    )


def _stream_name(section: str) -> str:
    if section in _AT_START:
        return "embedding"
    return "loss" if section in _AT_END else "elementwise"


_PRODUCT_NAMES = {"mm": "products", "bmm": "attention", "grouped": "experts"}


def _products(key: tuple[str, str], found: Sequence[tuple[Any, ...]]) -> Products:
    phases, counts, layouts, sizes, groups = zip(*found, strict=True)
    name = _PRODUCT_NAMES[key[0]]
    names = ["head" if group in _AT_END else name for group in groups]
    parts, by_part = _by_part(phases, names, counts)
    return Products(
        *key,
        np.array(layouts, dtype=np.float64),
        np.array(sizes, dtype=np.int64).T.copy(),
        parts,
        by_part,
    )


def _streams(found: Sequence[tuple[Any, ...]]) -> Streams:
    phases, counts, kinds, sizes, element_bytes, groups = zip(*found, strict=True)
    names = [_stream_name(group) for group in groups]
    parts, by_part = _by_part(phases, names, counts)
    return Streams(
        np.array(kinds, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
        np.array(element_bytes, dtype=np.float64),
        parts,
        by_part,
    )


def _by_part(
    phases: Sequence[int], names: Sequence[str], counts: Sequence[float]
) -> tuple[tuple[tuple[int, str], ...], Floats]:
    """The parts that operations belong to, and how often each runs in each: [parts, operations]."""
    keys = list(zip(phases, names, strict=True))
    parts = tuple(dict.fromkeys(keys))
    table = np.zeros((len(parts), len(keys)))
    for column, (key, count) in enumerate(zip(keys, counts, strict=True)):
        table[parts.index(key), column] = count
    return parts, table


def _sizes(spec: ModelSpec, monomials: tuple[str, ...], lora_rank: int) -> Sizes:
    """Evaluate monomials of a model but for rows and tokens, whose powers are kept."""
    constants, rows, tokens = [], [], []
    for monomial in monomials:
        names = monomial.split("*")
        number = 1.0
        for name in names:
            if name.isdigit():
                number *= int(name)
            elif name == "half_seq_and_one":
                number *= 0.5
        tokens.append(names.count("seq") + names.count("half_seq_and_one"))
        rows.append(names.count("batch"))
        kept = [n for n in names if not n.isdigit() and n != "half_seq_and_one"]
        [value] = monomial_values(spec, ("*".join(kept),), 1.0, 1.0, lora_rank)
        constants.append(number * float(value))
    return Sizes(*(np.array(a, dtype=np.float64) for a in (constants, rows, tokens)))


def is_masked(workload: TrainingWorkload, slides: bool) -> bool:
    """Whether SDPA gets a mask of numbers, and so computes every pair of a row."""
    return workload.attention is Attention.SDPA and (slides or workload.packed)
