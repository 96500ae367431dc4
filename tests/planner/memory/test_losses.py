"""What the losses hold, by hand from the traced sections."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.memory.groups import Place
from planner.memory.kinds import PLAIN
from planner.memory.templates import SavedTensor, Traced, load_saved, load_steps
from planner.memory.training import training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import Checkpointing, Loss, Parallelism, TrainingWorkload

SPEC = resolve_model("meta-llama/Llama-3.1-8B")
CHUNK_LOGITS = "vocab*chunk"


def template(loss: str) -> Traced:
    return Traced("llama", f"sdpa/bf16/none/{loss}", (PLAIN,) * 4)


def saved_by_loss(loss: str) -> list[SavedTensor]:
    return [t for t in load_saved(template(loss)) if t.places == (Place("loss"),)]


def _highest(section: str, loss: str, monomial: str) -> int:
    peaks = load_steps(template(loss), "added").extent(Place(section)).peaks
    return max(sum(n for (_, m), n in live.items() if m == monomial) for live in peaks)


@pytest.mark.parametrize(("loss", "coefficient"), [("chunked", 6), ("fused_linear", 2)])
def test_only_one_chunk_of_logits_is_alive(loss: str, coefficient: int) -> None:
    """Chunked: 2 B per logit in bf16 beside 4 B in fp32; fused: 2 B, the gradient in place."""
    sections = ("loss", "loss_backward") if loss == "chunked" else ("loss",)
    for section in sections:
        assert _highest(section, loss, CHUNK_LOGITS) == coefficient
    for section in ("loss", "loss_backward"):
        assert _highest(section, loss, "batch*seq*vocab") == 0


def test_the_chunked_loss_keeps_labels_and_a_normaliser_per_token() -> None:
    saved = saved_by_loss("chunked")
    per_token = sum(t.coefficient_bytes for t in saved if t.monomial == "batch*seq")
    assert per_token == 8 + 4
    assert {t.monomial for t in saved} <= {"batch*seq", ""}


def test_the_fused_loss_makes_both_gradients_in_the_forward() -> None:
    saved = saved_by_loss("fused_linear")
    kept = {t.monomial: t.coefficient_bytes for t in saved}
    assert kept["batch*seq*hidden"] == kept["vocab*hidden"] == 2


def test_below_adapters_the_fused_loss_makes_no_gradient_of_the_head() -> None:
    saved = saved_by_loss("fused_linear/lora_all_linear")
    kept = {t.monomial: t.coefficient_bytes for t in saved}
    assert kept["batch*seq*hidden"] == 2
    assert "vocab*hidden" not in kept


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("preset", ["meta-llama/Llama-3.1-8B", "openai-community/gpt2-xl"])
def test_formulas_and_replay_see_the_same_peak_below_adapters(preset: str, loss: Loss) -> None:
    spec = resolve_model(preset)
    selective = Checkpointing.SELECTIVE
    workload = TrainingWorkload(
        sequence_length=1000, loss=loss, checkpointing=selective, lora_rank=16, micro_batch=4
    )
    check_training(spec, workload, Parallelism())
    replayed = training_memory(spec, workload, Parallelism()).allocated_bytes
    summed = training_memory(spec, workload, Parallelism(), segment_share=0.1).allocated_bytes
    assert replayed == pytest.approx(summed, rel=0.01)


def test_a_long_sequence_saves_the_logits_chain() -> None:
    """16,384 tokens x 128,256: 10 bytes for each logit of HF's chain, 6 for those of 512 tokens."""

    def logits_bytes(loss: Loss) -> int:
        workload = TrainingWorkload(sequence_length=16384, loss=loss)
        memory = training_memory(SPEC, workload, Parallelism(), segment_share=0.1)
        return round(memory.by_phase["loss_forward"].parts["logits"])

    assert logits_bytes(Loss.HF) == 10 * 16384 * 128256
    assert logits_bytes(Loss.CHUNKED) == 6 * 512 * 128256


def test_losses_are_refused_where_the_vocabulary_is_split() -> None:
    workload = TrainingWorkload(loss=Loss.CHUNKED)
    with pytest.raises(PlanError, match="which tensor parallelism splits; use hf"):
        check_training(SPEC, workload, Parallelism(tensor_parallel=2))
