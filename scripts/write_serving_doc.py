"""Write the measured part of docs/serving.md from recorded/: decode steps and served traces, predicted
beside measured. Part of `make accuracy`; the text around the two marks is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from planner.calibration import sheet_of
from planner.decode_run import CacheDtype, CacheKind, DecodeRun, parse_decode
from planner.model import ModelSpec
from planner.records import Kind, RecordedRow, read_file
from planner.serve_run import ServeRun, host_sentence
from planner.serving.fitted import SERVE_ROWS
from planner.serving.runs import (
    TODAY,
    RanAs,
    compare_served,
    is_fitted,
    predict_decode,
    served_model,
    waits_for_host,
)
from planner.serving.times import StepTimes
from planner.simulation.runs import Compared, SimulatedRun, compare_latency, simulated_rows
from planner.units import format_signed

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "serving.md"
BEGIN = "<!-- Written by `make accuracy` from recorded/; do not edit from here. -->"
END = "<!-- To here. -->"
# Where the share of the memory's rate is told in words.
BANDWIDTH_AT = (32, 8192)
HOW_DECODED = """
Time per step of all rows, and of the whole prefill; **predicted** is today's, **fit** marks a shape that a
constant of the prediction was fitted to, which counts in no average however often it was run. **bandwidth** is the bytes that a step
must move over what the sheet's memory rate moves in the measured time. `static` is transformers' generation
with sdpa and its static cache, `compiled` the same with its decode step compiled by torch.
"""
JOINED_LATER = """
Rows marked 1 were taken before the products of query, key and value were joined, and are predicted so.
"""
BY_HOST = """
**host** marks a prefill whose kernels the host started one by one, where today it is one graph: it took the host's
time, which differs from session to session, and counts in no average.
"""
HOW_SERVED = """
Requests arrive by a Poisson process with lengths drawn evenly. Times are of requests that got all they asked
for, from the arrival that the trace asked for. **simulated** is today's simulation of the same trace, cache and
chunks with predicted step times (`planner/simulation`), which was told nothing of the run: means of the percentiles
of eight simulations whose steps are up to 3 % longer or shorter, for where in a step each arrival falls is chance. A
constant was fitted to rows marked 2, which count in no average.
"""
OLDER_ENGINE = """
Rows marked 3 were served by an older engine, whose graphs were brought to the device while it served (0.3 to 0.8 ms
each, in first tokens above all): most of their traces are served again below, and they count in no average.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A decode row beside its prediction; `moved_share` of the sheet's bandwidth."""

    row: RecordedRow
    run: DecodeRun
    spec: ModelSpec
    prefill_s: float
    decode_s: float
    moved_share: float
    joined: bool

    @property
    def by_host(self) -> bool:
        """Whether its prefill took the host's time, which today's does not."""
        return waits_for_host(self.row, self.run)

    def error_percent(self, name: str) -> float | None:
        """Signed error of `prefill` or `decode`; None where a constant was fitted to it."""
        if is_fitted(f"{name}_time", self.run, self.spec) or (name == "prefill" and self.by_host):
            return None
        predicted_s = self.prefill_s if name == "prefill" else self.decode_s
        measured_s: float = self.row.measured[f"{name}_time_s"]
        return 100 * (predicted_s / measured_s - 1)


def recorded_rows(root: Path) -> list[RecordedRow]:
    """Return the decode and serve rows of every file, in the order of their names."""
    files = sorted((root / "recorded").glob("*.jsonl"))
    rows = [row for path in files for row in read_file(path)]
    return [row for row in rows if row.kind in (Kind.DECODE, Kind.SERVE) and row.outcome == "done"]


def decoded_rows(rows: Sequence[RecordedRow]) -> list[Decoded]:
    """Predict for every decode row on a known GPU, by model, batch and context."""
    found = [one for row in rows if row.kind is Kind.DECODE and (one := _decoded(row))]
    return sorted(found, key=lambda one: (one.spec.parameters, one.run.batch, one.run.context))


