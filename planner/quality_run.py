"""What a probe of quality is asked: which changes, on which model; checked without torch.

A change of the algorithm makes another model; one of the system runs the same model otherwise. Of the
latter, kernel and paging must change nothing but the last digits, the cache's dtype rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.checks import check_boolean, check_choice, check_integer, check_mapping
from planner.decode_run import WeightDtype
from planner.errors import PlanError
from planner.model import ModelSpec
from planner.plan import parse_model
from planner.saved_training import check_folder

MAX_LENGTH = 32_768
MAX_ROWS = 256
MAX_STEPS = 20_000
# The first tokens of a sequence are run together, before any is read from a cache.
CHUNK_TOKENS = 16
MIN_LENGTH = 2 * CHUNK_TOKENS
# Beyond this many times what two exact ways of one model differ by, a change is no rounding.
ROUNDINGS = 4.0


class Change(StrEnum):
    """What differs from exact attention over a contiguous cache in the model's dtype."""

    PAGED = "paged"
    KERNEL = "kernel"
    FP8_CACHE = "fp8_cache"
    INT8_CACHE = "int8_cache"
    WINDOW = "window"
    BLOCK_SPARSE = "block_sparse"
    LINEAR = "linear"
    FEWER_KV_HEADS = "fewer_kv_heads"


class Variable(StrEnum):
    """Which kind of variable a change is; the two must not be mixed in one comparison."""

    ALGORITHM = "algorithm"
    SYSTEM = "system"


# These must give the same answers, to the rounding of the dtype.
EXACT_CHANGES = (Change.PAGED, Change.KERNEL)
SYSTEM_CHANGES = (*EXACT_CHANGES, Change.FP8_CACHE, Change.INT8_CACHE)


def variable_of(change: Change) -> Variable:
    """Return whether a change is the algorithm's or the system's."""
    return Variable.SYSTEM if change in SYSTEM_CHANGES else Variable.ALGORITHM


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRun:
    """Changes to measure on a small model that the run trains to recall, and on a `model` if given.

    `window` is in tokens, `block` and `block_stride` as in planner/attention. `kv_heads` are those left, whose
    keys and values are means of the ones they replace (one in the small model). `weights` is a folder with the model's own
    weights, without which they are random. `retrain` trains the small model with each change of the
    algorithm too. `recall_length` is the length of its sequences.
    """

    changes: tuple[Change, ...]
    model: Mapping[str, Any] | None = None
    weights: str | None = None
    length: int = 256
    rows: int = 2
    dtype: WeightDtype = WeightDtype.BF16
    window: int = 16
    block: int = 8
    block_stride: int = 2
    kv_heads: int = 1
    recall_length: int = 64
    recall_steps: int = 600
    retrain: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as a job spec holds it."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {"changes": [str(one) for one in self.changes], "dtype": str(self.dtype)}


def parse_quality(given: object, world: str) -> tuple[QualityRun, ModelSpec | None]:
    """Read a spec's `quality`; absent fields take their defaults, `changes` all that the world has.

    Raises PlanError naming the field at fault.
    """
    values = check_mapping("quality", given, frozenset(QualityRun.__dataclass_fields__))
    on_cpu = world == "cpu"
    given_model = values.get("model")
    model, source = (None, None) if given_model is None else parse_model(given_model)
    default = QualityRun(
        changes=tuple(one for one in Change if _is_possible(one, model, on_cpu)),
        dtype=WeightDtype.FP32 if on_cpu else WeightDtype.BF16,
    )
    merged = default.to_dict() | dict(values)

    def count(name: str, low: int, high: int) -> int:
        return check_integer(f"quality.{name}", merged[name], low, high)

    run = QualityRun(
        changes=_changes(merged["changes"], on_cpu),
        model=source,
        weights=check_folder("quality.weights", merged["weights"]),
        length=count("length", MIN_LENGTH, MAX_LENGTH),
        rows=count("rows", 1, MAX_ROWS),
        dtype=check_choice("quality.dtype", merged["dtype"], WeightDtype),
        window=count("window", 1, MAX_LENGTH),
        block=count("block", 1, MAX_LENGTH),
        block_stride=count("block_stride", 1, MAX_LENGTH),
        kv_heads=count("kv_heads", 1, 1024),
        recall_length=count("recall_length", MIN_LENGTH, 1024),
        recall_steps=count("recall_steps", 1, MAX_STEPS),
        retrain=check_boolean("quality.retrain", merged["retrain"]),
    )
    _check_together(run, model)
    return run, model


def _is_possible(change: Change, model: ModelSpec | None, on_cpu: bool) -> bool:
    """Whether a change is among those that a run without a list of them takes."""
    if change is Change.KERNEL:
        return model is not None and not on_cpu
    return change is not Change.FEWER_KV_HEADS or model is None or model.num_kv_heads > 1


def _changes(given: object, on_cpu: bool) -> tuple[Change, ...]:
    if not isinstance(given, list | tuple) or not given:
        raise PlanError("quality.changes", given, "a list of " + ", ".join(Change))
    changes = tuple(check_choice("quality.changes", one, Change) for one in given)
    if on_cpu and Change.KERNEL in changes:
        sentence = "quality.changes has 'kernel': our kernels need a GPU; leave it out on a CPU."
        raise PlanError("quality.changes", "kernel", "the others on a CPU", sentence=sentence)
    return changes


