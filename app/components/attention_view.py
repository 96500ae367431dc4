"""The Attention page: what each variant costs at a shape, predicted and measured, exact or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from app import attention_rows, services
from app.charts import attention as charts
from app.charts.style import size_text
from app.components.attention_form import choose_problem, choose_variants, link_of
from app.components.attention_run import show_run_box
from app.components.current_plan import current_document, keep_plan_in_url
from app.components.figure import show_figure, show_table
from app.components.header import unit
from app.components.problems import told_in_one_sentence
from planner.attention.answer import DIRECTIONS, AttentionAnswer, VariantAnswer, answer, curves
from planner.attention.costs import rate_flop_s
from planner.attention.measured import Seen
from planner.attention.memory import input_bytes, outside_bytes
from planner.attention.problem import Variant
from planner.units import format_seconds

WHAT_IT_IS = (
    "One attention layer of the plan, forward and backward. A **kernel** changes how softmax attention "
    "is computed: its result is the same. An **algorithm** changes what is computed: fewer pairs, or "
    "other weights; a model trained with one gives other results with another."
)
Best = Mapping[Variant, Seen]


def show_attention_page() -> None:
    """Draw the variants of attention at the shape of the plan that the form describes."""
    with told_in_one_sentence():
        document = current_document()
        if document is None:
            st.info("Give a model on the Plan page to see its attention.", icon=":material/info:")
            st.page_link("app_pages/plan.py", label="To the plan", icon=":material/straighten:")
            return
        plan = services.check_plan(document)
        st.caption(WHAT_IT_IS)
        problem = choose_problem(plan)
        variants = choose_variants()
        keep_plan_in_url(link_of(plan, problem, variants))
        if not variants:
            st.info("Choose a kernel or an algorithm.", icon=":material/info:")
            return
        found = answer(problem, variants, plan.hardware)
        seen = [one for one in attention_rows.seen_of(problem) if one.variant in variants]
        _answer(found, seen)


def _answer(found: AttentionAnswer, seen: Sequence[Seen]) -> None:
    for sentence in found.refused.values():
        st.caption(f":material/info: {sentence}")
    if not found.variants:
        return
    measured = attention_rows.on_gpus(seen)
    best = attention_rows.at_problem(found.problem, measured)
    with st.container(border=True, key="attention_findings"):
        chosen = unit()
        for sentence in attention_rows.findings(found, lambda size: size_text(size, chosen)):
            st.markdown(sentence)
    direction = st.segmented_control(
        "Direction", DIRECTIONS, default=DIRECTIONS[0], required=True, key="attention_direction"
    )
    _bars(found, best, direction)
    show_run_box(found)
    _curves(found, measured, direction)
    _roofline(found, measured, direction)
    _errors(found, attention_rows.at_problem(found.problem, seen))
    st.markdown("### Variant by variant")
    lines = attention_rows.table_rows(found, best)
    show_table([in_unit(line) for line in lines], key="attention_table", title="Variants")


def place_of(seen: Seen) -> str:
    """Say where something was measured."""
    return f"{'measured here' if seen.here else 'recorded elsewhere'} on {seen.gpu}"


def _bar_rows(
    found: AttentionAnswer,
    best: Best,
    predicted: Callable[[VariantAnswer], float],
    measured: Callable[[Seen], float | None],
) -> list[dict[str, Any]]:
    rows = []
    for one in found.variants:
        seen = best.get(one.variant)
        row = {"variant": one.variant.value, "predicted": predicted(one), "measured": None}
        if seen is not None:
            row |= {"measured": measured(seen), "here": seen.here, "place": place_of(seen)}
        rows.append(row)
    return rows


def _bars(found: AttentionAnswer, best: Best, direction: str) -> None:
    chosen = unit()
    times = _bar_rows(
        found,
        best,
        lambda one: getattr(one, direction).time_s,
        lambda seen: getattr(seen, f"{direction}_s"),
    )
    held = _bar_rows(
        found,
        best,
        lambda one: getattr(one, f"{direction}_peak_bytes"),
        lambda seen: getattr(seen, f"{direction}_peak_requested_bytes"),
    )
    left, right = st.columns(2)
    with left:
        _figure(
            times,
            format_seconds,
            "seconds",
            key="attention_time",
            title=f"Time of the {direction}",
            caption=f"Predicted: each kernel at the rate of its kind ({found.rates}). Measured: medians, cold "
            f"L2 cache. {_said(times, found)}",
        )
    with right:
        _figure(
            held,
            lambda size: size_text(size, chosen),
            "bytes",
            key="attention_memory",
            title=f"Memory at the peak of the {direction}",
            caption="Bytes that tensors ask the allocator for beside Q, K, V and the output's gradient, "
            f"results included. {_out_of_memory(best)}",
        )
    with left:
        _figure(
            _bar_rows(found, {}, lambda one: getattr(one, direction).flops, lambda _: None),
            lambda flops: f"{flops / 1e12:.3g} TFLOP",
            "FLOP",
            key="attention_flops",
            title=f"FLOPs of the {direction}",
            caption="Products of the pairs that are seen; eager multiplies the whole square, a fused "
            "backward computes the scores again. FlashAttention does not make these linear.",
        )
    with right:
        _figure(
            _bar_rows(found, {}, lambda one: getattr(one, direction).hbm_bytes, lambda _: None),
            lambda size: size_text(size, chosen),
            "bytes",
            key="attention_traffic",
            title=f"HBM traffic of the {direction}",
            caption="A tensor counts once for each kernel that reads or writes it (FlashAttention, "
            "theorem 2: no scores).",
        )


def _figure(
    rows: Sequence[Mapping[str, Any]],
    show: Callable[[float], str],
    axis: str,
    *,
    key: str,
    title: str,
    caption: str,
) -> None:
    figure: go.Figure = charts.bars_figure(rows, show, f"{axis}, logarithmic")
    show_figure(figure, key=key, title=title, caption=caption, rows=rows)


def _said(rows: Sequence[Mapping[str, Any]], found: AttentionAnswer) -> str:
    places = dict.fromkeys(row["place"] for row in rows if row["measured"] is not None)
    if places:
        return f"Beside it: {'; '.join(places)}."
    shape = found.problem
    return (
        f"Nothing was measured at this shape yet ({shape.batch} × {shape.sequence_length:,} tokens, "
        f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {shape.dtype})."
    )


def _out_of_memory(best: Best) -> str:
    out = [
        f"{attention_rows.variant_name(one.variant)} ran out of memory in its {one.stage}"
        f"{'' if one.requested_bytes is None else ' asking for ' + size_text(one.requested_bytes, unit())}"
        f" ({place_of(one)})"
        for one in best.values()
        if one.outcome.startswith("oom")
    ]
    return f"{'; '.join(out)}." if out else ""


def _curves(found: AttentionAnswer, seen: Sequence[Seen], direction: str) -> None:
    variants = [one.variant for one in found.variants]
    lines = curves(found.problem, variants, found.gpu)
    own = attention_rows.at_lengths(found.problem, seen)
    held = [
        {
            "variant": one.variant.value,
            "sequence_length": one.problem.sequence_length,
            "device_bytes": _device_bytes(one, found),
            "here": one.here,
            "outcome": one.outcome,
        }
        for one in own
        if one.outcome.startswith("oom") or one.backward_peak_requested_bytes is not None
    ]
    times = [
        {
            "variant": one.variant.value,
            "sequence_length": one.problem.sequence_length,
            "time_s": getattr(one, f"{direction}_s"),
            "here": one.here,
        }
        for one in own
        if getattr(one, f"{direction}_s") is not None
    ]
    longest = next((one.longest for one in found.variants if one.variant is Variant.EAGER), None)
    rows = [{"variant": name, **point} for name, points in lines.items() for point in points]
    left, right = st.columns(2)
    with left:
        show_figure(
            charts.memory_curves_figure(lines, held, longest, found.gpu.visible_bytes, unit()),
            key="attention_memory_curves",
            title="Memory over the sequence",
            caption="Predicted device bytes of this one layer: Q, K, V, their gradients, the peak, the "
            "CUDA context. Solid: kernels, dashed: algorithms, filled: measured. "
            f"{_end_of_eager(longest, found)}",
            rows=rows,
        )
    with right:
        show_figure(
            charts.time_curves_figure(lines, times, direction),
            key="attention_time_curves",
            title=f"Time of the {direction} over the sequence",
            caption="Predicted (lines) and measured (filled). A cross ends the line of what does not fit the "
            "GPU beyond.",
            rows=rows,
        )


def _device_bytes(seen: Seen, found: AttentionAnswer) -> float:
    """Add to what was measured beside the inputs what the curve's prediction adds.

    What ran out of memory is drawn at the GPU's capacity.
    """
    if seen.outcome.startswith("oom"):
        return float(found.gpu.visible_bytes)
    held = float(seen.backward_peak_requested_bytes or 0)
    length = float(seen.problem.sequence_length)
    return held + float(input_bytes(seen.problem, length)) + outside_bytes(found.gpu)


def _end_of_eager(longest: int | None, found: AttentionAnswer) -> str:
    if longest is None:
        return ""
    return f"The red cross: eager runs out of memory beyond {longest:,} tokens on {found.gpu.name}."


def _roofline(found: AttentionAnswer, seen: Sequence[Seen], direction: str) -> None:
    measured = attention_rows.at_any_batch(found.problem, seen)
    points = [
        _roofline_point(one, measured.get(one.variant), found, direction) for one in found.variants
    ]
    intensities = [point["intensity"] for point in points]
    span = (min(intensities) / 4, max(intensities) * 4)
    show_figure(
        charts.roofline_figure(points, _roofs(found, seen), span),
        key="attention_roofline",
        title=f"Roofline of the {direction}",
        caption="Hollow: predicted, filled: measured (of any batch at this shape; squares here, dots "
        "recorded elsewhere). Left of the bend HBM is the limit, right of it the tensor cores. FLOPs are "
        "those of the pairs that are seen, for predicted and measured alike.",
        rows=points,
    )


def _roofline_point(
    one: VariantAnswer, seen: Seen | None, found: AttentionAnswer, direction: str
) -> dict[str, Any]:
    done = getattr(one, direction)
    point: dict[str, Any] = {
        "variant": one.variant.value,
        "intensity": done.flops / done.hbm_bytes,
        "predicted_flop_s": done.flops / done.time_s,
        "measured_flop_s": None,
    }
    measured_s = None if seen is None else getattr(seen, f"{direction}_s")
    if seen is not None and measured_s is not None:
        flops = done.flops * seen.problem.batch / found.problem.batch
        point |= {
            "measured_flop_s": flops / measured_s,
            "here": seen.here,
            "place": f"{place_of(seen)}, batch {seen.problem.batch}",
        }
    return point


def _roofs(found: AttentionAnswer, seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """Return the vendor's roof, and that of each card whose copy and product were measured."""
    gpu = found.gpu
    roofs: list[dict[str, Any]] = [
        {
            "name": f"vendor: {gpu.name}",
            "flop_s": rate_flop_s(gpu, found.problem.dtype),
            "bytes_s": gpu.mem_bandwidth_bytes_s,
            "measured": False,
        }
    ]
    cards = {one.gpu: one for one in seen if one.copy_bytes_s and one.product_flop_s}
    return roofs + [
        {
            "name": f"{place_of(one)}: copy and product",
            "flop_s": one.product_flop_s,
            "bytes_s": one.copy_bytes_s,
            "measured": True,
        }
        for one in cards.values()
    ]