def _decoded(row: RecordedRow) -> Decoded | None:
    gpu = sheet_of(row.environment)
    if gpu is None:
        return None
    run, spec = parse_decode(row.spec["decode"])
    ran = RanAs.of(row.kind, row.measured)
    predicted = predict_decode(run, spec, gpu, ran)
    times = StepTimes(served_model(run, spec, gpu, ran))
    held = run.batch * (run.context + run.new_tokens // 2)
    moved = sum(part.bytes for part in times.decode_parts(run.batch, held))
    return Decoded(
        row=row,
        run=run,
        spec=spec,
        prefill_s=predicted.prefill_time_s,
        decode_s=predicted.decode_time_s,
        moved_share=moved / gpu.mem_bandwidth_bytes_s / row.measured["decode_time_s"],
        joined=ran.joins_qkv or not run.fused,
    )


def render(text: str, rows: Sequence[RecordedRow]) -> str:
    """Return the document with everything between its marks written anew.

    Raises ValueError where a mark is missing.
    """
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"docs/serving.md must hold the line {mark!r} once")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "\n".join((before + BEGIN, *measured_part(rows), END + after))


def measured_part(rows: Sequence[RecordedRow]) -> Iterator[str]:
    """Yield the lines between the marks."""
    decoded, served = decoded_rows(rows), simulated_rows(rows)
    yield "\n## Measured\n"
    yield from _places(rows)
    if decoded:
        yield "\n### Decode"
        yield HOW_DECODED
        if not all(one.joined for one in decoded):
            yield JOINED_LATER
        if any(one.by_host for one in decoded):
            yield BY_HOST
        yield from _decode_table(decoded)
        yield from _decode_words(decoded)
    if served:
        yield "\n### Served traces"
        yield HOW_SERVED
        if any(_mark(row) == " (3)" for row, _ in served):
            yield OLDER_ENGINE
        yield from _serve_table(served)
        yield from _serve_words(served)
        yield from _peer_table(served)


def _places(rows: Sequence[RecordedRow]) -> Iterator[str]:
    names = ("torch", "triton", "transformers")
    places = {
        (
            str((row.environment.get("gpu") or {}).get("name")),
            *(str((row.environment.get("versions") or {}).get(name)) for name in names),
        )
        for row in rows
    }
    for gpu, *versions in sorted(places):
        pairs = ", ".join(f"{name} {value}" for name, value in zip(names, versions, strict=True))
        yield f"{gpu}, {pairs}, weights in bf16 unless it says otherwise."


def short(spec: ModelSpec) -> str:
    """Return a model's name without its publisher."""
    return spec.name.rsplit("/", 1)[-1]


def _decode_table(decoded: Sequence[Decoded]) -> Iterator[str]:
    yield (
        "| model | batch | context | cache | step | predicted | error | bandwidth | prefill | predicted "
        "| error | static over ours | compiled over ours |"
    )
    yield "|---|--:|--:|---|" + "--:|" * 9
    for one in decoded:
        measured = one.row.measured
        cells = (
            short(one.spec) + ("" if one.joined else " (1)"),
            f"{one.run.batch:,}",
            f"{one.run.context:,}",
            _cache(one.run),
            *_pair(measured["decode_time_s"], one.decode_s, one.error_percent("decode")),
            f"{100 * one.moved_share:.0f} %",
            *_prefill_cells(one),
            _over(measured, "static"),
            _over(measured, "static_compiled"),
        )
        yield f"| {' | '.join(cells)} |"


def _prefill_cells(one: Decoded) -> tuple[str, str, str]:
    measured_s, error = one.row.measured["prefill_time_s"], one.error_percent("prefill")
    if one.by_host:
        return ms(measured_s), ms(one.prefill_s), "host"
    return _pair(measured_s, one.prefill_s, error)


def _cache(run: DecodeRun) -> str:
    kind = "paged" if run.cache is CacheKind.PAGED else "contiguous"
    return kind if run.cache_dtype is CacheDtype.MODEL else f"{kind}, {run.cache_dtype}"


def _pair(measured_s: float, predicted_s: float, error: float | None) -> tuple[str, str, str]:
    return ms(measured_s), ms(predicted_s), "fit" if error is None else format_signed(error, 1)


def ms(time_s: float) -> str:
    """Return a time in milliseconds, of three or four digits."""
    value = 1e3 * time_s
    return f"{value:,.2f} ms" if value < 100 else f"{value:,.0f} ms"


def _over(measured: Mapping[str, Any], peer: str) -> str:
    found = (measured.get("peers") or {}).get(peer) or {}
    ratio = found.get("decode_time_over_ours")
    return "-" if ratio is None else f"{ratio:.2f}"


