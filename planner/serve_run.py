"""What a serving run is asked: a model, a cache and a trace of requests; checked without torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from planner.checks import check_boolean, check_choice, check_integer, check_mapping, check_number
from planner.decode_run import (
    MAX_CONTEXT,
    MAX_NEW_TOKENS,
    AttentionBackend,
    CacheDtype,
    WeightDtype,
    check_page_size,
    check_positions,
    check_together,
)
from planner.errors import PlanError
from planner.model import ModelSpec
from planner.plan import parse_model
from planner.units import format_count, format_seconds

MAX_REQUESTS = 5000
# A prefill of more tokens keeps a GPU busy for longer than the host takes to start its kernels: no graph.
MAX_GRAPH_TOKENS = 8192
# Chunks after so many others run without a graph, and a chunk is padded to an eighth of a whole one.
GRAPH_CHUNKS, CHUNK_PARTS, MIN_PADDED_TOKENS = 8, 8, 64
MAX_ROWS = 512
MAX_PAGES = 2**24
MAX_ARRIVAL_S = 86_400.0
PERCENTILES = (50, 90, 99)
_REQUEST = frozenset(("arrival_s", "prompt_tokens", "new_tokens", "cancel_after"))
_POISSON = frozenset(("requests", "rate_per_s", "prompt_tokens", "new_tokens", "seed"))


class ServePeer(StrEnum):
    """Who serves the same trace in the same run: transformers' continuous batching, vLLM if installed."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A request of a trace; `cancel_after` tokens its client goes away, None: never."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    cancel_after: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """Requests served by continuous batching: at most `rows` at once over `pages` of a paged cache.

    A prompt is run in chunks of `chunk_tokens`, one chunk between two decode steps of the others.
    """

    model: Mapping[str, Any]
    trace: tuple[TraceRequest, ...]
    rows: int = 16
    pages: int = 1024
    page_size: int = 64
    chunk_tokens: int = 512
    dtype: WeightDtype = WeightDtype.BF16
    cache_dtype: CacheDtype = CacheDtype.MODEL
    attention: AttentionBackend = AttentionBackend.PEAKMARK
    fused: bool = True
    graphs: bool = True
    peers: tuple[ServePeer, ...] = ()

    @property
    def capacity(self) -> int:
        """Tokens of the longest request at its end."""
        return max(one.prompt_tokens + one.new_tokens for one in self.trace)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as a job spec holds it."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain |= {name: str(plain[name]) for name in ("dtype", "cache_dtype", "attention")}
        plain["peers"] = [str(peer) for peer in self.peers]
        return plain | {"trace": [one.to_dict() for one in self.trace]}


def padded_tokens(chunk_tokens: int) -> int:
    """Return the tokens that a part of a chunk is padded to a multiple of, for few graphs."""
    return max(MIN_PADDED_TOKENS, -(-chunk_tokens // CHUNK_PARTS))


def parse_serve(given: object, *, max_requests: int = MAX_REQUESTS) -> tuple[ServeRun, ModelSpec]:
    """Read a spec's `serve`; absent fields take their defaults, `trace` is a list or a Poisson process.

    Raises PlanError naming the field at fault.
    """
    values = check_mapping("serve", given, frozenset(ServeRun.__dataclass_fields__))
    for name in ("model", "trace"):
        if name not in values:
            raise PlanError(name, None, "present", sentence=f"{name} is missing: a run needs it.")
    model, source = parse_model(values["model"])
    default = ServeRun(model=source, trace=())
    merged = {name: values.get(name, getattr(default, name)) for name in default.__slots__}
    run = ServeRun(
        model=source,
        trace=parse_trace(values["trace"], max_requests=max_requests),
        rows=check_integer("serve.rows", merged["rows"], 1, MAX_ROWS),
        pages=check_integer("serve.pages", merged["pages"], 1, MAX_PAGES),
        page_size=check_page_size("serve.page_size", merged["page_size"]),
        chunk_tokens=check_integer("serve.chunk_tokens", merged["chunk_tokens"], 1, MAX_CONTEXT),
        dtype=check_choice("serve.dtype", merged["dtype"], WeightDtype),
        cache_dtype=check_choice("serve.cache_dtype", merged["cache_dtype"], CacheDtype),
        attention=check_choice("serve.attention", merged["attention"], AttentionBackend),
        fused=check_boolean("serve.fused", merged["fused"]),
        graphs=check_boolean("serve.graphs", merged["graphs"]),
        peers=_peers(merged["peers"]),
    )
    check_together("serve", run.cache_dtype, run.dtype)
    longest = max(run.trace, key=lambda one: one.prompt_tokens + one.new_tokens)
    check_positions("serve.trace", longest.prompt_tokens, longest.new_tokens, model)
    if run.pages * run.page_size < run.capacity:
        needed = -(-run.capacity // run.page_size)
        sentence = (
            f"serve.pages is {run.pages}: the longest request needs {needed} pages of "
            f"{run.page_size} tokens; give the cache more or shorten the request."
        )
        raise PlanError("serve.pages", run.pages, f"at least {needed}", sentence=sentence)
    return run, model


def _peers(value: object) -> tuple[ServePeer, ...]:
    if not isinstance(value, list | tuple):
        raise PlanError("serve.peers", value, "a list of " + ", ".join(ServePeer))
    return tuple(dict.fromkeys(check_choice("serve.peers", one, ServePeer) for one in value))


def parse_trace(given: object, *, max_requests: int = MAX_REQUESTS) -> tuple[TraceRequest, ...]:
    """Read a trace: a list of requests by arrival, or {"requests", "rate_per_s", ...} of a Poisson process.

    Raises PlanError naming the request at fault, for an unsorted trace and for more than `max_requests`.
    """
    if isinstance(given, Mapping):
        return poisson_trace(given, max_requests=max_requests)
    if not isinstance(given, list | tuple):
        raise PlanError("trace", given, "a list of requests, or the numbers of a Poisson process")
    if not 1 <= len(given) <= max_requests:
        raise PlanError("trace", given, f"a list of 1 to {max_requests} requests")
    requests = tuple(_request(f"trace[{index}]", one) for index, one in enumerate(given))
    for index, (before, after) in enumerate(pairwise(requests), start=1):
        if after.arrival_s < before.arrival_s:
            raise PlanError(
                f"trace[{index}].arrival_s",
                after.arrival_s,
                f"at least {before.arrival_s:g}, the arrival before it; sort the trace by arrival",
            )
    return requests


def _request(field: str, given: object) -> TraceRequest:
    values = check_mapping(field, given, _REQUEST)
    for name in ("arrival_s", "prompt_tokens", "new_tokens"):
        if name not in values:
            raise PlanError(f"{field}.{name}", None, "present")
    cancel = values.get("cancel_after")
    return TraceRequest(
        arrival_s=check_number(f"{field}.arrival_s", values["arrival_s"], 0.0, MAX_ARRIVAL_S),
        prompt_tokens=check_integer(
            f"{field}.prompt_tokens", values["prompt_tokens"], 1, MAX_CONTEXT
        ),
        new_tokens=check_integer(f"{field}.new_tokens", values["new_tokens"], 1, MAX_NEW_TOKENS),
        cancel_after=None
        if cancel is None
        else check_integer(f"{field}.cancel_after", cancel, 0, MAX_NEW_TOKENS),
    )


def poisson_trace(
    given: Mapping[str, Any], *, max_requests: int = MAX_REQUESTS
) -> tuple[TraceRequest, ...]:
    """Return requests that arrive at random, with lengths drawn evenly from [low, high].

    Raises PlanError naming the field at fault.
    """
    values = check_mapping("trace", given, _POISSON)
    for name in _POISSON - {"seed"}:
        if name not in values:
            raise PlanError(f"trace.{name}", None, "present")
    number = check_integer("trace.requests", values["requests"], 1, max_requests)
    rate = check_number("trace.rate_per_s", values["rate_per_s"], 0.001, 1e6)
    prompts = _range("trace.prompt_tokens", values["prompt_tokens"], MAX_CONTEXT)
    answers = _range("trace.new_tokens", values["new_tokens"], MAX_NEW_TOKENS)
    draw = random.Random(check_integer("trace.seed", values.get("seed", 0), 0, 2**31))
    arrival_s, requests = 0.0, []
    for _ in range(number):
        arrival_s += draw.expovariate(rate)
        requests.append(
            TraceRequest(
                arrival_s=round(min(arrival_s, MAX_ARRIVAL_S), 6),
                prompt_tokens=draw.randint(*prompts),
                new_tokens=draw.randint(*answers),
            )
        )
    return tuple(requests)


def _range(field: str, value: object, most: int) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise PlanError(field, value, "two numbers, the fewest and the most")
    low = check_integer(f"{field}[0]", value[0], 1, most)
    return low, check_integer(f"{field}[1]", value[1], low, most)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, linear between neighbours."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


SERVE_COLUMNS = ("of a request", *(f"p{percent}" for percent in PERCENTILES))
_TIMES = {"ttft_s": "time to first token", "tpot_s": "time per token", "e2e_s": "end to end"}


def serve_cells(measured: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return SERVE_COLUMNS of a serving run's result."""
    return [
        (words, *(format_seconds(found[f"p{percent}"]) for percent in PERCENTILES))
        for name, words in _TIMES.items()
        if (found := measured["latency"].get(name))
    ]


