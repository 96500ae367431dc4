"""`peakmark plan`: predicted memory, verdict and speed of one plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.commands.options import (
    SERVE_OPTIONS,
    SIZE_OPTIONS,
    TARGET_OPTIONS,
    plan_from,
    with_options,
)
from app.commands.output import (
    VERDICT_STYLES,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
    styled,
)

MEMORY_COLUMNS = (("component", "formula"), ("bytes",))
SPEED_COLUMNS = (("operation", "bound"), ("time", "of the step"))
SERVING_COLUMNS = (("quantity",), ("value",))
_SERVING_WORDS = {
    "kv_bytes_per_token": "cache of one token",
    "kv_bytes_per_sequence": "cache of one sequence",
    "weights_bytes": "weights",
    "activation_bytes": "activations and logits",
    "budget_bytes": "budget of the server",
    "kv_pool_bytes": "left for the cache",
    "max_tokens": "tokens that fit",
    "max_sequences": "sequences that fit",
    "fits_sequences": "the plan's sequences fit",
    "replicas": "replicas",
    "max_sequences_all_replicas": "sequences that fit on all replicas",
}


@with_options(TARGET_OPTIONS, SIZE_OPTIONS, SERVE_OPTIONS)
def plan_command(*, chosen: Mapping[str, Any], json: JsonFlag = False) -> None:
    """Predict peak memory and speed of a training or serving plan."""
    from planner.predict import predict

    plan = plan_from(chosen)
    prediction = predict(plan).to_dict()
    if json:
        print_json(prediction)
        return
    print_verdict(prediction)
    print_table(make_table(memory_title(prediction), *MEMORY_COLUMNS, memory_rows(prediction)))
    if prediction["serving"]:
        print_table(make_table("Serving", *SERVING_COLUMNS, serving_rows(prediction)))
    print_line(speed_sentence(prediction))
    if prediction["throughput"]["phases_s"]:
        print_speed(prediction["throughput"])
    for note in prediction["notes"]:
        print_line(f"Note: {note}")


def print_verdict(prediction: Mapping[str, Any]) -> None:
    """Print the model's line and the verdict's sentence in its colour."""
    from planner.units import format_count

    model, verdict = prediction["model"], prediction["verdict"]
    print_line(f"{model['name']}: {format_count(model['parameters'])} parameters")
    print_line(styled(verdict["sentence"], VERDICT_STYLES[verdict["state"]]))


def memory_title(prediction: Mapping[str, Any]) -> str:
    """Return the heading of the memory table: when the peak is, on which rank."""
    memory = prediction["memory"]
    return f"Peak in {memory['peak_phase']} on rank {memory['rank']}"


def memory_rows(prediction: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows from components to allocated, reserved and device bytes."""
    from planner.units import format_bytes

    memory = prediction["memory"]
    for part in memory["components"]:
        yield part["name"], part["formula"], format_bytes(part["bytes"])
    yield "allocated", "sum of the above", format_bytes(memory["allocated_bytes"])
    for part in memory["overheads"]:
        yield part["name"], part["formula"], format_bytes(part["bytes"])
    yield "reserved", "allocated + segments", format_bytes(memory["reserved_bytes"])
    yield "device", _device_formula(memory["overheads"]), format_bytes(memory["device_bytes"])


def _device_formula(overheads: Sequence[Mapping[str, Any]]) -> str:
    """Return the parts of device bytes; segments are a part of reserved bytes already."""
    names = (part["name"] for part in overheads if part["name"] != "segments")
    return " + ".join(("reserved", *names))


def serving_rows(prediction: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what serving needs and how many sequences fit."""
    for name, value in prediction["serving"].items():
        yield _SERVING_WORDS[name], _serving_value(name, value)


def _serving_value(name: str, value: int | bool) -> str:
    from planner.units import format_bytes

    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_bytes(value) if "bytes" in name else f"{value:,}"


def print_speed(throughput: Mapping[str, Any]) -> None:
    """Print what a training step's time goes to, the longest first."""
    from app.plan_words import speed_detail
    from planner.units import format_seconds, format_share

    step_time_s = throughput["step_time_s"]
    rows = [
        (
            row["name"],
            row["bound"],
            format_seconds(row["time_s"]),
            format_share(row["time_s"] / step_time_s),
        )
        for row in sorted(throughput["operations"], key=lambda row: -row["time_s"])
    ]
    print_table(make_table("Where the step goes", *SPEED_COLUMNS, rows))
    print_line(speed_detail(throughput))


def speed_sentence(prediction: Mapping[str, Any]) -> str:
    """Return the line about speed, with its label."""
    from planner.units import format_seconds, format_share

    speed = prediction["throughput"]
    return (
        f"Step {format_seconds(speed['step_time_s'])}, "
        f"{speed['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, "
        f"MFU {format_share(speed['mfu'])}, bound by {speed['bound']} ({speed['label']})"
    )
