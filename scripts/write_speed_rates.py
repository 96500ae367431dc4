"""Write planner/speed/h200.json from rows of `peakmark calibrate`.

python scripts/write_speed_rates.py recorded/h200-calibrate.jsonl recorded/speed/h200-{host,kinds,dtypes,offload,pace,products}.jsonl

Each file holds JSON lines: recorded calibrations, single curves or single rows of the host. Of our kernels for
Hopper `dtypes` has the lengths at which the GPU, not the host that starts them, took the time.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from planner.memory.kinds import layer_kinds
from planner.speed.operation_lists import operation_list
from planner.workload import TrainingWorkload
from runners.jobs.calibrate_host import HostCase

TARGET = Path("planner/speed/h200.json")
SOURCE = "curves measured on an NVIDIA H200 (torch 2.11, CUDA 13.0)"
# How much slower the hosts of recorded steps were than the idle one that was calibrated: the median of
# measured over predicted time of these sixteen steps that wait for their host. They are the first by id
# of 80, and no evidence for times. So is that of the host which went through small modules in the median
# time of recorded/speed/h200-pace.jsonl.
PACE = 1.443
PACE_ROWS = (
    *("011fb2f372f6d89c", "0208d9ca18387af7", "079305cf2d8a13c3", "12b2eef233adad05"),
    *("14c848ecb25b6233", "1a0ab212274e83dc", "1be1718f63fb17dd", "1d7df19858e31938"),
    *("23743b6561a51a21", "243818af370d88bf", "2528cdcf83b22c6c", "27b3a52f998dfa90"),
    *("2955c424a4741195", "2b4225a8890289fe", "3aae6610b8b5813c", "3f48ecd893adbcf2"),
)
# Seconds per layer of an idle host's optimizer step that updates FSDP2's parameters one by one: a dozen
# operations on each DTensor, by row 1d7df19858e31938 (24 layers of GPT-2) over the pace.
LOOP_OF_DTENSORS_S = 2.74e-3
# The same of one that updates them together, by row 39f5a1d4aa990a1a (16 layers of Llama: 12.0 ms).
FOREACH_OF_DTENSORS_S, FOREACH_ROW = 0.52e-3, "39f5a1d4aa990a1a"
# DeepSpeed's stage 3 on an idle host, per parameter that it handles and per operation on one rank's piece:
# the smallest mean error over these eight rows, the first by id (`python scripts/fit_stage3.py`).
STAGE3_S = {"parameter": 0.48e-3, "piece": 2e-6}
STAGE3_ROWS = (
    *("0aac5dd20c583a37", "2368eade0933aae2", "506c5531c98313ac", "52ab83ea0af81dca"),
    *("631753e7601c468b", "6a085ca8a2927c34", "8046c100981d3d55", "9cb1a2c58ed9fae4"),
)
_FORWARD, _BACKWARD, _RECOMPUTE = range(3)
# Engines that do nothing for a layer in the forward: DDP's wrapper works once before and once after the model
# (torch/nn/parallel/distributed.py, _pre_forward). What was measured besides is the host's noise.
_PLAIN_FORWARD = ("ddp", "zero_redundancy")


def read(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the curves and the rows of the host that the files hold."""
    curves: list[dict[str, Any]] = []
    host: list[dict[str, Any]] = []
    for path in paths:
        for line in path.read_text().splitlines():
            data = json.loads(line)
            measured = data.get("measured", data)
            curves += measured.get("curves", [data] if "operation" in data else [])
            host += measured.get("host", [data] if "family" in data else [])
    return curves, [row for row in host if "depths" in row]


class Measured:
    """One case of the host: seconds and kernels of its deeper model's step."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.case = HostCase(**{k: v for k, v in row.items() if k != "depths"})
        deep = row["depths"][-1]
        self.layers = int(deep["layers"])
        phases = ("forward", "backward", "optimizer")
        self.seconds = tuple(deep[f"{name}_s"] for name in phases)
        shallow = row["depths"][0]
        before = shallow["layers"] / (self.layers - shallow["layers"])
        # What a step takes besides its layers: what the line through both depths says of none.
        self.rest_s = tuple(
            shallow[f"{name}_s"] - before * (deep[f"{name}_s"] - shallow[f"{name}_s"])
            for name in phases
        )
        plan = self.case.plan(self.layers)
        assert isinstance(plan.workload, TrainingWorkload)
        kinds = layer_kinds(plan.model, plan.workload)
        self.launches = operation_list(plan.model, plan.workload, kinds).launches

    @property
    def is_plain(self) -> bool:
        """Whether neither an engine nor checkpointing adds anything."""
        case = self.case
        return case.engine == "peakmark" and not case.stage and case.checkpointing == "none"


def host_table(
    rows: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the JSON form of `planner.speed.host.HostTable`."""
    every = [Measured(row) for row in rows]
    plain = [one for one in every if one.is_plain and one.case.precision != "mixed"]
    step_s = [median(one.rest_s[i] for one in plain) for i in (_FORWARD, _BACKWARD)]
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in plain:
        pair = tuple(
            max(0.0, one.seconds[i] - step_s[i]) / one.launches[i] for i in (_FORWARD, _BACKWARD)
        )
        families[one.case.family].append(pair)
        families[""].append(pair)
    kernel_s = _kernel_s(families)
    updates = {
        one.case.optimizer: one.seconds[2] / one.layers
        for one in plain
        if one.case.optimizer != "adamw_fused"
    }
    extra, engine_updates = _engines(every)
    extra["checkpoint"] = _checkpoint(every)
    extra["triton"] = _own_attention(plain)
    return {
        "kernel_s": kernel_s,
        "step_s": step_s,
        "extra_kernels": extra,
        "update_s": updates
        | engine_updates
        | {"fsdp2/adamw_loop": LOOP_OF_DTENSORS_S, "fsdp2/adamw_foreach": FOREACH_OF_DTENSORS_S},
        "stage3_s": STAGE3_S,
        "module_s": [_module_s(curves, way) / PACE for way in ("forward", "backward")],
        "paces": [PACE, PACE],
        "rows_used": [*PACE_ROWS, *STAGE3_ROWS, FOREACH_ROW],
    }