def _decode_words(decoded: Sequence[Decoded]) -> Iterator[str]:
    yield ""
    for name in ("decode", "prefill"):
        errors = [abs(e) for one in decoded if (e := one.error_percent(name)) is not None]
        if errors:
            yield (
                f"- Time of {'a step' if name == 'decode' else 'the prefill'}, predicted: {fmean(errors):.1f} % "
                f"mean absolute error, {max(errors):.1f} % worst, over {len(errors)} rows."
            )
    yield from _byte_words(decoded)
    yield from _bandwidth_words(decoded)
    yield from _compiled_words(decoded)
    yield from _one_byte_words(decoded)


def _byte_words(decoded: Sequence[Decoded]) -> Iterator[str]:
    """Say how far the predicted allocated peaks are from the measured ones."""
    found = [pair for one in decoded for pair in compare_served(one.row)]
    for quantity, words in (("prefill_allocated", "prefilling"), ("decode_allocated", "decoding")):
        errors = [abs(one.error_percent) for one in found if one.quantity == quantity]
        if errors:
            yield (
                f"- Peak of allocated bytes while {words}, predicted: {fmean(errors):.2f} % mean absolute error, "
                f"{max(errors):.2f} % worst, over {len(errors)} rows; weights and cache to the byte."
            )


def _bandwidth_words(decoded: Sequence[Decoded]) -> Iterator[str]:
    """Say how near a long step over a 16-bit cache in pages comes to the memory's rate, by model."""
    shares = {
        short(one.spec): f"{100 * one.moved_share:.0f} % ({short(one.spec)})"
        for one in decoded
        if (one.run.batch, one.run.context) == BANDWIDTH_AT
        and (one.run.cache, one.run.cache_dtype) == (CacheKind.PAGED, CacheDtype.MODEL)
    }
    if shares:
        batch, context = BANDWIDTH_AT
        yield (
            f"- At batch {batch} and context {context:,} a step moves its bytes at {', '.join(shares.values())} of "
            "the sheet's memory rate."
        )


def _compiled_words(decoded: Sequence[Decoded]) -> Iterator[str]:
    """Say how transformers' fastest generation compares, where it ran beside ours."""
    for one in decoded:
        peer = (one.row.measured.get("peers") or {}).get("static_compiled") or {}
        if "decode_time_s" not in peer:
            continue
        own = one.row.measured
        prefill = peer["prefill_time_s"] / own["prefill_time_s"]
        yield (
            f"- {short(one.spec)} at batch {one.run.batch} and context {one.run.context:,}: transformers' compiled "
            f"generation takes {peer['decode_time_over_ours']:.2f} times our time for a token and {prefill:.2f} times "
            "our prefill's."
        )


def _one_byte_words(decoded: Sequence[Decoded]) -> Iterator[str]:
    """Say what a one-byte cache does to the time of a step, where both were measured."""
    plain = {_place(one): one for one in decoded if one.run.cache_dtype is CacheDtype.MODEL}
    for one in decoded:
        own = plain.get(_place(one))
        if own is None or one.run.cache_dtype is CacheDtype.MODEL:
            continue
        ratio = one.row.measured["decode_time_s"] / own.row.measured["decode_time_s"]
        saves = "saves memory, not time" if ratio > 1 else "saves memory and time"
        yield (
            f"- A cache in {one.run.cache_dtype} {saves}: a step of {short(one.spec)} at batch "
            f"{one.run.batch} and context {one.run.context:,} takes {ratio:.2f} times that over bf16."
        )


def _place(one: Decoded) -> tuple[Any, ...]:
    return one.spec.name, one.run.batch, one.run.context, one.run.cache


def _serve_table(served: Sequence[tuple[RecordedRow, SimulatedRun]]) -> Iterator[str]:
    yield (
        "| model | requests | per second | prompts | answers | of a request | p50 | simulated | error "
        "| p90 | simulated | error | p99 | simulated | error |"
    )
    yield "|---|--:|--:|---|---|---|" + "--:|" * 9
    for row, found in served:
        compared = compare_latency(found, row.measured)
        for quantity, words in (("ttft_s", "first token"), ("tpot_s", "per token")):
            own = [one for one in compared if one.quantity == quantity]
            cells = (*_trace_cells(row, found), words, *(c for one in own for c in _compared(one)))
            yield f"| {' | '.join(cells)} |"


