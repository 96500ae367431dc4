"""Simulated serving: worked by hand, nothing lost, refusals; static batching beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from planner.errors import PlanError
from planner.serve_run import TraceRequest, parse_serve, poisson_trace
from planner.simulation.continuous import simulate
from planner.simulation.server import Server, server_of
from planner.simulation.static import simulate_static
from planner.simulation.tally import MAX_SAMPLES, REQUEST_COLUMNS, Simulation


class Linear:
    """A token of a prompt takes 0.01 s, a decode step 0.1 s, and nothing else."""

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context: int,
        waits: bool = True,
    ) -> float:
        return 0.01 * prefill_tokens + (0.1 if decode_batch else 0.0)


def trace(*requests: tuple[float, int, int]) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, new_tokens=new)
        for arrival_s, prompt, new in requests
    ]


def column(found: Simulation, name: str) -> list[float]:
    at = REQUEST_COLUMNS.index(name)
    return [row[at] for row in sorted(found.requests, key=lambda row: (row[0], row[1]))]


SERVER = Server(rows=4, pages=100, page_size=4, chunk_tokens=10)


def test_one_request_alone_is_its_chunks_and_its_decode_steps() -> None:
    """25 tokens in chunks of 10, 10 and 5; the step of the last one decodes too; arrives at 2 s."""
    found = simulate(trace((2.0, 25, 4)), SERVER, Linear())
    assert found.steps == 5
    assert column(found, "ttft_s") == pytest.approx([0.25])
    assert column(found, "e2e_s") == pytest.approx([0.25 + 3 * 0.1])
    assert column(found, "tpot_s") == pytest.approx([0.1])
    assert found.duration_s == pytest.approx(2.55)
    assert found.busy_share == pytest.approx(0.55 / 2.55)
    assert found.tokens_per_s == pytest.approx(4 / 2.55)


def test_a_second_prompt_delays_the_first_s_tokens_chunk_by_chunk() -> None:
    """B comes while A decodes: A's next two tokens each wait for a chunk of B.

    A: prompt until 0.1, tokens at 0.1, 0.2, then with B's chunks of 0.1 at 0.4, 0.6, then 0.7.
    B arrives at 0.15, is seen at 0.2, its prompt is done at 0.5, decodes at 0.6 and 0.7.
    """
    found = simulate(trace((0.0, 10, 5), (0.15, 20, 3)), SERVER, Linear())
    assert column(found, "ttft_s") == pytest.approx([0.1, 0.35])
    assert column(found, "e2e_s") == pytest.approx([0.7, 0.55])
    assert column(found, "tpot_s") == pytest.approx([0.6 / 4, 0.1])
    assert column(found, "waited_s") == pytest.approx([0.0, 0.05])


def test_rows_that_are_all_taken_make_the_next_one_wait() -> None:
    one_row = Server(rows=1, pages=100, page_size=4, chunk_tokens=10)
    found = simulate(trace((0.0, 10, 3), (0.0, 10, 1)), one_row, Linear())
    assert sorted(column(found, "waited_s")) == pytest.approx([0.0, 0.3])
    assert found.most_waiting == 1
    assert found.most_running == 1
    # Of 0.4 s in all it waits 0.3.
    assert found.mean_queue == pytest.approx(0.3 / 0.4)


def test_the_last_one_gives_way_when_pages_run_out_and_keeps_its_tokens() -> None:
    """Three pages of four tokens. A (4 + 5 tokens) and B (3 + 5) both start; A needs a third page.

    Step 1: A's prompt takes page 1, its second token page 2. Step 2: B (3 tokens) takes page 3; both
    decode within their pages. B's next one (5 tokens) finds none free: it gives its page back at step 3,
    with three tokens, and A goes on alone to its fifth token. B then runs its 3 + 2 known ones again.
    """
    server = Server(rows=2, pages=3, page_size=4, chunk_tokens=8)
    found = simulate(trace((0.0, 4, 5), (0.0, 3, 5)), server, Linear())
    assert column(found, "preemptions") == [1, 0]  # sorted by arrival, then prompt: B is first
    assert column(found, "new_tokens") == [5, 5]
    # A: 0.04 + 0.1; with B's prompt 0.03 + 0.1; alone 0.1, 0.1.
    assert column(found, "e2e_s")[1] == pytest.approx(0.04 + 0.1 + 0.03 + 0.1 + 0.1 + 0.1)
    # B's three known tokens and its two own are run again (0.05), which gives one more; two are left.
    assert found.preemptions == 1
    assert found.states == {"done": 2}


def test_a_client_that_goes_away_ends_before_the_next_step() -> None:
    asked = [
        TraceRequest(arrival_s=0.0, prompt_tokens=10, new_tokens=9, cancel_after=3),
        TraceRequest(arrival_s=0.0, prompt_tokens=10, new_tokens=2, cancel_after=0),
    ]
    found = simulate(asked, SERVER, Linear())
    assert found.states == {"cancelled": 2}
    assert sorted(column(found, "new_tokens")) == [0, 3]
    assert found.duration_s == pytest.approx(0.1 + 2 * 0.1)
    # Latencies are of requests that got all they asked for.
    assert found.latency == {}


def test_a_window_gives_pages_back_so_that_more_fit() -> None:
    """A request of 40 tokens with a window of 8 holds three pages of 4 at most, not ten."""
    asked = trace((0.0, 8, 32))
    wide = simulate(asked, Server(rows=1, pages=10, page_size=4, chunk_tokens=8), Linear())
    slid = Server(rows=1, pages=10, page_size=4, chunk_tokens=8, window=8)
    narrow = simulate(asked, slid, Linear())
    assert (wide.most_cache_share, narrow.most_cache_share) == (1.0, 0.3)
    assert narrow.duration_s == wide.duration_s


def test_static_batching_holds_rows_until_the_last_is_done() -> None:
    """A and B make a batch of prompts 0.1 + 0.1 and four steps; C, there at 0.05, waits for all of it."""
    found = simulate_static(trace((0.0, 10, 5), (0.0, 10, 2), (0.05, 10, 1)), SERVER, Linear())
    rows = {tuple(row[:3]): row for row in found.requests}
    assert rows[(0.0, 10, 5)][6] == pytest.approx(0.2 + 4 * 0.1)
    assert rows[(0.0, 10, 2)][6] == pytest.approx(0.2 + 0.1)
    assert rows[(0.05, 10, 1)][4] == pytest.approx(0.6 - 0.05 + 0.1)


def random_trace(seed: int) -> tuple[list[TraceRequest], Server]:
    draw = random.Random(seed)
    requests = sorted(
        (
            TraceRequest(
                arrival_s=draw.choice((0.0, draw.uniform(0, 5))),
                prompt_tokens=draw.randint(1, 40),
                new_tokens=draw.randint(1, 30),
                cancel_after=draw.choice((None, None, None, draw.randint(0, 30))),
            )
            for _ in range(draw.randint(1, 40))
        ),
        key=lambda one: one.arrival_s,
    )
    size = draw.choice((1, 4, 16))
    server = Server(
        rows=draw.randint(1, 8),
        pages=-(-70 // size) + draw.randint(0, 20),
        page_size=size,
        chunk_tokens=draw.choice((3, 16, 64)),
        window=draw.choice((None, None, 9)),
    )
    return requests, server


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_and_no_token_comes_before_its_time(seed: int) -> None:
    asked, server = random_trace(seed)
    for found in (simulate(asked, server, Linear()), simulate_static(asked, server, Linear())):
        check_conserved(found, asked, server)


def check_conserved(found: Simulation, asked: Sequence[TraceRequest], server: Server) -> None:
    assert sum(found.states.values()) == len(asked)
    tokens = sum(row[2] for row in found.requests)
    assert found.tokens == tokens
    most = sum(one.new_tokens for one in asked)
    assert tokens == most if set(found.states) == {"done"} else tokens <= most
    for row in found.requests:
        values = dict(zip(REQUEST_COLUMNS, row, strict=True))
        if values["ttft_s"] is not None:
            assert 0 <= values["waited_s"] <= values["ttft_s"] <= values["e2e_s"] + 1e-9
            # No faster than a step per token, nor than its own prompt.
            assert values["ttft_s"] >= 0.01 * values["prompt_tokens"] - 1e-9
    assert found.most_running <= server.rows
    assert 0 <= found.mean_cache_share <= found.most_cache_share <= 1
    assert 0 < found.busy_share <= 1 + 1e-9 or not tokens
    for (before, *_), (after, *_) in pairwise(found.samples):
        assert before <= after


def test_a_long_simulation_keeps_few_samples_and_a_trace_too_long_is_refused() -> None:
    asked = poisson_trace(
        {"requests": 200, "rate_per_s": 50.0, "prompt_tokens": [1, 9], "new_tokens": [40, 80]}
    )
    found = simulate(asked, SERVER, Linear())
    assert found.steps > MAX_SAMPLES
    assert MAX_SAMPLES // 2 <= len(found.samples) < MAX_SAMPLES
    with pytest.raises(PlanError, match="trace takes more than 100 steps to serve"):
        simulate(asked, SERVER, Linear(), max_steps=100)
    # One step too many is noticed when it comes.
    for served in (simulate, simulate_static):
        steps = served(asked, SERVER, Linear()).steps
        served(asked, SERVER, Linear(), max_steps=steps)
        with pytest.raises(PlanError, match="trace takes more than"):
            served(asked, SERVER, Linear(), max_steps=steps - 1)


def test_a_request_that_no_page_count_serves_is_refused_by_its_place() -> None:
    asked = trace((0.0, 10, 2), (0.0, 400, 1))
    with pytest.raises(PlanError, match=r"trace\[1\] needs 101 pages of 4 tokens"):
        simulate(asked, SERVER, Linear())


def test_a_server_has_the_window_of_a_model_that_only_slides() -> None:
    config = {
        "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "sliding_window": 64,
        "max_position_embeddings": 512,
    }  # fmt: skip
    spec = {"model": {"config": config, "name": "tiny"}, "trace": [trace((0.0, 3, 2))[0].to_dict()]}
    run, model = parse_serve(spec)
    assert server_of(run, model).window == 64
    llama, llama_model = parse_serve({**spec, "model": {"preset": "llama-3.2-1b"}})
    assert server_of(llama, llama_model) == Server(
        rows=16, pages=1024, page_size=64, chunk_tokens=512
    )


class Noted(Linear):
    """Keeps of every step it is asked for whether the host waits at its end."""

    def __init__(self) -> None:
        self.waits: list[bool] = []

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context: int,
        waits: bool = True,
    ) -> float:
        self.waits.append(waits)
        return super().step_s(prefill_tokens, prefill_context, decode_batch, decode_context, waits)


def test_only_steps_that_give_a_token_wait_for_it() -> None:
    """Of a lone prompt in three chunks the last one; beside a request that decodes, every step."""
    server = Server(rows=2, pages=100, page_size=4, chunk_tokens=4)
    lone = Noted()
    simulate(trace((0.0, 12, 1)), server, lone)
    # The last step is asked for twice: for its token's moment, and for its length.
    assert lone.waits == [False, False, True, True]
    beside = Noted()
    simulate(trace((0.0, 4, 9), (0.01, 12, 1)), server, beside)
    assert len(beside.waits) > 9 and all(beside.waits)