PEER_COLUMNS = (
    *("who", "first token p50", "p90", "per token p50", "per token p90"),
    *("tokens/s", "equal tokens"),
)


def peer_cells(measured: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return PEER_COLUMNS of a serving run's result, ours first; nothing where nobody else served."""
    peers = measured.get("peers") or {}
    if not peers:
        return []
    rows = [("peakmark", *_speeds(measured), "-")]
    for name, peer in peers.items():
        if "latency" not in peer:
            rows.append((name, str(peer["outcome"]), *["-"] * 5))
            continue
        equal = peer.get("tokens_equal")
        rows.append((name, *_speeds(peer), "-" if equal is None else f"{100 * equal:.0f} %"))
    return rows


def _speeds(measured: Mapping[str, Any]) -> tuple[str, ...]:
    latency = measured["latency"]
    times = [
        format_seconds(latency[name][percent]) if latency.get(name) else "-"
        for name in ("ttft_s", "tpot_s")
        for percent in ("p50", "p90")
    ]
    return (*times, format_count(measured["tokens_per_s"]))


HOST_WORDS: Mapping[str, str] = {
    "wait": "waiting for the GPU",
    "launch": "starting its work",
    "schedule": "scheduling",
    "idle": "between requests",
}


def host_sentence(measured: Mapping[str, Any]) -> str | None:
    """Say what a serving run's host did; None for a run that did not note it."""
    spent = measured.get("host_time_s")
    if not spent:
        return None
    total_s = sum(spent.values())
    shares = [f"{100 * spent[name] / total_s:.0f} % {words}" for name, words in HOST_WORDS.items()]
    return (
        f"The host's time: {', '.join(shares)}; prompts are token ids, so none goes to a tokenizer."
    )


def serve_headline(measured: Mapping[str, Any]) -> str:
    """Return in one line how many requests ended how, how fast, and what the time went to."""
    states = ", ".join(f"{number} {state}" for state, number in measured["states"].items())
    return (
        f"{states} in {format_seconds(measured['duration_s'])}: "
        f"{format_count(measured['tokens_per_s'])} tokens/s, {measured['preemptions']} preemptions, "
        f"device busy {100 * measured['device_share']:.0f} % of the time"
    )
