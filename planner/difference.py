"""Plans side by side: the options and predicted quantities that differ, and what moved between two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum, isclose
from typing import Any

from planner.errors import PlanError
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.units import format_share
from planner.workload import Parallelism, ServingWorkload, TrainingWorkload, field_words, flat_dict

MAX_PLANS = 4
# Sums of the same times in another order differ by this share at most.
ROUNDING = 1e-9
# What describes a model beside its dimensions: derived from them, or said elsewhere.
_NO_DIMENSIONS = frozenset(
    (
        *("name", "hf_config", "flags", "latent", "parameters"),
        *("multiplies_for_angles", "masks_experts", "portable_attention"),
    )
)
_SPEED = (
    ("step time", "step_time_s", "s"),
    ("GPU time", "gpu_s", "s"),
    ("host time", "host_s", "s"),
    ("time at the vendor's peaks", "ideal_s", "s"),
    ("tokens per second", "tokens_per_s", "per_s"),
    ("tokens per second per GPU", "tokens_per_s_per_gpu", "per_s"),
    ("MFU", "mfu", "share"),
    ("HFU", "hfu", "share"),
    ("bound", "bound", "text"),
    ("FLOPs per step", "flops_per_step", "count"),
)
_VERDICT = (
    ("verdict", "state", "text"),
    ("needed", "needed_bytes", "bytes"),
    ("available", "capacity_bytes", "bytes"),
    ("headroom", "headroom_bytes", "bytes"),
    ("low end of the interval", "low_bytes", "bytes"),
    ("high end of the interval", "high_bytes", "bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """A plan with its prediction's JSON form, or with the sentence that says why it has none.

    `document` is the plan's JSON: complete where it can be planned, else as it was given.
    """

    document: Mapping[str, Any] = field(hash=False)
    prediction: Mapping[str, Any] | None = field(default=None, hash=False)
    refusal: str | None = None


def compare_plan(
    document: object, answer: Callable[[Plan], Mapping[str, Any]] | None = None
) -> ComparedPlan:
    """Plan a document for a comparison; a PlanError becomes the entry's sentence.

    `answer` gives a plan's prediction as JSON, `predict` where left out.
    """
    try:
        plan = parse_plan(document)
        found = answer(plan) if answer else predict(plan).to_dict()
    except PlanError as error:
        given = document if isinstance(document, Mapping) else {}
        return ComparedPlan(document=given, refusal=str(error))
    return ComparedPlan(document=plan.to_dict(), prediction=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceRow:
    """One option or predicted quantity over all plans; None where a plan has no such thing.

    `unit` is "bytes", "s", "per_s", "share", "count", "text" or "option"; `group` is where it belongs.
    `unknown` are the plans, by their place, of which it cannot be said as they were refused.
    """

    group: str
    name: str
    unit: str
    values: tuple[Any, ...] = field(hash=False)
    unknown: frozenset[int] = frozenset()

    @property
    def differs(self) -> bool:
        """Whether two plans of which it is known have different values."""
        known = [value for i, value in enumerate(self.values) if i not in self.unknown]
        return any(not alike(value, known[0]) for value in known[1:])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        names = ("group", "name", "unit")
        return {**{name: getattr(self, name) for name in names}, "values": list(self.values)}


def alike(first: Any, second: Any) -> bool:
    """Return whether two values are the same, but for the rounding of sums of floating-point numbers."""
    if isinstance(first, float) and isinstance(second, float):
        return isclose(first, second, rel_tol=ROUNDING)
    return bool(first == second)


def differing(rows: Iterable[DifferenceRow]) -> list[DifferenceRow]:
    """Return the rows in which two plans differ."""
    return [row for row in rows if row.differs]


def option_rows(plans: Sequence[ComparedPlan]) -> list[DifferenceRow]:
    """Return every option of the plans, defaults written out, whether it differs or not."""
    tables = [_options(plan) for plan in plans]
    return [
        DifferenceRow(
            group=name.split(".")[0],
            name=field_words(name.split(".", 1)[1]),
            unit="option",
            values=tuple(table.get(name) for table in tables),
            unknown=frozenset(
                index
                for index, plan in enumerate(plans)
                if plan.refusal and name not in tables[index]
            ),
        )
        for name in dict.fromkeys(name for table in tables for name in table)
    ]


def _options(plan: ComparedPlan) -> dict[str, Any]:
    """Return a plan's options by dotted name; of a plan that was refused those that were given."""
    document = plan.document
    job = document.get("job", "train")
    workload = ServingWorkload() if job == "serve" else TrainingWorkload()
    model, hardware = (_mapping(document.get(name)) for name in ("model", "hardware"))
    custom = _mapping(hardware.get("custom"))
    options = {
        "job.job": job,
        "model.name": model.get("preset")
        or model.get("name")
        or ("config.json" if "config" in model else None),
        **_named("model", _mapping(model.get("overrides")) if plan.refusal else _dimensions(plan)),
        **_named("workload", {**flat_dict(workload), **_mapping(document.get("workload"))}),
        **_named(
            "parallelism", {**flat_dict(Parallelism()), **_mapping(document.get("parallelism"))}
        ),
        "hardware.name": hardware.get("preset") or custom.get("name"),
        **_named("hardware", {name: custom[name] for name in custom if name != "name"}),
    }
    return {name: _plain(value) for name, value in options.items() if document}


