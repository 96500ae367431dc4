"""Write docs/kernels.md from recorded/kernels/: our kernels beside their peers. Part of `make accuracy`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from planner.units import MIB_BYTES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "kernels.md"
ROWS = ROOT / "recorded" / "kernels"
# What a row says of where it was measured; the rest is its case and its figures.
PLACE = ("operation", "device", "driver", "torch", "triton", "cuda", "cudnn", "transformers")
TABLE_CASE = ("head_dim", "heads", "kv_heads", "causal")
# Told by length: a line per case, a column per length, and the mean of all ratios.
BY_LENGTH = ("attention", "attention_flex")
SHOWN_ERROR_CHARACTERS = 80
# What a reader of an operation's figures has to know.
TITLES = {
    "attention_flex": "Attention beside FlexAttention",
    "attention_heads": "Attention with large heads",
    "decode_pages": "Decode over pages",
    "adamw": "AdamW",
    "rms_norm": "RMS norm",
    "rope": "RoPE",
    "swiglu": "SwiGLU",
}
NOTES = {
    "attention_flex": "The portable kernel alone, on shapes of the grid above; FlexAttention is compiled for each shape.",
    "attention_masks": "`backend` is ours, the portable `triton` where none is named; `causal` is our own "
    "causal attention of the same shape, by default the `hopper` backend's (in rows that name no "
    "backend, the portable one's).",
    "attention": "Forwards of head size 64 but for 32/32 heads at 2,048 are of the kernel before its softmax ran under its "
    "own products; today's has not been timed at those shapes.",
    "attention_heads": "Head size 192 is of queries and keys beside values of 128 (latent attention). Ours is the kernel "
    "before lists dealt its causal tiles out and each program walked several full ones; today's has not been timed so.",
    "linear_attention": "The peer computes another function: attention with softmax, whose time grows with the "
    "square of the length.",
    "cross_entropy": "Ours makes both gradients in the forward, and the larger is the weight's: of its peak at 4,096 tokens "
    "of width 4,096 that is 1,002 MiB and 1,034 MiB with the hidden states', which no chunk makes smaller and which are "
    "already 0.17 of what transformers' chain holds before it makes them. What the loss itself holds is the last column.",
    "decode_pages": "Pages beside the contiguous cache in bf16, since where a key lies in its page is worked out before "
    "the loop; the table above was taken before that.",
    "decode": "A cache is only read, the copy reads and writes: its rate can be passed. `torch` reads the "
    "contiguous cache in bf16.",
}
Row = Mapping[str, Any]
HEAD = """# Kernels

Written by `make accuracy` from `recorded/kernels/`; do not edit. All kernels are exact unless their
section says otherwise, none stores the scores, and each folder of `kernels/` holds a `reference.py`
that the tests compare with in float64.

## Attention: which kernel runs

`flash_attention` has two backends, chosen for each call and direction by one rule
(`kernels/attention/dispatch.py`):

| backend | written in | takes |
|---|---|---|
| `hopper` | Gluon: copies by TMA, a producer warp, consumer warp groups; tiles from a list, or dealt out without one | compute capability 9.0, Triton from 3.6 on, bf16 and fp16, address and strides in multiples of 16 bytes. Forward: head sizes up to 256, other ones for values too, full and causal masks, windows, softcap, sinks. Backward: full and causal masks, windows, sinks, heads up to 128 alike |
| `triton` | portable Triton | everything else: other GPUs, fp32, prefixes, block tables, documents; backwards of larger and unequal heads and of softcap |

`PEAKMARK_ATTENTION_BACKEND` (`auto`, `hopper`, `triton`) overrules the rule; forcing `hopper` on what
it cannot do is an error that names the reason. Rows of the job `attention` hold which backend ran in
each direction. The `hopper` forward runs one program per multiprocessor. Causal masks, and full ones over
heads up to 128, go by a tile list: beside its results it holds one for each shape, kept for the next call:
4 (1 + multiprocessors + B Hq ceil(S / R)) bytes, R = 192 rows at head sizes up to 64, else 128. For windows
and the other full masks it holds nothing: each program takes every n-th tile.

Until the `hopper` backward returns it holds, beside dq, dk and dv, dQ in
fp32 (4 B Sq Hq D bytes) and padded rows of logsumexp and delta (8 bytes for each of B Hq Sq, Sq rounded
up to 128); predictions of a training step count both, and the tile list (`planner/memory/attention.py`).
dK and dV repeat bit for bit; dQ is added up in no fixed order. The portable backward repeats every bit,
and it alone runs where torch is told to use deterministic algorithms.

Compiled for sm_90, the chosen tiles of these spill registers (bytes a thread; the tests allow no more): the portable
dK and dV 160 at head size 64 and 96 at 128, the `hopper` backward 172 at 128. What else is compiled there spills nothing.

Tiles, warps and splits of all kernels are chosen by rules (`blocks.py`, `schedule.py`, `decode/splits.py`); nothing is
tuned while a program runs. Every figure below is an H200's. The tests also compile the portable kernels for compute
capability 8.0 and, but for linear attention, for AMD's gfx942 (MI300): there they fit and use the matrix cores (dK
and dV with some registers in scratch), but none of them has run on either.

