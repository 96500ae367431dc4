"""List what a traced step runs on the GPU, operation by operation: `planner.speed` times it.

python -m runners.trace.operations [FAMILY ...]      (all families without a name)

Each row of a section is one kernel (or two, where an operation starts two) and how often it runs:

- a product: ["mm", layout, dtype, batch, m, n, k], sizes as monomials;
- attention: ["attention_forward" or "attention_backward"];
- anything bound by memory: [kind, dtype, monomial of its largest tensor, bytes per element of it].
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves

import planner.speed
from planner.memory.groups import Place
from planner.memory.kinds import MOE, PLAIN, SLIDING
from runners.trace.model import build_model
from runners.trace.patterns import (
    DENSE_FIRST,
    EXPERTS,
    SLIDING_AT_THE_END,
    SLIDING_PERIOD,
    SLIDING_THROUGHOUT,
    with_trait,
)
from runners.trace.step import collected_on_demand, record_step
from runners.trace.symbols import PRIMES, factor
from runners.trace.tape import Tape
from runners.trace.variants import COMPUTES, FAMILIES, OTHER_LOSSES, Variant

OPERATIONS_FILE = Path(planner.speed.__file__).parent / "operations.json"
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_LAYERS = 3
_MIDDLE = 1
_PLACES = ("embed", "head", "loss", "loss_backward", "embed_backward")

# Operations that start nothing on the GPU: views, and tensors that nothing is written to.
_NOTHING = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice"),
        *("unsqueeze", "squeeze", "detach", "alias", "select", "split", "split_with_sizes"),
        *("empty", "empty_like", "new_empty", "empty_strided", "as_strided", "unbind", "chunk"),
        *("_reshape_alias", "diagonal", "view_as_complex", "view_as_real", "_local_scalar_dense"),
        *("lift_fresh", "unfold", "new_empty_strided", "_nested_view_from_buffer"),
    )
)
_KINDS = {
    "pow": "power",
    "silu": "silu",
    "silu_backward": "silu_backward",
    "gelu": "gelu",
    "gelu_backward": "gelu_backward",
    "tanh": "tanh",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_softmax_backward_data": "softmax_backward",
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward",
    "nll_loss_forward": "chosen_logits",
    "nll_loss_backward": "loss_backward",
    "embedding": "embedding",
    "embedding_dense_backward": "embedding_backward",
    "cat": "concatenate",
    "stack": "concatenate",
    "zeros": "fill",
    "zeros_like": "fill",
    "new_zeros": "fill",
    "full": "fill",
    "full_like": "fill",
    "ones": "fill",
    "new_ones": "fill",
    "ones_like": "fill",
    "fill_": "fill",
    "zero_": "fill",
    "index": "row_gather",
    "gather": "chosen_logits",
    "index_select": "row_gather",
    "index_add": "row_scatter",
    "index_add_": "row_scatter",
    "index_put": "row_scatter",
    "index_put_": "row_scatter",
    "_index_put_impl_": "row_scatter",
    "scatter": "row_scatter",
    "scatter_": "row_scatter",
    "scatter_add": "row_scatter",
    "scatter_add_": "row_scatter",
    "sort": "sort",
    "topk": "sort",
    "histc": "sort",
    "bincount": "sort",
}
# How often as many bytes as the output holds are moved, whatever goes in: of a table or of
# logits, chosen places are read.
_OF_OUTPUT = {"embedding": 2, "chosen_logits": 2, "loss_backward": 1}
_TWO_KERNELS = {"slice_backward": ("fill", "strided_copy"), "select_backward": ("fill", "copy")}


class OperationTape(Tape):
    """Counts the kernels of a step by section; see this module."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Place, Counter[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.split("::")[-1]
        if name not in _NOTHING:
            inputs = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            outputs = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
            if outputs:
                self._count(name, inputs, outputs)
        return out

    def _count(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if name == "attention_forward":
            self.add(["attention_forward"])
            self.add(["attention_backward"], Place("layer_backward", self.place.layer))
        elif name == "grouped_forward":
            rows, weights = inputs[:2]
            sizes = (rows.shape[0], weights.shape[-1], rows.shape[1])
            self._add_product("grouped", "nn", rows, weights.shape[0], sizes)
            for layout in ("nt", "tn"):
                place = Place("layer_backward", self.place.layer)
                self._add_product("grouped", layout, rows, weights.shape[0], sizes, place)
        elif name.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = inputs[-2:]
            layout = "".join("n" if _is_plain(one) else "t" for one in (a, b))
            batch = a.shape[0] if a.ndim == 3 else 1
            self._add_product("mm", layout, a, batch, (a.shape[-2], b.shape[-1], a.shape[-1]))
        else:
            for kind in _TWO_KERNELS.get(name, (_kind(name, inputs, outputs),)):
                self._add_stream(kind, inputs, outputs)

    def _add_product(
        self,
        kind: str,
        layout: str,
        like: Tensor,
        batch: int,
        sizes: tuple[int, ...],
        place: Place | None = None,
    ) -> None:
        dtype = _DTYPES.get(like.dtype, "fp32")
        self.add([kind, layout, dtype, _monomial(batch), *map(_monomial, sizes)], place)

    def _add_stream(self, kind: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        tensors = [*inputs, *outputs]
        if kind in _OF_OUTPUT:
            tensors = [outputs[0]] * _OF_OUTPUT[kind]
        elif kind == "fill":
            tensors = outputs[:1]
        elif kind == "strided_copy" and len(inputs) == 1:
            tensors = [inputs[0], inputs[0]]
        largest = max(tensors, key=_numel)
        if not _numel(largest):
            return
        numel = _numel(largest)
        moved = sum(_numel(one) * one.element_size() for one in tensors)
        floats = [one.dtype for one in inputs if one.dtype in _DTYPES] or [outputs[0].dtype]
        row = [kind, _DTYPES.get(floats[0], "fp32"), _monomial(numel), round(moved / numel, 2)]
        self.add(row)

    def add(self, row: list[Any], place: Place | None = None) -> None:
        """Count one kernel of a section, this one without `place`."""
        counts = self.rows.setdefault(place or self.place, Counter())
        counts[json.dumps(row, separators=(",", ":"))] += 1


def _numel(tensor: Tensor) -> int:
    """Elements that lie in memory: an expanded dimension repeats what is there."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel


def _monomial(count: int) -> str:
    """Write a count as dimensions and a number; one of no known product is a small constant."""
    try:
        monomial, coefficient = factor(count)
    except ValueError:
        return "1"
    return "*".join(filter(None, (str(coefficient) if coefficient > 1 else "", monomial))) or "1"


def _is_plain(matrix: Tensor) -> bool:
    return matrix.stride(-1) == 1 or matrix.shape[-1] == 1


def _kind(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> str:
    if name in _KINDS:
        return _KINDS[name]
    if name in ("sum", "mean", "amax", "max", "logsumexp", "argmax", "cumsum", "norm", "var_mean"):
        return _reduction(name, inputs[0], outputs[0])
    if name in ("_to_copy", "clone", "copy_", "contiguous", "repeat", "repeat_interleave", "copy"):
        return _copy(inputs[-1], outputs[0])
    if len([one for one in inputs if one.ndim]) < 2:
        return "unary" if all(one.is_contiguous() for one in inputs) else "half_negated"
    return _pointwise(name, inputs, outputs[0])


def _reduction(name: str, source: Tensor, result: Tensor) -> str:
    is_last = (
        result.ndim == 0 or source.ndim == 0 or _numel(result) * source.shape[-1] == _numel(source)
    )
    if not is_last:
        return "column_sum"
    return "row_mean" if source.dtype is torch.float32 else "row_sum"


def _copy(source: Tensor, result: Tensor) -> str:
    if 0 in source.stride() and _numel(source) < _numel(result):
        return "repeat"
    if source.dtype is not result.dtype:
        return "cast_up" if result.element_size() > source.element_size() else "cast_down"
    return "copy" if source.is_contiguous() and result.is_contiguous() else "strided_copy"


def _pointwise(name: str, inputs: list[Tensor], result: Tensor) -> str:
    others = [one for one in inputs if _numel(one) < _numel(result)]
    if name.endswith("_") and not others:
        return "add_in_place"
    if any(not one.is_contiguous() and 0 not in one.stride() for one in inputs):
        return "angles"
    if any(one.ndim and one.shape[-1] == 1 for one in others):
        return "row_factor"
    if others:
        return "weight" if result.dtype is not torch.float32 else "row_factor"
    if len({one.dtype for one in inputs if one.ndim}) > 1:
        return "mixed_binary"
    return "binary"


def traced_kinds(variant: Variant) -> list[str]:
    """Return the kinds of layer that a variant's models can have."""
    family = variant.family
    base = with_trait(PLAIN, MOE) if family in EXPERTS else PLAIN
    kinds = [base]
    if family in DENSE_FIRST:
        kinds.append(PLAIN)
    slides = (*SLIDING_THROUGHOUT, *SLIDING_AT_THE_END, *SLIDING_PERIOD)
    if family in slides and variant.implementation in ("eager", "sdpa"):
        kinds.append(with_trait(base, SLIDING))
    return kinds


def operation_variants(family: str) -> Iterator[Variant]:
    """Yield every variant of a family whose operations are listed."""
    attentions = {"gemma2": ["eager"], "gpt_oss": ["eager"], "deepseek_v3": ["eager", "sdpa"]}
    attentions |= {"falcon": ["eager", "sdpa"], "deepseek_v2": ["eager_direct", "sdpa_direct"]}
    for attention in attentions.get(family, ["eager", "sdpa", "triton"]):
        for compute in COMPUTES:
            yield Variant(family, attention, compute, "none")
    first = attentions.get(family, ["eager", "sdpa"])[-1]
    for compute in ("bf16", "autocast"):
        for adapters in ("qv", "all_linear"):
            yield Variant(family, first, compute, "none", adapters=adapters)
    if family == "llama":
        for compute in COMPUTES:
            yield from (
                Variant(family, "sdpa", compute, "none", loss=loss) for loss in OTHER_LOSSES
            )


def traced_sections(variant: Variant) -> dict[str, dict[str, Counter[str]]]:
    """Return the counted rows by kind of layer and section; those around layers by kind, too."""
    found = {}
    for kind in traced_kinds(variant):
        tape = OperationTape()
        model = build_model(variant, (kind,) * _LAYERS)
        with collected_on_demand():
            shape = (variant.batch, PRIMES["seq"])
            record_step(model, tape, shape, variant.compute == "autocast", False)
        places = {"layer": Place("layer", _MIDDLE)}
        places["layer_backward"] = Place("layer_backward", _MIDDLE)
        places |= {name: Place(name) for name in _PLACES}
        found[kind] = {name: tape.rows.get(place, Counter()) for name, place in places.items()}
    return found


def write_operations(families: list[str]) -> None:
    """Trace the families and write their lists among those that the file has."""
    data = json.loads(OPERATIONS_FILE.read_text()) if OPERATIONS_FILE.exists() else {}
    rows = {json.dumps(row, separators=(",", ":")): i for i, row in enumerate(data.get("rows", []))}
    index = data.get("variants", {})
    for family in families:
        for variant in operation_variants(family):
            sections = traced_sections(variant)
            key = "/".join((family, variant.key.replace("/none", "")))
            index[key] = {
                kind: {
                    name: [[rows.setdefault(row, len(rows)), n] for row, n in counts.items()]
                    for name, counts in by_name.items()
                }
                for kind, by_name in sections.items()
            }
            print(key, flush=True)
    head = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "rows": [json.loads(row) for row in rows],
        "variants": index,
    }
    OPERATIONS_FILE.write_text(json.dumps(head, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write_operations(sys.argv[1:] or list(FAMILIES))
