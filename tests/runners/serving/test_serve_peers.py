"""Other servers over our trace: transformers' continuous batching on a CPU, vLLM's calls on a stand-in."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.decode_run import AttentionBackend, CacheKind
from planner.errors import PlanError
from planner.serve_run import ServePeer, ServeRun, TraceRequest, parse_serve
from runners.jobs.decode import surviving
from runners.jobs.serve_peers import measure_serve_peer
from runners.serving.caches import PagedCache
from runners.serving.decoder import Decoder
from runners.serving.engine import Engine, Request
from runners.serving.peers import PeerRequest, peer_figures
from runners.serving.vllm_peer import check_vllm, serve_vllm
from tests.runners.serving.tiny import SIZES, make_cache, ours, random_prompts

TRACE = tuple(
    TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, new_tokens=new, cancel_after=cancel)
    for arrival_s, prompt, new, cancel in (
        (0.0, 5, 6, None), (0.0, 17, 4, None), (0.05, 9, 8, 3), (0.05, 3, 5, 0),
    )
)  # fmt: skip
CONFIG = {"model_type": "llama", **SIZES}


def make_run(**changes: Any) -> tuple[ServeRun, Any]:
    asked = {
        "model": {"config": CONFIG, "name": "tiny"},
        "trace": [one.to_dict() for one in TRACE],
        "rows": 3,
        "pages": 12,
        "page_size": 16,
        "chunk_tokens": 32,
        "dtype": "fp32",
        "attention": "torch",
        "graphs": False,
        "peers": ["transformers"],
    }
    return parse_serve(asked | changes)


def served_by_us(model: Any) -> list[Request]:
    cache = make_cache(model, CacheKind.PAGED, 3, 40, num_pages=48)
    assert isinstance(cache, PagedCache)
    engine = Engine(Decoder(model, cache, AttentionBackend.TORCH), cache, chunk_tokens=32)
    requests = [
        Request(random_prompts(1, one.prompt_tokens, seed=one.prompt_tokens)[0], one.new_tokens)
        for one in TRACE
    ]
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
    return requests


def test_transformers_serves_the_same_trace_with_the_same_tokens() -> None:
    """In fp32 its tokens are ours; a client that goes away asks for fewer."""
    model = ours("llama")
    attention = model.config._attn_implementation  # type: ignore[union-attr]
    run, spec = make_run()
    figures = measure_serve_peer(ServePeer.TRANSFORMERS, model, spec, run, served_by_us(model))
    assert figures["tokens_equal"] == 1.0
    assert figures["states"] == {"done": 2, "cancelled": 2}
    assert figures["first_error"] is None
    assert figures["tokens_per_s"] == pytest.approx((6 + 4 + 3) / figures["duration_s"])
    assert 0 < figures["latency"]["ttft_s"]["p50"] <= figures["latency"]["e2e_s"]["p50"]
    assert "sdpa" in figures["attention"]
    # Ours can go on with its own attention.
    assert model.config._attn_implementation == attention  # type: ignore[union-attr]


def test_what_a_peer_cannot_do_is_its_outcome_and_nobody_else_s() -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no such attention")

    found = surviving(torch.device("cpu"), fail)
    assert found == {"outcome": "failed", "message": "ValueError: no such attention"}


class StandIn:
    """Just enough of vLLM's offline engine: one token of every request a step."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.asked: dict[str, tuple[Any, Any]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.config: dict[str, Any] = {}

    def module(self) -> types.ModuleType:
        module = types.ModuleType("vllm")
        module.__version__ = "0.11.0"  # type: ignore[attr-defined]
        module.EngineArgs = lambda **options: options  # type: ignore[attr-defined]
        module.SamplingParams = lambda **options: options  # type: ignore[attr-defined]
        module.LLMEngine = types.SimpleNamespace(from_engine_args=self.start)  # type: ignore[attr-defined]
        return module

    def start(self, options: dict[str, Any]) -> StandIn:
        self.options = options
        self.config = json.loads((Path(options["model"]) / "config.json").read_text())
        return self

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        assert name not in self.asked
        self.asked[name] = (prompt, sampling)
        self.tokens[name] = []

    def has_unfinished_requests(self) -> bool:
        return any(len(self.tokens[n]) < s["max_tokens"] for n, (_, s) in self.asked.items())

    def step(self) -> list[Any]:
        outputs = []
        for name, (_, sampling) in self.asked.items():
            if len(self.tokens[name]) == sampling["max_tokens"]:
                continue
            self.tokens[name].append(7)
            part = types.SimpleNamespace(token_ids=tuple(self.tokens[name]))
            is_over = len(self.tokens[name]) == sampling["max_tokens"]
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[part], finished=is_over))
        return outputs


def test_vllm_is_asked_for_the_run_s_cache_rows_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "vllm", stand_in.module())
    run, spec = make_run(peers=["vllm"])
    requests = [PeerRequest(one, [1] * one.prompt_tokens) for one in run.trace]
    notes = serve_vllm(dict(spec.hf_config), run, requests)
    assert notes == {"version": "0.11.0"}
    assert stand_in.config["model_type"] == "llama"
    options = stand_in.options
    assert (options["num_gpu_blocks_override"], options["block_size"]) == (12, 16)
    assert (options["max_num_seqs"], options["max_model_len"]) == (3, 21)
    assert (options["dtype"], options["kv_cache_dtype"]) == ("float32", "auto")
    assert options["load_format"] == "dummy"
    assert options["enforce_eager"]
    # The request whose client is gone before its first token is not sent at all.
    assert [len(p["prompt_token_ids"]) for p, _ in stand_in.asked.values()] == [5, 17, 9]
    assert all(s["max_tokens"] == s["min_tokens"] for _, s in stand_in.asked.values())
    figures = peer_figures(requests, 1.0, None)
    assert figures["states"] == {"done": 2, "cancelled": 2}
    assert (figures["tokens_per_s"], figures["tokens_equal"]) == (13.0, None)


def test_vllm_is_refused_before_anything_runs_where_it_is_not_or_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = make_run(peers=["vllm"])
    with pytest.raises(PlanError, match="'vllm', which is not installed beside this worker"):
        check_vllm(run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check_vllm(run)
    whole, _ = make_run(peers=["vllm"], cache_dtype="int8", dtype="bf16")
    with pytest.raises(PlanError, match="'vllm', which has no int8 cache"):
        check_vllm(whole)
    with pytest.raises(PlanError, match=r"serve\.peers is 'sglang'"):
        make_run(peers=["sglang"])


def test_a_request_short_of_its_tokens_has_failed() -> None:
    short = PeerRequest(TRACE[0], [1] * 5, tokens=[7, 7], times_s=[0.1, 0.2])
    figures = peer_figures([short], 1.0, [[7, 8, 9]])
    assert figures["states"] == {"failed": 1}
    assert figures["latency"] == {}
    assert figures["tokens_equal"] == 0.5