def _compared(one: Compared) -> tuple[str, str, str]:
    return ms(one.measured_s), ms(one.predicted_s), format_signed(one.error_percent, 1)


def _trace_cells(row: RecordedRow, found: SimulatedRun) -> tuple[str, ...]:
    trace = found.run.trace
    given = row.spec["serve"]["trace"]
    rate = f"{given['rate_per_s']:g}" if isinstance(given, Mapping) else "-"
    return (
        short(found.model) + _mark(row),
        f"{len(trace):,}",
        rate,
        _range([one.prompt_tokens for one in trace], given, "prompt_tokens"),
        _range([one.new_tokens for one in trace], given, "new_tokens"),
    )


def _range(values: Sequence[int], given: Any, name: str) -> str:
    low, high = given[name] if isinstance(given, Mapping) else (min(values), max(values))
    return f"{low:,}-{high:,}"


def _serve_words(served: Sequence[tuple[RecordedRow, SimulatedRun]]) -> Iterator[str]:
    compared = [
        one
        for row, found in served
        if _counts(row)
        for one in compare_latency(found, row.measured)
        if one.percentile in ("p50", "p90")
    ]
    yield ""
    if not compared:
        return
    for quantity, words in (("ttft_s", "Time to first token"), ("tpot_s", "Time per token")):
        errors = [abs(one.error_percent) for one in compared if one.quantity == quantity]
        yield (
            f"- {words}, p50 and p90, simulated: {fmean(errors):.1f} % mean absolute error, "
            f"{max(errors):.1f} % worst, over {sum(map(_counts, (row for row, _ in served)))} traces."
        )
    for row, found in served:
        spent = host_sentence(row.measured)
        yield f"- {_ran(row, found.run)}; {_static(row, found)}.{f' {spent}' if spent else ''}"


def _mark(row: RecordedRow) -> str:
    """Return the mark of a trace that counts in no average."""
    return "" if _counts(row) else " (2)" if row.id in SERVE_ROWS else " (3)"


def _counts(row: RecordedRow) -> bool:
    """Whether a trace was served as today, and no constant was fitted to it."""
    return row.id not in SERVE_ROWS and RanAs.of(row.kind, row.measured) == TODAY


def _ran(row: RecordedRow, run: ServeRun) -> str:
    measured = row.measured
    states = ", ".join(f"{number} {state}" for state, number in measured["states"].items())
    name = str(row.spec["serve"]["model"].get("preset", "model")).rsplit("/", 1)[-1]
    equal = measured.get("equal_alone")
    alone = "" if equal is None else f", {100 * equal:.0f} % of tokens as served alone"
    return (
        f"{name}, {len(run.trace)} requests: {states}, {measured['preemptions']} preempted, "
        f"{measured['leaked_pages']} pages lost, {measured['tokens_per_s']:,.0f} tokens/s{alone}"
    )


def _static(row: RecordedRow, found: SimulatedRun) -> str:
    ours, static = (one.latency["ttft_s"]["p50"] for one in (found.continuous, found.static))
    return f"static batching would give first tokens {static / ours:.1f} times as late (p50, simulated)"


def _peer_table(served: Sequence[tuple[RecordedRow, SimulatedRun]]) -> Iterator[str]:
    beside = [
        (row, found, name, peer)
        for row, found in served
        for name, peer in (row.measured.get("peers") or {}).items()
        if "latency" in peer
    ]
    if not beside:
        yield "\ntransformers' continuous batching has not been recorded beside ours yet (`--peer transformers`)."
        return
    yield "\n| model | requests | peer | first token p50 | ours | per token p50 | ours | tokens/s | ours |"
    yield "|---|--:|---|" + "--:|" * 6
    for row, found, name, peer in beside:
        own = row.measured
        times = [ms(one["latency"][q]["p50"]) for q in ("ttft_s", "tpot_s") for one in (peer, own)]
        speeds = [f"{one['tokens_per_s']:,.0f}" for one in (peer, own)]
        cells = (short(found.model), f"{len(found.run.trace):,}", name, *times, *speeds)
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    DOCUMENT.write_text(
        render(DOCUMENT.read_text(encoding="utf-8"), recorded_rows(ROOT)), encoding="utf-8"
    )