def _errors(found: AttentionAnswer, best: Best) -> None:
    """Draw what was measured of results: rounding of every variant, distance of the algorithms."""
    st.markdown("### Exact or not")
    for one in found.variants:
        st.markdown(
            f"- **{attention_rows.variant_name(one.variant)}** — {one.exactness}{_rounding(best.get(one.variant))}"
        )
    rows = [
        {
            "variant": one.variant.value,
            "distance": seen.apart_from_exact,
            "here": seen.here,
            "place": place_of(seen),
        }
        for one in found.variants
        if (seen := best.get(one.variant)) is not None and seen.apart_from_exact is not None
    ]
    if rows:
        show_figure(
            charts.distance_figure(rows),
            key="attention_distance",
            title="How far algorithms are from exact attention",
            caption="Measured: the norm of a row's difference over the norm of exact attention's row, as a "
            "mean over rows and heads, for random Q, K and V. There every key weighs about alike, which is "
            "hardest on what looks at few of them. A trained model looks at some keys much more than at "
            "others: measure its distance on the model.",
            rows=rows,
        )
    elif any(not one.exact for one in found.variants):
        st.caption(
            "The distance of algorithms from exact attention shows here once a run measured it."
        )


def _rounding(seen: Seen | None) -> str:
    if seen is None or seen.error is None:
        return ""
    return f"; rounding {seen.error:.1e} against float64 ({place_of(seen)})"


def in_unit(line: Mapping[str, Any]) -> dict[str, Any]:
    """Write a line's bytes in the chosen unit, for people."""
    chosen = unit()
    shown: dict[str, Any] = {}
    for name, value in line.items():
        is_size = name.endswith("_bytes") and value is not None
        words = name.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, float):
            value = float(f"{value:.4g}")
        shown[words] = size_text(value, chosen) if is_size else value
    return shown
