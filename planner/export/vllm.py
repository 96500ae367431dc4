"""`vllm serve` for a serving plan.

Arguments as in vllm/engine/arg_utils.py and vllm/config/{cache,scheduler,model}.py of 0.11 and newer;
`int8_per_token_head` is in CacheDType of 2026 (an int8 entry with a scale for each token and head, as the
planner counts).
"""

from __future__ import annotations

import shlex

from planner.errors import PlanError
from planner.export.target import (
    SERVES,
    Draft,
    ExportFile,
    Target,
    model_name,
    refuse,
)
from planner.plan import Plan
from planner.serving.memory import PREFILL_CHUNK_TOKENS
from planner.workload import KvDtype, ServingWorkload, WeightsDtype

FILE = "serve.sh"
OWN_MODEL = "./model"
_DTYPES = {
    WeightsDtype.BF16: "bfloat16",
    WeightsDtype.FP16: "float16",
    WeightsDtype.FP32: "float32",
}
_KV_DTYPES = {
    KvDtype.BF16: "bfloat16",
    KvDtype.FP16: "float16",
    KvDtype.FP8: "fp8",
    KvDtype.INT8: "int8_per_token_head",
}


def vllm_draft(plan: Plan) -> Draft:
    """Write the command; raises PlanError for a training plan and types that vLLM has not."""
    workload = plan.workload
    if not isinstance(workload, ServingWorkload):
        others = ", ".join(target for target in Target if target not in SERVES)
        sentence = f"export.to is 'vllm': it serves, and the plan trains; export it to {others}."
        raise PlanError("export.to", "vllm", others, sentence=sentence)
    name = model_name(plan)
    words = ["vllm", "serve", name or OWN_MODEL, *_options(plan, workload)]
    notes = [] if name else [f"Put the model's config.json and weights into {OWN_MODEL}."]
    text = f"#!/bin/bash\n# Exported by Peakmark\nexec {shlex.join(words)}\n"
    return Draft(
        files=(ExportFile(name=FILE, text=text, language="bash"),),
        holds=frozenset(_holds(workload)),
        notes=(*notes, *_notes(workload)),
    )


def _options(plan: Plan, workload: ServingWorkload) -> list[str]:
    cached = _kv_dtype(workload)
    options = [
        *_weights(workload),
        *(["--kv-cache-dtype", cached] if cached else []),
        *("--max-model-len", str(workload.context_length)),
        *("--max-num-seqs", str(workload.sequences)),
        # What the planner counts a prompt's activations with; a step decodes one token a sequence too.
        *("--max-num-batched-tokens", str(max(PREFILL_CHUNK_TOKENS, workload.sequences))),
        *("--gpu-memory-utilization", f"{workload.utilization:g}"),
    ]
    replicas = plan.parallelism.world_size
    return options + (["--data-parallel-size", str(replicas)] if replicas > 1 else [])


def _weights(workload: ServingWorkload) -> list[str]:
    dtype = _DTYPES.get(workload.weights_dtype)
    if dtype is not None:
        return ["--dtype", dtype]
    is_fp8 = workload.weights_dtype is WeightsDtype.FP8
    return ["--dtype", "bfloat16", *(["--quantization", "fp8"] if is_fp8 else [])]


def _kv_dtype(workload: ServingWorkload) -> str | None:
    if workload.kv_dtype is KvDtype.FP32:
        if workload.weights_dtype is WeightsDtype.FP32:
            return None
        why = "vLLM keeps an fp32 cache of fp32 weights only; take bf16"
        raise refuse(Target.VLLM, "workload.kv_dtype", "fp32", why)
    return _KV_DTYPES[workload.kv_dtype]


def _holds(workload: ServingWorkload) -> set[str]:
    found = {"context_length", "sequences", "kv_dtype", "utilization", "world_size"}
    is_held = workload.weights_dtype in _DTYPES or workload.weights_dtype is WeightsDtype.FP8
    return found | ({"weights_dtype"} if is_held else set())


def _notes(workload: ServingWorkload) -> list[str]:
    notes = []
    if workload.weights_dtype in (WeightsDtype.INT8, WeightsDtype.INT4, WeightsDtype.MXFP4):
        notes.append(
            f"vLLM takes {workload.weights_dtype} weights from a checkpoint that has them: name one in "
            "place of the model."
        )
    if workload.kv_dtype is KvDtype.INT8:
        notes.append("An int8 cache needs a vLLM of 2026 (int8_per_token_head).")
    return notes