def _check_together(run: QualityRun, model: ModelSpec | None) -> None:
    if model is None:
        if Change.KERNEL in run.changes:
            sentence = "quality.changes has 'kernel': it is measured on a model, so name one."
            raise PlanError("quality.changes", "kernel", "with a model", sentence=sentence)
        if run.weights is not None:
            raise PlanError("quality.weights", run.weights, "left out where no model is named")
        return
    if run.length > model.max_positions:
        allowed = f"at most {model.max_positions}, the positions of {model.name}"
        raise PlanError("quality.length", run.length, allowed)
    if model.num_sliding_layers or model.attention_logit_softcap or model.latent:
        allowed = "one whose layers all attend to everything, without softcap or latent attention"
        raise PlanError("quality.model", model.name, allowed)
    left, heads = run.kv_heads, model.num_kv_heads
    if Change.FEWER_KV_HEADS in run.changes and (left >= heads or heads % left):
        allowed = f"a divisor below {heads}, the key/value heads of {model.name}"
        raise PlanError("quality.kv_heads", left, allowed)


QUALITY_COLUMNS = (
    *("change", "variable", "KL", "largest logit difference", "same choice"),
    *("perplexity", "recall near", "recall far", "trained with it", "verdict"),
)
CHANGE_WORDS: Mapping[Change, str] = {
    Change.PAGED: "paged cache",
    Change.KERNEL: "our kernels",
    Change.FP8_CACHE: "fp8 cache",
    Change.INT8_CACHE: "int8 cache",
    Change.WINDOW: "sliding window",
    Change.BLOCK_SPARSE: "block-sparse",
    Change.LINEAR: "linear attention",
    Change.FEWER_KV_HEADS: "fewer KV heads",
}


def change_verdict(change: Change, found: Mapping[str, Any], floor: float) -> str:
    """Say whether a change left the logits alone, rounded them, or made another model.

    `floor` is the largest logit difference between two exact ways of the same model.
    """
    largest: float = found["max_abs"]
    if largest == 0:
        return "no change"
    if largest <= ROUNDINGS * floor:
        return "rounding"
    if change in EXACT_CHANGES:
        return "wrong: must not change"
    return "rounds the cache" if variable_of(change) is Variable.SYSTEM else "another model"


def quality_cells(part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return QUALITY_COLUMNS of a model's table: exact first, then system, then algorithm."""
    exact = part["exact"]
    rows: list[tuple[str, ...]] = [
        ("exact", "-", "0", "0", "100 %", f"{exact['perplexity']:.4g}", *_recall(exact), "-")
    ]
    changes = sorted((Change(name) for name in part["changes"]), key=_order)
    for change in changes:
        found = part["changes"][change]
        rows.append(
            (
                CHANGE_WORDS[change],
                str(variable_of(change)),
                f"{found['kl_mean']:.3g}",
                f"{found['max_abs']:.3g}",
                f"{100 * found['same_choice']:.1f} %",
                f"{found['perplexity']:.4g}",
                *_recall(found),
                change_verdict(change, found, part["floor"]),
            )
        )
    return rows


def _order(change: Change) -> tuple[bool, int]:
    return variable_of(change) is Variable.ALGORITHM, list(Change).index(change)


def _recall(found: Mapping[str, Any]) -> tuple[str, str, str]:
    shares = (found.get("near"), found.get("far"), found.get("retrained_far"))
    near, far, retrained = ("-" if one is None else f"{100 * one:.0f} %" for one in shares)
    return near, far, retrained


def quality_title(name: str, part: Mapping[str, Any]) -> str:
    """Return which model a table is of, on what, and with which weights."""
    if name == "recall":
        return (
            f"The small model, trained for {part['steps']} steps to recall over {part['length']} tokens; "
            f"perplexity and logits are those of {part['positions']} answers"
        )
    return (
        f"{name} with {part['weights']} weights, {part['positions']} positions of random tokens "
        f"after the first {CHUNK_TOKENS}"
    )


def quality_sentences(measured: Mapping[str, Any]) -> list[str]:
    """Return what the probe found, for system and algorithm apart, and what it rests on."""
    lines = []
    for name, part in measured["models"].items():
        system = [one for one in part["changes"] if variable_of(Change(one)) is Variable.SYSTEM]
        wrong = [
            CHANGE_WORDS[Change(one)]
            for one in system
            if Change(one) in EXACT_CHANGES
            and change_verdict(Change(one), part["changes"][one], part["floor"]).startswith("wrong")
        ]
        exact = [one for one in system if Change(one) in EXACT_CHANGES]
        if wrong:
            lines.append(f"{name}: {', '.join(wrong)} changed the answers, which must not be.")
        elif exact:
            words = " and ".join(CHANGE_WORDS[Change(one)] for one in exact)
            lines.append(f"{name}: {words} left the answers alone, to rounding.")
    return lines + _recall_sentences(measured["models"].get("recall"))


def _recall_sentences(part: Mapping[str, Any] | None) -> list[str]:
    if part is None:
        return []
    lines = []
    window = part["changes"].get("window", {})
    if window.get("near") is not None and window.get("far") is not None:
        lines.append(
            f"With a window of {part['settings']['window']} the small model recalls "
            f"{100 * window['near']:.0f} % of what it can see and {100 * window['far']:.0f} % of what "
            f"lies farther back (exact attention: {100 * part['exact']['far']:.0f} %; by chance "
            f"{100 * part['chance']:.0f} %)."
        )
    if part["exact"]["accuracy"] < 0.9:
        lines.append(
            "The small model itself recalls little: give it more recall_steps before trusting the rest."
        )
    return lines