def _dimensions(plan: ComparedPlan) -> dict[str, Any]:
    model = plan.prediction["model"] if plan.prediction else {}
    return {
        name: value
        for name, value in model.items()
        if name not in _NO_DIMENSIONS and not name.endswith("_parameters")
    }


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _named(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in values.items()}


def _plain(value: Any) -> Any:
    """Return a number, truth or text as it is, anything else as text: rows hold scalars."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def quantity_rows(plans: Sequence[ComparedPlan]) -> list[DifferenceRow]:
    """Return every predicted quantity: verdict, memory by component, step time by part, the rest.

    A part that a planned plan has none of is 0 there; a plan that was refused has None everywhere.
    """
    found = [plan.prediction for plan in plans]
    rows = [_row("model", "parameters", "count", found, ("model", "parameters"))]
    rows += [_row("verdict", name, unit, found, ("verdict", key)) for name, key, unit in _VERDICT]
    rows += _part_rows("memory", "bytes", found, memory_parts)
    rows += [
        _row("memory", counter, "bytes", found, ("memory", f"{counter}_bytes"))
        for counter in ("allocated", "reserved", "device")
    ]
    peaks = tuple(None if one is None else _peak(one) for one in found)
    rows.append(
        DifferenceRow(
            group="memory", name="peak in", unit="text", values=peaks, unknown=_refused(found)
        )
    )
    rows += _part_rows("time", "s", found, time_parts)
    rows += _part_rows("time", "s", found, _phases)
    rows += [_row("time", name, unit, found, ("throughput", key)) for name, key, unit in _SPEED]
    rows += _part_rows("communication", "bytes", found, _sent)
    rows += _serving_rows(found)
    return [row for row in rows if any(value is not None for value in row.values)]


Found = Sequence[Mapping[str, Any] | None]


def _row(group: str, name: str, unit: str, found: Found, path: tuple[str, str]) -> DifferenceRow:
    part, key = path
    values = tuple(None if one is None else _plain(one[part].get(key)) for one in found)
    return DifferenceRow(group=group, name=name, unit=unit, values=values, unknown=_refused(found))


def _refused(found: Found) -> frozenset[int]:
    return frozenset(index for index, one in enumerate(found) if one is None)


def _part_rows(
    group: str, unit: str, found: Found, read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[DifferenceRow]:
    """One row per part that any plan has; 0 for a planned plan without it."""
    parts = [None if one is None else read(one) for one in found]
    names = dict.fromkeys(name for one in parts if one for name in one)
    return [
        DifferenceRow(
            group=group,
            name=name.replace("_", " "),
            unit=unit,
            values=tuple(None if one is None else one.get(name, 0) for one in parts),
            unknown=_refused(found),
        )
        for name in names
    ]


def memory_parts(prediction: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each component and overhead at the peak; their sum is device bytes."""
    memory = prediction["memory"]
    return _summed((p["name"], p["bytes"]) for p in (*memory["components"], *memory["overheads"]))