## Attention: what a query sees

Masks are said by kind (`kernels/attention/masks.py`), never as a matrix. Query and key are aligned at
their last tokens.

| made by | a query sees |
|---|---|
| `FULL`, `CAUSAL` | all keys; those up to its own |
| `window(left, right)` | `left` keys before its own and `right` after it; a model's window of W tokens is `window(W - 1)` |
| `prefix(n, left, right)` | the first n keys and a window (causal if none is given: a prefix language model) |
| `global_local(n, left)` | of the keys up to its own the first n and the last `left` |
| `documents(ends, length)`, `packed(position_ids)`, `labelled(document_ids)` | keys of its own document, causal or in a window; tokens of no document see nothing |
| `block_sparse(table, block, lengths)` | the keys of the blocks that a table marks for its block, causal if asked |

Only tiles with a visible pair are visited, once, and only those with a hidden pair are masked (a block
table is taken block by block). Documents hold 8 bytes per query and per key of a row, a block table 4
bytes per block, two ways; other kinds hold nothing. Beside them: values of another head size than keys
(up to 256), `softcap` c (c tanh(x / c) of each logit x), `sinks` (one more logit per head, of value 0),
all with gradients. A query that sees nothing gives 0 and a logsumexp of -inf, or of the sink. NaN in
tokens of no document does not leak; in a key that shares a tile with visible ones it does, as in plain
attention, where 0 * NaN is NaN.

transformers' models get these from `attn_implementation="peakmark_triton"`: causal and sliding-window
layers, packed rows (`position_ids` or `cu_seq_lens_q`), softcap (Gemma 2), sinks (GPT-OSS), latent
attention (DeepSeek). Padding, chunks and masks that a model composes itself are refused by name. Plans
take it for sliding windows too; for Gemma 2, GPT-OSS, DeepSeek and packed rows no step with it has
been traced, and they are refused. `torch.compile` makes one graph of a model that asks for full or
causal attention alone; windows, packed rows and attention masks are read by a call between two graphs.

## The other kernels

| folder | computes | held beside inputs and results | peers |
|---|---|---|---|
| `cross_entropy` | linear layer and cross-entropy, both gradients in the forward; runs as the plan's loss `fused_linear` | one chunk of logits, 4 bytes per token | transformers' chain, the same compiled |
| `rms_norm` | RMS norm | 4 bytes per row kept; backward: an fp32 row for each program, two per multiprocessor | torch's own, transformers' chain |
| `swiglu` | silu(gate) x up | nothing: silu(gate) is made again | torch's chain, the same compiled |
| `rope` | rotary embedding of query and key | nothing | transformers' chain, the same compiled |
| `adamw` | one step over a flat fp32 shard with a 16-bit copy; runs as the optimizer `adamw_triton` | nothing: all in place | torch's fused AdamW and a copy |
| `linear_attention` | **another function**: causal linear attention with f = elu + 1, not softmax attention; tested in the interpreter and on an H200, compiled for sm_80 and sm_90 | 4 bytes per row and head kept; 4 D (D + 1) bytes per chunk of 32 or 64 tokens and key-value head, twice in the backward | torch's softmax attention, by length |
| `decode` | attention of a few new tokens against a contiguous or paged cache in bf16, fp16, fp8 or int8; no gradients | with n splits, 4 n (D + 1) bytes per query and head | torch's attention, the rate of a copy |

All are custom operators with fake implementations, so `torch.compile` takes them whole; all but `adamw`
and `decode` are differentiable. They are not called by models unless a plan says so.
"""
HOW = """
Every figure compares kernels inside one process on one GPU, in turns, by medians of CUDA-event
timings with the L2 cache flushed; `ratio` is the peer's time over ours, above 1 where ours is faster.
The GPU waits before each call until the host has started it: what the host needs for that, some 0.1 to
0.4 ms, hides behind other work in a training step and in a CUDA graph. Figures of AdamW, cross-entropy
and attention, but for the `hopper` windows and backward of head size 128, are older than that wait, and
long enough to do without.
Rates count 4 B Hq S^2 D operations for a forward, half of it if causal, 2.5 times that for a backward.
"""


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of every file, in the order of their names; of one case the last row stays."""
    newest: dict[str, Row] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            # Figures are floats; what is not says which case it is.
            case = {k: v for k, v in row.items() if not isinstance(v, float) and k != "error"}
            newest[json.dumps(case, sort_keys=True)] = row
    return list(newest.values())


def render(rows: Sequence[Row]) -> str:
    """Return the document."""
    lines = [HEAD]
    if rows:
        lines.append(HOW)
    operations = dict.fromkeys(str(row["operation"]) for row in rows)
    for operation in sorted(operations, key=lambda name: (name != "attention", name)):
        found = [row for row in rows if row["operation"] == operation]
        for place in dict.fromkeys(map(describe_place, found)):
            here = [row for row in found if describe_place(row) == place]
            section = attention_section if operation in BY_LENGTH else other_section
            lines += [f"\n## {title(operation)}\n\n{place}.\n", *section(here)]
            lines += beside_the_default(here, rows)
    return "\n".join(lines).rstrip() + "\n"


