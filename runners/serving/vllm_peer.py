"""vLLM, where the user installed it: the same model, trace and cache size through its LLMEngine.

Tested for its contract against a stand-in; the calls are those of vLLM 0.8 to 0.11 (vllm/engine/arg_utils.py,
vllm/v1/engine/llm_engine.py). Its weights are its own random ones: speed compares, tokens do not.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from planner.decode_run import CacheDtype
from planner.errors import PlanError
from planner.serve_run import ServePeer, ServeRun
from runners.serving.peers import Arrivals, PeerRequest

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def check_vllm(run: ServeRun) -> None:
    """Raise PlanError where a run asks for vLLM and it is not here, or cannot do what is asked."""
    if ServePeer.VLLM not in run.peers:
        return
    if importlib.util.find_spec("vllm") is None:
        sentence = (
            "serve.peers holds 'vllm', which is not installed beside this worker: install it there, or "
            "leave it out."
        )
        raise PlanError("serve.peers", "vllm", "transformers", sentence=sentence)
    if run.cache_dtype is CacheDtype.INT8:
        sentence = "serve.peers holds 'vllm', which has no int8 cache: choose fp8 or model."
        raise PlanError("serve.cache_dtype", "int8", "fp8 or model", sentence=sentence)


def engine_options(run: ServeRun, model: str) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for a run; `model` is a folder with a config.json."""
    return {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": _DTYPES[str(run.dtype)],
        "kv_cache_dtype": "auto" if run.cache_dtype is CacheDtype.MODEL else "fp8",
        "block_size": run.page_size,
        "num_gpu_blocks_override": run.pages,
        "max_model_len": run.capacity,
        "max_num_seqs": run.rows,
        "max_num_batched_tokens": run.chunk_tokens + run.rows,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "enforce_eager": not run.graphs,
    }


def serve_vllm(
    config: dict[str, Any], run: ServeRun, requests: Sequence[PeerRequest]
) -> dict[str, Any]:
    """Replay the trace; fills `requests` and returns vLLM's version. `config` is a config.json."""
    vllm = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        arguments = vllm.EngineArgs(**engine_options(run, folder))
        engine = vllm.LLMEngine.from_engine_args(arguments)
        _replay(vllm, engine, requests)
    return {"version": str(getattr(vllm, "__version__", "unknown"))}


def _replay(vllm: Any, engine: Any, requests: Sequence[PeerRequest]) -> None:
    arrivals = Arrivals(requests)
    known: dict[str, PeerRequest] = {}
    numbers = count()
    while not arrivals.is_over or known:
        for request in arrivals.due():
            name = str(next(numbers))
            engine.add_request(name, {"prompt_token_ids": request.prompt}, _sampling(vllm, request))
            known[name] = request
        if not engine.has_unfinished_requests():
            arrivals.rest()
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - arrivals.start_s
        for output in outputs:
            _took(known, output, now_s)


def _sampling(vllm: Any, request: PeerRequest) -> Any:
    """Greedy, exactly as many tokens as asked."""
    return vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request.wanted,
        min_tokens=request.wanted,
        ignore_eos=True,
        detokenize=False,
    )


def _took(known: dict[str, PeerRequest], output: Any, now_s: float) -> None:
    """Note the tokens that a step added to a request; an output holds all so far."""
    request = known[output.request_id]
    tokens = list(output.outputs[0].token_ids)
    request.times_s += [now_s] * (len(tokens) - len(request.tokens))
    request.tokens = tokens
    if output.finished:
        del known[output.request_id]
