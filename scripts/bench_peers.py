"""Ask aiconfigurator and the planner the same questions in one run, and print how long each takes.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install aiconfigurator
    .venv/bin/python scripts/bench_peers.py /tmp/peers/bin/python

The question: Llama-3.1-8B in bf16 on one H200: the time to the first token and that of each further one,
for a batch of requests with a prompt of some length and 128 new tokens. Both have loaded what they need;
no two questions are the same, so that none is answered from memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.hardware import resolve_gpu
from planner.presets import resolve_model
from planner.serving_levers import ServingPoint, answer

MODEL, GPU, NEW_TOKENS = "meta-llama/Llama-3.1-8B", "h200-sxm5-141gb", 128
BATCHES, PROMPTS = (1, 2, 4, 8, 16, 32), tuple(500 + 97 * i for i in range(20))
QUESTIONS = [(batch, prompt) for batch in BATCHES for prompt in PROMPTS]
SHOWN = ((1, PROMPTS[0]), (8, PROMPTS[10]), (32, PROMPTS[-1]))
Answers = list[tuple[float, float, float]]

# Runs under the peer's Python: its own static estimate, from its measured tables of vLLM on H200.
PEER = """
import json, sys, time
from importlib.metadata import version
from aiconfigurator.sdk import common, config
from aiconfigurator.sdk.backends.factory import get_backend
from aiconfigurator.sdk.models import get_model
from aiconfigurator.sdk.perf_database import get_database

folder, new_tokens, questions = json.loads(sys.argv[1])
database = get_database("h200_sxm", "vllm", "0.24.0")
choices = config.ModelConfig(
    gemm_quant_mode=common.GEMMQuantMode.bfloat16,
    kvcache_quant_mode=common.KVCacheQuantMode.bfloat16,
    fmha_quant_mode=common.FMHAQuantMode.bfloat16,
)
model, backend = get_model(folder, choices, "vllm"), get_backend("vllm")

def ask(batch, prompt):
    asked = config.RuntimeConfig(batch_size=batch, isl=prompt, osl=new_tokens)
    row = backend.run_static(model, database, asked, "static").get_summary_df().iloc[0]
    return float(row["ttft"]) / 1e3, float(row["tpot"]) / 1e3

ask(3, 333)
answers = []
for batch, prompt in questions:
    start = time.perf_counter()
    found = ask(batch, prompt)
    answers.append((time.perf_counter() - start, *found))
print(json.dumps({"version": version("aiconfigurator"), "answers": answers}))
"""


def ask_peer(python: str) -> tuple[str, Answers]:
    """Return aiconfigurator's version, and of each question seconds taken, first token and next token.

    Raises CalledProcessError where it cannot answer; what it printed says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = {**resolve_model(MODEL).hf_config, "architectures": ["LlamaForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        asked = json.dumps([folder, NEW_TOKENS, QUESTIONS])
        command = [python, "-c", PEER, asked]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return str(found["version"]), [(a, b, c) for a, b, c in found["answers"]]


def ask_planner() -> Answers:
    """Return of each question the seconds taken, and those to the first and for a next token."""
    spec, gpu = resolve_model(MODEL), resolve_gpu(GPU)

    def ask(batch: int, prompt: int) -> tuple[float, float]:
        point = ServingPoint(
            spec=spec, gpu=gpu, batch=batch, prompt_tokens=prompt, new_tokens=NEW_TOKENS
        )
        found = answer(point)
        return found.ttft_s, found.decode_s or 0.0

    ask(3, 333)
    answers = []
    for batch, prompt in QUESTIONS:
        start = time.perf_counter()
        first_s, next_s = ask(batch, prompt)
        answers.append((time.perf_counter() - start, first_s, next_s))
    return answers


def median_ms(answers: Sequence[tuple[float, float, float]]) -> float:
    """Return how long a question takes, in ms."""
    return 1e3 * statistics.median(seconds for seconds, _, _ in answers)


def main() -> None:
    """Print both times, their ratio, and a few answers side by side."""
    if len(sys.argv) != 2:
        sys.exit("usage: bench_peers.py PYTHON, one that has aiconfigurator installed")
    version, peer = ask_peer(sys.argv[1])
    ours = ask_planner()
    print(f"{len(QUESTIONS)} questions, {MODEL} in bf16 on one H200, {NEW_TOKENS} new tokens")
    print(f"aiconfigurator {version}: {median_ms(peer):.3f} ms a question (median)")
    # Its first token is that of a batch prefilled whole, ours that of one request.
    print(f"peakmark: {median_ms(ours):.3f} ms; ratio {median_ms(peer) / median_ms(ours):.2f}")
    for question in SHOWN:
        place = QUESTIONS.index(question)
        (_, theirs, their_next), (_, first, following) = peer[place], ours[place]
        print(
            f"batch {question[0]}, prompt {question[1]:,}: a prompt {1e3 * theirs / question[0]:.1f} and "
            f"{1e3 * first:.1f} ms, each further token {1e3 * their_next:.2f} and {1e3 * following:.2f} ms"
        )


if __name__ == "__main__":
    main()
