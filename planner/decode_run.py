"""What a decode run is asked: model, batch, context, cache; checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.checks import check_boolean, check_choice, check_integer, check_mapping
from planner.errors import PlanError
from planner.model import ModelSpec
from planner.plan import parse_model
from planner.units import format_bytes, format_count, format_seconds

MAX_CONTEXT = 2**24
MAX_BATCH = 4096
MAX_NEW_TOKENS = 65_536
PAGE_SIZES = (16, 32, 64, 128, 256)


class CacheKind(StrEnum):
    """How a cache lies in memory: room for every row's longest context, or pages as rows grow."""

    CONTIGUOUS = "contiguous"
    PAGED = "paged"


class CacheDtype(StrEnum):
    """Element type of a cache; `model` is that of the weights."""

    MODEL = "model"
    FP8 = "fp8"
    INT8 = "int8"


class WeightDtype(StrEnum):
    """Element type of weights and activations."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class AttentionBackend(StrEnum):
    """What computes attention: our kernels, or plain torch, which runs anywhere."""

    PEAKMARK = "peakmark"
    TORCH = "torch"


class Peer(StrEnum):
    """transformers' own generation beside ours: sdpa over a static cache, as it is or compiled."""

    STATIC = "static"
    STATIC_COMPILED = "static_compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Prompts of `context` tokens for `batch` rows, then `new_tokens` decoded of each, greedily.

    `model` is what a plan's `model` holds. `fused` runs norms, rotary embedding and the gated
    activation by our kernels.
    """

    model: Mapping[str, Any]
    batch: int = 1
    context: int = 1024
    new_tokens: int = 64
    dtype: WeightDtype = WeightDtype.BF16
    cache: CacheKind = CacheKind.PAGED
    cache_dtype: CacheDtype = CacheDtype.MODEL
    page_size: int = 64
    attention: AttentionBackend = AttentionBackend.PEAKMARK
    fused: bool = True
    graphs: bool = True
    peers: tuple[Peer, ...] = (Peer.STATIC,)

    @property
    def capacity(self) -> int:
        """Tokens of a row at the end."""
        return self.context + self.new_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as a job spec holds it."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            name: [str(one) for one in value]
            if isinstance(value, tuple)
            else str(value)
            if isinstance(value, StrEnum)
            else value
            for name, value in values.items()
        }


def parse_decode(given: object) -> tuple[DecodeRun, ModelSpec]:
    """Read a spec's `decode`; absent fields take their defaults.

    Raises PlanError naming the field at fault.
    """
    values = check_mapping("decode", given, frozenset(DecodeRun.__dataclass_fields__))
    if "model" not in values:
        raise PlanError("model", None, "present", sentence="model is missing: a run needs it.")
    model, source = parse_model(values.pop("model"))
    merged = {**DecodeRun(model=source).to_dict(), **values}
    run = DecodeRun(
        model=source,
        batch=check_integer("decode.batch", merged["batch"], 1, MAX_BATCH),
        context=check_integer("decode.context", merged["context"], 1, MAX_CONTEXT),
        new_tokens=check_integer("decode.new_tokens", merged["new_tokens"], 2, MAX_NEW_TOKENS),
        dtype=check_choice("decode.dtype", merged["dtype"], WeightDtype),
        cache=check_choice("decode.cache", merged["cache"], CacheKind),
        cache_dtype=check_choice("decode.cache_dtype", merged["cache_dtype"], CacheDtype),
        page_size=check_page_size("decode.page_size", merged["page_size"]),
        attention=check_choice("decode.attention", merged["attention"], AttentionBackend),
        fused=check_boolean("decode.fused", merged["fused"]),
        graphs=check_boolean("decode.graphs", merged["graphs"]),
        peers=_peers(merged["peers"]),
    )
    check_together("decode", run.cache_dtype, run.dtype)
    check_positions("decode.context", run.context, run.new_tokens, model)
    return run, model


def check_page_size(field: str, value: object) -> int:
    """Return `value` if pages can have it; raises PlanError."""
    if type(value) is not int or value not in PAGE_SIZES:
        raise PlanError(field, value, "one of " + ", ".join(map(str, PAGE_SIZES)))
    return value


def _peers(value: object) -> tuple[Peer, ...]:
    if not isinstance(value, list | tuple):
        raise PlanError("decode.peers", value, "a list of " + ", ".join(Peer))
    return tuple(check_choice("decode.peers", one, Peer) for one in value)


def check_together(kind: str, cache_dtype: CacheDtype, dtype: WeightDtype) -> None:
    """Raise PlanError for a one-byte cache beside weights in fp32."""
    if cache_dtype is not CacheDtype.MODEL and dtype is WeightDtype.FP32:
        sentence = (
            f"{kind}.cache_dtype is '{cache_dtype}' beside weights in fp32: the decode kernel "
            "multiplies one-byte caches with bf16 and fp16 only, choose 'model' or another dtype."
        )
        raise PlanError(f"{kind}.cache_dtype", str(cache_dtype), "model", sentence=sentence)


def check_positions(field: str, prompt: int, new_tokens: int, model: ModelSpec) -> None:
    """Raise PlanError where a prompt with its new tokens passes the model's positions."""
    longest = model.max_positions
    if prompt + new_tokens > longest:
        sentence = (
            f"{field} is {prompt}: with {new_tokens} new tokens it passes the {longest} positions "
            f"of {model.name}; shorten one of them."
        )
        raise PlanError(field, prompt, f"at most {longest - new_tokens}", sentence=sentence)


WHO = "peakmark"
COLUMNS = (
    *("who", "prefill", "per step", "tokens/s", "peak allocated"),
    *("time over ours", "equal tokens"),
)


def result_cells(measured: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return COLUMNS of a decode run's result: ours first, then each of transformers' generations."""
    rows = [(WHO, *_figures(measured, measured.get("allocated_bytes")), "1.00", "-")]
    for name, peer in (measured.get("peers") or {}).items():
        who = "transformers " + name.replace("_", " ")
        if "decode_time_s" not in peer:
            rows.append((who, str(peer["outcome"]), *["-"] * 5))
            continue
        over = f"{peer['decode_time_over_ours']:.2f}"
        equal = f"{100 * peer['tokens_equal']:.0f} %"
        rows.append((who, *_figures(peer, peer.get("peak_allocated_bytes")), over, equal))
    return rows


def _figures(measured: Mapping[str, Any], peak_bytes: int | None) -> tuple[str, ...]:
    return (
        format_seconds(measured["prefill_time_s"]),
        format_seconds(measured["decode_time_s"]),
        format_count(measured["tokens_per_s"]),
        "-" if peak_bytes is None else format_bytes(peak_bytes),
    )


def headline(run: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Return what was decoded and over which cache, in one line; a recorded run leaves defaults out."""
    asked, _ = parse_decode(run)
    of = "the weights' dtype" if asked.cache_dtype is CacheDtype.MODEL else asked.cache_dtype
    name = run["model"].get("preset") or run["model"].get("name") or "custom model"
    return (
        f"{name}, batch {asked.batch}, context {asked.context}, {asked.new_tokens} new tokens: "
        f"{asked.cache} cache in {of}, {format_bytes(measured['cache_bytes'])} beside "
        f"{format_bytes(measured['weights_bytes'])} of weights"
    )
