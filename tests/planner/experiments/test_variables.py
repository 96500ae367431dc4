"""Each choice is an algorithm variable, a system variable or work, and two kinds at once are flagged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from planner.experiments.groups import Group, changes, flags, group_lines
from planner.experiments.lines import SeenRun, columns, lines_of
from planner.experiments.variables import KINDS, Kind

PLAN: dict[str, Any] = {
    "model": {"preset": "Qwen/Qwen2.5-0.5B"},
    "hardware": {"preset": "h200-sxm5-141gb"},
    "workload": {"sequence_length": 1024},
    "parallelism": {"world_size": 2},
}
TRAIN: dict[str, Any] = {"schema": 1, "kind": "train_step", "world": "nccl", "plan": PLAN}
ATTENTION: dict[str, Any] = {
    "kind": "attention",
    "world": "nccl",
    "attention": {
        "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "sequence_length": 4096,
        "causal": True, "window": 1024,
    },
}  # fmt: skip
DECODE: dict[str, Any] = {
    "kind": "decode",
    "world": "solo",
    "decode": {"model": {"preset": "Qwen/Qwen2.5-0.5B"}, "cache": "paged"},
}


def seen(spec: Mapping[str, Any], name: str = "a", **measured: Any) -> SeenRun:
    return SeenRun(id=name, spec=spec, outcome="done", measured=measured, environment={})


def changed(spec: Mapping[str, Any], *path: str, value: Any) -> dict[str, Any]:
    new = copy.deepcopy(dict(spec))
    place = new
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = value
    return new


def groups_of(*specs: Mapping[str, Any]) -> list[Group]:
    return group_lines([line for spec in specs for line in lines_of(seen(spec))])


@pytest.mark.parametrize(
    ("path", "value", "column", "kind"),
    [
        (("workload", "precision"), "fp32", "precision", Kind.ALGORITHM),
        (("workload", "lora_rank"), 8, "LoRA rank", Kind.ALGORITHM),
        (("workload", "optimizer"), "sgd", "optimizer", Kind.ALGORITHM),
        (("model", "overrides"), {"num_key_value_heads": 14}, "KV heads", Kind.ALGORITHM),
        (("workload", "optimizer"), "adamw_foreach", "optimizer kernel", Kind.SYSTEM),
        (("workload", "attention"), "triton", "attention", Kind.SYSTEM),
        (("workload", "checkpointing"), "full", "checkpointing", Kind.SYSTEM),
        (("workload", "loss"), "chunked", "loss kernel", Kind.SYSTEM),
        (("parallelism", "zero_stage"), 1, "ZeRO stage", Kind.SYSTEM),
        (("parallelism", "engine"), "fsdp2", "engine", Kind.SYSTEM),
        (("parallelism", "world_size"), 4, "ranks", Kind.SYSTEM),
        (("workload", "micro_batch"), 2, "micro-batch", Kind.WORK),
        (("workload", "sequence_length"), 2048, "sequence length", Kind.WORK),
    ],
)
def test_one_choice_of_a_plan_is_one_variable_of_its_kind(
    path: tuple[str, ...], value: Any, column: str, kind: Kind
) -> None:
    base, other = groups_of(TRAIN, changed(TRAIN, "plan", *path, value=value))
    found = changes(base, other)
    assert [change.column for change in found[kind]] == [column]
    assert sum(map(len, found.values())) == 1
    assert KINDS[column] is kind
    assert not any("changes both" in flag for flag in flags(base, other))


def test_kernels_are_systems_and_patterns_are_algorithms() -> None:
    eager, sdpa, ours, window, both, sparse, linear = groups_of(ATTENTION)
    assert {kind for kind, found in changes(eager, sdpa).items() if found} == {Kind.SYSTEM}
    for other in (window, both, sparse, linear):
        # Ours with a pattern beside ours without: the pattern alone is another.
        assert {kind for kind, found in changes(ours, other).items() if found} == {Kind.ALGORITHM}
        # cuDNN beside ours with a pattern: kernel and pattern at once.
        [flag] = flags(sdpa, other)
        assert flag.startswith("changes both the algorithm (pattern: full → ")
        assert "the system (attention: sdpa → triton)" in flag
    # A window as long as the sequence hides nothing: it computes what the kernel does.
    whole = groups_of(changed(ATTENTION, "attention", "window", value=4096))
    assert whole[2].variables["pattern"] == "full"
    assert [line.part for line in whole[2].lines] == ["triton", "window", "global_local"]


def test_a_quantised_cache_is_an_algorithm_and_pages_are_a_system() -> None:
    base, int8 = groups_of(DECODE, changed(DECODE, "decode", "cache_dtype", value="int8"))
    assert {k: [c.words() for c in found] for k, found in changes(base, int8).items()} == {
        Kind.ALGORITHM: ["cache dtype: bf16 → int8"],
        Kind.SYSTEM: [],
        Kind.WORK: [],
    }
    flat = groups_of(changed(DECODE, "decode", "cache", value="contiguous"))[0]
    # The size of pages is no variable of a cache that has none.
    assert [c.column for c in changes(base, flat)[Kind.SYSTEM]] == ["cache layout"]
    mixed = groups_of(changed(DECODE, "decode", "cache_dtype", value="int8"), DECODE)
    assert len(mixed) == 2


def test_a_world_and_a_precision_at_once_are_flagged_with_what_changed() -> None:
    other = changed(
        changed(TRAIN, "world", value="solo"), "plan", "workload", "precision", value="bf16"
    )
    base, second = groups_of(TRAIN, other)
    assert flags(base, second) == [
        "changes both the algorithm (precision: mixed → bf16) and the system (world: nccl → solo): no "
        "difference can be put down to either. Change one at a time."
    ]
    [flag] = flags(base, groups_of(changed(TRAIN, "plan", "workload", "micro_batch", value=2))[0])
    assert flag.startswith("does other work (micro-batch: 1 → 2)")


def test_more_steps_are_no_other_work_of_a_step() -> None:
    base, longer = groups_of(changed(TRAIN, "steps", value=3), changed(TRAIN, "steps", value=10))
    assert flags(base, longer) == ["was measured otherwise (steps: 3 → 10)."]


def test_only_what_varies_is_a_column() -> None:
    specs = (TRAIN, changed(TRAIN, "plan", "parallelism", "zero_stage", value=1))
    lines = [line for spec in specs for line in lines_of(seen(spec))]
    assert columns(lines) == [("ZeRO stage", Kind.SYSTEM)]
    assert ("precision", Kind.ALGORITHM) in columns(lines, only_varying=False)


def test_another_model_is_one_variable_whatever_its_dimensions() -> None:
    specs = (TRAIN, changed(TRAIN, "plan", "model", value={"preset": "Qwen/Qwen3-0.6B"}))
    base, other = groups_of(*specs)
    assert [change.words() for change in changes(base, other)[Kind.ALGORITHM]] == [
        "model: Qwen2.5-0.5B → Qwen3-0.6B"
    ]
    lines = [line for spec in specs for line in lines_of(seen(spec))]
    assert columns(lines) == [("model", Kind.ALGORITHM)]


def test_defaults_written_out_are_the_same_spec() -> None:
    written = changed(TRAIN, "plan", "workload", "precision", value="mixed")
    assert len(groups_of(TRAIN, written)) == 1


def test_a_decode_run_has_a_line_for_each_peer() -> None:
    peer = {"outcome": "done", "decode_time_s": 0.02, "tokens_per_s": 50, "peak_allocated_bytes": 9}
    spec = changed(DECODE, "decode", "cache_dtype", value="fp8")
    ours, other = lines_of(seen(spec, step_time_s=0.01, peers={"static": peer}))
    assert ours.figures == {"step time": 0.01}
    assert other.figures == {"step time": 0.02, "tokens per second": 50, "allocated": 9}
    base, second = group_lines([ours, other])
    # transformers keeps its cache in the weights' dtype: another algorithm and another engine.
    assert "cache dtype: fp8 → bf16" in flags(base, second)[0]


def test_a_spec_that_cannot_be_read_says_so() -> None:
    [line] = lines_of(seen(changed(TRAIN, "plan", "parallelism", "world_size", value=0)))
    assert line.problem == ("parallelism.world_size is 0: it must be an integer from 1 to 65536.")
    assert line.variables["job"] == "train_step"


def test_a_variable_that_only_some_have_is_no_column() -> None:
    flat = changed(DECODE, "decode", "cache", value="contiguous")
    lines = [line for spec in (DECODE, flat) for line in lines_of(seen(spec))]
    assert columns(lines) == [("cache layout", Kind.SYSTEM)]
