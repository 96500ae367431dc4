"""What each engine has and refuses, each with one sentence."""

from __future__ import annotations

import pytest

from planner.engines import check_engine, check_stage, engine_notes
from planner.errors import PlanError
from planner.workload import Engine, Optimizer, Parallelism, Precision, TrainingWorkload

STAGES = {
    Engine.PEAKMARK: (0, 1, 2, 3),
    Engine.FSDP2: (2, 3),
    Engine.DDP: (0,),
    Engine.ZERO_REDUNDANCY: (1,),
    Engine.DEEPSPEED: (1, 2, 3),
}


@pytest.mark.parametrize("engine", Engine)
def test_an_engine_has_its_stages_only(engine: Engine) -> None:
    for stage in range(4):
        parallelism = Parallelism(engine=engine, zero_stage=stage)
        if stage in STAGES[engine]:
            check_stage(parallelism)
            continue
        with pytest.raises(PlanError, match=rf"zero_stage is {stage}: {engine} .* stage"):
            check_stage(parallelism)


@pytest.mark.parametrize(
    ("engine", "choice", "sentence"),
    [
        (
            Engine.DDP,
            {"precision": Precision.MIXED},
            "workload.precision is 'mixed': DistributedDataParallel keeps no fp32 master weights "
            "beside 16-bit parameters; with engine ddp use bf16, fp32 or autocast.",
        ),
        (
            Engine.DEEPSPEED,
            {"precision": Precision.BF16},
            "workload.precision is 'bf16': DeepSpeed's bf16 keeps fp32 master weights always, which "
            "is mixed; with engine deepspeed use mixed.",
        ),
        (
            Engine.ZERO_REDUNDANCY,
            {"precision": Precision.BF16, "optimizer": Optimizer.MUON},
            "workload.optimizer is 'muon': ZeroRedundancyOptimizer wraps one optimizer, muon needs "
            "AdamW besides; with engine zero_redundancy use adamw_fused, adamw_foreach, "
            "adamw_loop, sgd or adafactor.",
        ),
    ],
)
def test_what_an_engine_has_not_is_said(
    engine: Engine, choice: dict[str, object], sentence: str
) -> None:
    with pytest.raises(PlanError) as error:
        check_engine(TrainingWorkload(**choice), Parallelism(engine=engine))  # type: ignore[arg-type]
    assert str(error.value) == sentence


def test_notes_say_what_is_assumed_of_others() -> None:
    assert engine_notes(Parallelism()) == ()
    assert "largest" in engine_notes(Parallelism(engine=Engine.ZERO_REDUNDANCY, zero_stage=1))[0]
    third = engine_notes(Parallelism(engine=Engine.DEEPSPEED, zero_stage=3))[0]
    assert "first two micro-batches" in third
