"""What the worker, the supervisor and the jobs say to one another: spec, events, result."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.saved_training import check_folder

SCHEMA = 1
RESULT_FILE = "result.json"
SPEC_FILE = "spec.json"


class JobKind(StrEnum):
    """The jobs a run can execute; each is a module of `runners.jobs`."""

    TRAIN_STEP = "train_step"
    ATTENTION = "attention"
    CALIBRATE = "calibrate"
    DECODE = "decode"
    SERVE = "serve"
    PROFILE = "profile"
    QUALITY = "quality"
    LIMIT = "limit"


class World(StrEnum):
    """How the ranks of a run are made real (see docs/architecture.md)."""

    NCCL = "nccl"
    SHARED = "shared"
    SOLO = "solo"
    CPU = "cpu"


class Outcome(StrEnum):
    """How a run ended. Out of memory is a result, not a failure."""

    DONE = "done"
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One run to execute.

    `plan` is a plan's dictionary for `train_step`; `attention` is the shape for `attention`;
    `calibration` holds `world_size` and `budget_s` for `calibrate`; `decode` is what a decode run is
    asked (planner/decode_run.py), `serve` what a serving run is (planner/serve_run.py).
    `profile` takes a `plan` or a `decode`, and may name the folder of a `tokenizer`. `quality` is what
    a probe of quality is asked (planner/quality_run.py), `limit` whose limit in the `plan` is looked for
    (planner/limit_run.py).
    `rank` is the rank that the `solo` world plays. `kernel_times` runs one step more, under the
    profiler. `load_from` is a folder of saved steps, or one of them, from whose training the run
    goes on; `save_to` is the folder that its own last step is saved to (docs/checkpoints.md).
    """

    kind: JobKind
    world: World
    plan: Mapping[str, Any] | None = None
    attention: Mapping[str, Any] | None = None
    rank: int = 0
    warmup: int = 2
    steps: int = 5
    seed: int = 0
    device: str | None = None
    deadline_s: float = 1800.0
    kernel_times: bool = False
    calibration: Mapping[str, Any] | None = None
    save_to: str | None = None
    load_from: str | None = None
    decode: Mapping[str, Any] | None = None
    serve: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    quality: Mapping[str, Any] | None = None
    limit: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema version."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobSpec:
        """Read the JSON form; raises ValueError naming the field at fault."""
        known = set(cls.__dataclass_fields__)
        unknown = set(data) - known - {"schema"}
        if data.get("schema") != SCHEMA:
            raise ValueError(f"job spec schema is {data.get('schema')!r}; this version reads 1")
        if unknown:
            raise ValueError(f"job spec has unknown fields: {', '.join(sorted(unknown))}")
        values = {k: v for k, v in data.items() if k in known}
        values["kind"] = JobKind(values["kind"])
        values["world"] = World(values["world"])
        for name in ("save_to", "load_from", "tokenizer"):
            check_folder(name, values.get(name))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job leaves behind in `result.json`."""

    outcome: Outcome
    measured: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema version."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobResult:
        """Read the JSON form."""
        return cls(
            outcome=Outcome(data["outcome"]),
            measured=data["measured"],
            environment=data["environment"],
            error=data["error"],
        )


def write_json_atomically(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` to `path` so that a reader sees the old file or the whole new one."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