def beside_the_default(masks: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    """Yield how much sooner masks that only the portable kernel has end than causal attention by default.

    `causal` of such a row is the portable kernel's too; the default's is in a row of its own.
    """
    names = ("device", "head_dim", "heads", "seq", "direction")
    default = {
        tuple(row[name] for name in names): row["ours_s"]
        for row in rows
        if row["operation"] == "attention" and row["causal"] and row["heads"] == row["kv_heads"]
    }
    on_hopper = {
        (row["mask"], row["direction"]) for row in masks if "backend" in row and "mask" in row
    }
    for row in masks:
        place = tuple(row.get(name) for name in names)
        if (
            "causal_s" in row
            and (row["mask"], row["direction"]) not in on_hopper
            and place in default
        ):
            yield (
                f"- {row['mask']}, head dim {row['head_dim']}, {row['direction']}: "
                f"{default[place] / row['ours_s']:.2f} times as fast as causal attention by default "
                f"({cell('_s', default[place])} ms, above)."
            )


def title(operation: str) -> str:
    """Return an operation's name as a heading."""
    return TITLES.get(operation, operation.replace("_", " ").capitalize()) + ", measured"


def describe_place(row: Row) -> str:
    """Return device and versions in one line."""
    words = [str(row["device"])]
    words += [f"{key} {row[key]}" for key in PLACE[2:] if row.get(key) is not None]
    return ", ".join(words)


def geometric_mean(values: Sequence[float]) -> float:
    """Return exp(mean(log(values)))."""
    return math.exp(fmean(map(math.log, values)))


def note_on(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what a reader of these figures has to know, if anything."""
    if note := NOTES.get(str(rows[0]["operation"])):
        yield note + "\n"


def attention_section(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a summary and one table for each direction: a line per case, a column per length."""
    yield from note_on(rows)
    for direction in ("forward", "backward"):
        found = [row for row in rows if row.get("direction") == direction]
        if not found:
            continue
        ratios = [row["ratio"] for row in found]
        yield (
            f"**{direction.capitalize()}**, TFLOP/s ours / peer (ratio): geometric mean of "
            f"{len(ratios)} ratios {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}.\n"
        )
        yield from length_table(found)
        yield ""
    yield from errors_of(rows)


def length_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of cases by sequence length."""
    lengths = sorted({row["seq"] for row in rows})
    yield "| D | heads | mask | ours | peer | " + " | ".join(f"{n:,}" for n in lengths) + " |"
    yield "|--:|---|---|---|---|" + "--:|" * len(lengths)
    names = (*TABLE_CASE, "backend", "peer")
    for case in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        cells = []
        for length in lengths:
            here = [
                row
                for row in rows
                if row["seq"] == length and tuple(row[name] for name in names) == case
            ]
            cells.append(rates(here[-1]) if here else "")
        head_dim, heads, kv_heads, causal, backend, peer = case
        mask = "causal" if causal else "full"
        yield f"| {head_dim} | {heads}/{kv_heads} | {mask} | {backend} | {peer} | " + (
            " | ".join(cells) + " |"
        )


def rates(row: Row) -> str:
    """Return both rates in TFLOP/s and the ratio."""
    ours, peer = (row[name] / 1e12 for name in ("ours_flop_s", "peer_flop_s"))
    return f"{ours:.0f} / {peer:.0f} ({row['ratio']:.2f})"


def errors_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each case that ended in an error."""
    for row in rows:
        if "error" in row:
            case = ", ".join(f"{k} {v}" for k, v in row.items() if k not in (*PLACE, "error"))
            yield f"- {case}: {str(row['error'])[:SHOWN_ERROR_CHARACTERS]}"


def other_section(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one table for each set of columns, as the benchmark reported them."""
    yield from note_on(rows)
    good = [row for row in rows if "error" not in row]
    columns = [tuple(name for name in row if name not in PLACE) for row in good]
    for names in dict.fromkeys(columns):
        yield "| " + " | ".join(map(heading, names)) + " |"
        yield "|" + "--:|" * len(names)
        for row, own in zip(good, columns, strict=True):
            if own == names:
                yield "| " + " | ".join(cell(name, row[name]) for name in names) + " |"
        yield ""
    yield from errors_of(rows)


def heading(name: str) -> str:
    """Return a column's heading with the unit that `cell` shows."""
    for ending, unit in (("_flop_s", "TFLOP/s"), ("_bytes_per_s", "TB/s"), ("_s", "ms")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')}, {unit}"
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')}, MiB"
    return name.replace("_", " ")


def cell(name: str, value: Any) -> str:
    """Return a value in its column's unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith(("_flop_s", "_bytes_per_s")):
        return f"{value / 1e12:.3g}"
    if name.endswith("_s"):
        return f"{value * 1e3:.4g}"
    if name.endswith("_bytes"):
        return f"{value / MIB_BYTES:,.1f}"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    DOCUMENT.write_text(render(read_rows(ROWS)), encoding="utf-8")