def _module_s(curves: Iterable[Mapping[str, Any]], way: str) -> float:
    name = f"launch_module_{way}"
    return float(median(one["time_s"] for one in curves if one["operation"] == name))


def _kernel_s(families: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[float]]:
    """Medians by family, drawn to that of all, which counts as two more points: the host is noisy."""
    every = [median(pair[i] for pair in families[""]) for i in range(2)]
    found = {"": every}
    for name, pairs in families.items():
        own, n = [median(pair[i] for pair in pairs) for i in range(2)], len(pairs)
        drawn = [exp((n * log(o) + 2 * log(a)) / (n + 2)) for o, a in zip(own, every, strict=True)]
        found.setdefault(name, drawn)
    return found


def _beside(every: Sequence[Measured], case: HostCase) -> Measured:
    """The plain step of the same family and precision that was measured last before an engine's."""
    found = [
        one
        for one in every
        if one.is_plain
        and (one.case.family, one.case.precision) == (case.family, case.precision)
        and (one.case.attention, one.case.optimizer, one.case.adapters)
        == (case.attention, case.optimizer, case.adapters)
    ]
    return found[-1]


def _engines(every: Sequence[Measured]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """What engines add in kernels of a layer, told by the plain step beside; their updates."""
    extra, updates = {}, {}
    for one in every:
        case = one.case
        if one.is_plain or case.checkpointing != "none":
            continue
        base = _beside(every, case)
        added = [
            max(0.0, (one.seconds[i] / base.seconds[i] - 1) * base.launches[i] / base.layers)
            for i in (_FORWARD, _BACKWARD)
        ]
        if case.engine in _PLAIN_FORWARD:
            added[_FORWARD] = 0.0
        extra[f"{case.engine}/{case.stage}"] = added
        slower = base.seconds[0] / base.launches[0] / _usual_s(every, case.family)
        updates[f"{case.engine}/{case.stage}"] = one.seconds[2] / one.layers / slower
    usual = median(one.seconds[2] / one.layers for one in every if one.is_plain)
    return extra, {"peakmark/0": usual, **updates}


def _usual_s(every: Sequence[Measured], family: str) -> float:
    mine = [one for one in every if one.is_plain and one.case.family == family]
    return float(median(one.seconds[0] / one.launches[0] for one in mine))


def _checkpoint(every: Sequence[Measured]) -> list[float]:
    """What a checkpointed layer adds beside the kernels of its forward: the median of all cases."""
    forward, backward = [], []
    for one in every:
        case = one.case
        if case.checkpointing == "none" or case.stage:
            continue
        base = _beside(every, HostCase(family=case.family, precision=case.precision))
        forward_s = base.seconds[0] / base.launches[_FORWARD]
        backward_s = base.seconds[1] / base.launches[_BACKWARD]
        forward.append((one.seconds[0] - base.seconds[0]) / forward_s / one.layers)
        again_s = one.seconds[1] - base.seconds[1] - one.launches[_RECOMPUTE] * forward_s
        backward.append(again_s / backward_s / one.layers)
    return [max(0.0, median(values)) for values in (forward, backward)]


def _own_attention(plain: Sequence[Measured]) -> list[float]:
    """What our attention adds in kernels of a layer, told by Llama's other steps in bf16."""
    same = [one for one in plain if one.case.family == "llama" and not one.case.adapters]
    ours = next(one for one in same if one.case.attention == "triton")
    added = []
    for i in (_FORWARD, _BACKWARD):
        usual_s = median(one.seconds[i] / one.launches[i] for one in same if one is not ours)
        added.append(max(0.0, (ours.seconds[i] / usual_s - ours.launches[i]) / ours.layers))
    return added


def render(paths: Iterable[Path]) -> str:
    """Return the file's text."""
    curves, host = read(paths)
    data = {"source": SOURCE, "curves": curves, "host": host_table(host, curves), "host_rows": host}
    return json.dumps(data, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(map(Path, sys.argv[1:])))
