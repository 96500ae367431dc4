"""docs/kernels.md says what recorded/kernels/ holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts/write_kernels_doc.py"
    spec = importlib.util.spec_from_file_location("write_kernels_doc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attention_row(seq: int, ratio: float, **changes: Any) -> dict[str, Any]:
    peer_s = 2e-3 * ratio
    return {
        "operation": "attention",
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "head_dim": 128,
        "heads": 16,
        "kv_heads": 16,
        "causal": True,
        "seq": seq,
        "direction": "forward",
        "backend": "hopper",
        "peer": "cudnn",
        "ours_s": 2e-3,
        "peer_s": peer_s,
        "ratio": ratio,
        "ours_flop_s": 6e14,
        "peer_flop_s": 6e14 / ratio,
        **changes,
    }


def test_the_kernels_document_is_up_to_date(script: Any) -> None:
    assert script.DOCUMENT.read_text() == script.render(script.read_rows(script.ROWS)), (
        "run `make accuracy`"
    )


def test_attention_is_a_line_per_case_and_a_column_per_length(script: Any) -> None:
    rows = [attention_row(2048, 0.8), attention_row(4096, 1.25), attention_row(8192, 2.0)]
    text = script.render(rows)
    # (0.8 * 1.25 * 2)^(1/3) = 2^(1/3) = 1.260.
    assert "geometric mean of 3 ratios 1.260, worst 0.800" in text
    line = "| 128 | 16/16 | causal | hopper | cudnn | 600 / 750 (0.80) | 600 / 480 (1.25) |"
    assert line in text
    assert "NVIDIA H200, torch 2.11.0." in text


def test_flex_attention_is_shown_by_length_too(script: Any) -> None:
    named = {"operation": "attention_flex", "backend": "triton", "peer": "FlexAttention"}
    text = script.render([attention_row(seq, 1.5, **named) for seq in (2048, 4096)])
    assert "## Attention beside FlexAttention, measured" in text
    assert "geometric mean of 2 ratios 1.500, worst 1.500" in text
    assert "| causal | triton | FlexAttention | 600 / 400 (1.50) | 600 / 400 (1.50) |" in text


def test_a_portable_window_is_also_compared_with_the_default(script: Any) -> None:
    place = {"device": "NVIDIA H200", "torch": "2.11.0", "direction": "backward", "seq": 32768}
    window = place | {"operation": "attention_masks", "mask": "window 4k", "head_dim": 128}
    window |= {"heads": 16, "ours_s": 8e-4, "causal_s": 3.2e-3, "causal_ratio": 4.0}
    default = attention_row(32768, 1.0, direction="backward")
    text = script.render([default, window])
    # The default took 2 ms, the window 0.8 ms.
    assert "window 4k, head dim 128, backward: 2.50 times as fast as causal" in text
    assert "times as fast" not in script.render([default, window | {"backend": "hopper"}])


def test_other_operations_are_tables_in_units_and_errors_are_kept(script: Any) -> None:
    base = {"operation": "rms_norm", "device": "NVIDIA H200"}
    good = base | {"rows": 4096, "ours_s": 1.5e-3, "peak_bytes": 3 * 2**20, "ratio": 1.234}
    text = script.render([good, base | {"rows": 8192, "error": "RuntimeError: too far off"}])
    assert "| rows | ours, ms | peak, MiB | ratio |" in text
    assert "| 4,096 | 1.5 | 3.0 | 1.23 |" in text
    assert "- rows 8192: RuntimeError: too far off" in text


def test_the_last_row_of_a_case_stays(script: Any, tmp_path: Path) -> None:
    rows = [attention_row(2048, 0.9), attention_row(4096, 1.1), attention_row(2048, 1.2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["ratio"] for row in script.read_rows(tmp_path)] == [1.2, 1.1]