def time_parts(prediction: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each kind of operation; their sum is the step time."""
    return _summed((p["name"], p["time_s"]) for p in prediction["throughput"]["operations"])


def _summed(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for name, value in pairs:
        sums[name] = sums.get(name, 0) + value
    return sums


def _peak(prediction: Mapping[str, Any]) -> str:
    memory = prediction["memory"]
    labels = {phase["name"]: phase.get("label") for phase in memory["phases"]}
    return labels.get(memory["peak_phase"]) or str(memory["peak_phase"])


def _phases(prediction: Mapping[str, Any]) -> dict[str, float]:
    phases = prediction["throughput"].get("phases_s") or {}
    return {f"{name}, whole": time_s for name, time_s in phases.items()}


def _sent(prediction: Mapping[str, Any]) -> dict[str, float]:
    sent = prediction["throughput"].get("communication") or ()
    return _summed((f"{one['collective']}, sent", one["bytes"]) for one in sent)


def _serving_rows(found: Found) -> list[DifferenceRow]:
    tables = [one and one["serving"] for one in found]
    names = dict.fromkeys(
        name
        for table in tables
        for name, value in (table or {}).items()
        if isinstance(value, bool | int | float | str)
    )
    return [
        DifferenceRow(
            group="serving",
            name=name.removesuffix("_bytes").replace("_", " "),
            unit="bytes" if "bytes" in name else "text" if name.startswith("fits") else "count",
            values=tuple(table.get(name) if table else None for table in tables),
            unknown=_refused(found),
        )
        for name in names
    ]


class Measure(StrEnum):
    """What a waterfall explains: device or allocated bytes at the peak, or the time of a step."""

    DEVICE = "device"
    ALLOCATED = "allocated"
    STEP_TIME = "step_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From `start` by `moves` (part, change), the largest first, to `end`; bytes or seconds.

    `start` plus all changes is `end`: to the byte, and in seconds to the rounding of floats.
    """

    measure: Measure
    start: float
    end: float
    moves: tuple[tuple[str, float], ...]

    @property
    def change(self) -> float:
        """What all moves come to."""
        changes = [change for _, change in self.moves]
        return fsum(changes) if self.measure is Measure.STEP_TIME else sum(changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        moves = [{"part": name, "change": change} for name, change in self.moves]
        return {"measure": str(self.measure), "start": self.start, "end": self.end, "moves": moves}

    def sentence(self, show: Callable[[float], str], names: tuple[str, str], most: int = 3) -> str:
        """Say how much the second of two named plans takes more or less, and what makes it so."""
        first, second = names
        what = "step" if self.measure is Measure.STEP_TIME else f"{self.measure} memory"
        if not self.moves:
            return f"The {what} of {second} is predicted the same as that of {first}."
        change = self.end - self.start
        kinds = ("longer", "shorter") if self.measure is Measure.STEP_TIME else ("more", "less")
        share = f" ({percent(change / self.start)})" if self.start else ""
        parts = ", ".join(f"{name} {signed(value, show)}" for name, value in self.moves[:most])
        rest = fsum(value for _, value in self.moves[most:])
        others = f", all else {signed(rest, show)}" if len(self.moves) > most else ""
        much = f"{show(abs(change))} {kinds[change < 0]}"
        return f"The {what} of {second} is {much} than that of {first}{share}: {parts}{others}."


def percent(share: float) -> str:
    """Return a relative change with its sign, such as "+12.5%"; from tenfold on how often, "× 16"."""
    if share >= 9:
        return f"× {share + 1:,.{0 if share >= 99 else 1}f}"
    return f"{'−' if share < 0 else '+'}{format_share(abs(share))}"


def signed(value: float, show: Callable[[float], str]) -> str:
    """Return a change with its sign, such as "+1.50 GiB"."""
    return f"{'−' if value < 0 else '+'}{show(abs(value))}"


def waterfall(
    baseline: Mapping[str, Any], chosen: Mapping[str, Any], measure: Measure
) -> Waterfall:
    """Return which part moved from one prediction to another, as their JSON forms say."""
    read = time_parts if measure is Measure.STEP_TIME else memory_parts
    before, after = read(baseline), read(chosen)
    if measure is Measure.ALLOCATED:
        before, after = (_without_overheads(one) for one in (baseline, chosen))
    moves = [
        (name.replace("_", " "), after.get(name, 0) - before.get(name, 0))
        for name in {**before, **after}
        if not alike(before.get(name, 0), after.get(name, 0))
    ]
    return Waterfall(
        measure=measure,
        start=_total(baseline, measure),
        end=_total(chosen, measure),
        moves=tuple(sorted(moves, key=lambda move: -abs(move[1]))),
    )


def _without_overheads(prediction: Mapping[str, Any]) -> dict[str, int]:
    return _summed((part["name"], part["bytes"]) for part in prediction["memory"]["components"])


def _total(prediction: Mapping[str, Any], measure: Measure) -> float:
    if measure is Measure.STEP_TIME:
        return float(prediction["throughput"]["step_time_s"])
    return int(prediction["memory"][f"{measure}_bytes"])
