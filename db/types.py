"""The choices and time unit that the tables share."""

from __future__ import annotations

import time
from enum import StrEnum


class RunState(StrEnum):
    """Where a run stands; every state after `running` is final and says how the run ended."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    LOST = "lost"


FINAL_STATES = frozenset(RunState) - {RunState.QUEUED, RunState.RUNNING}


class RunKind(StrEnum):
    """What a run executes."""

    TRAIN_STEP = "train_step"
    ATTENTION = "attention"
    CALIBRATE = "calibrate"
    DECODE = "decode"
    SERVE = "serve"
    PROFILE = "profile"
    QUALITY = "quality"
    LIMIT = "limit"


class RunWorld(StrEnum):
    """How the ranks of a run are made real."""

    NCCL = "nccl"
    SHARED = "shared"
    SOLO = "solo"
    CPU = "cpu"


class Role(StrEnum):
    """What a measurement may be used for: checking predictions, or fitting a constant.

    `holdout` checks predictions too, and was chosen before the formulas were tuned.
    """

    EVIDENCE = "evidence"
    HOLDOUT = "holdout"
    CALIBRATION = "calibration"


class Origin(StrEnum):
    """Where a measurement was made."""

    HERE = "here"
    RECORDED = "recorded"


class VerdictState(StrEnum):
    """What the planner says of a plan on its hardware."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"


def now_ms() -> int:
    """Return the wall clock in integer milliseconds since 1970 (UTC)."""
    return time.time_ns() // 1_000_000
