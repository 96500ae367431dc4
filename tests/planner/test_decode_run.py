"""What a decode run is asked is checked before anything runs; what it found is told in cells."""

from __future__ import annotations

from typing import Any

import pytest

from planner.decode_run import COLUMNS, DecodeRun, Peer, headline, parse_decode, result_cells
from planner.errors import PlanError

MODEL = {"preset": "meta-llama/Llama-3.2-1B"}


def test_a_run_survives_its_json_form() -> None:
    asked = {
        "model": MODEL,
        "batch": 4,
        "peers": ["static", "static_compiled"],
        "cache_dtype": "fp8",
    }
    run, model = parse_decode(asked)
    assert (run.batch, run.context, run.capacity) == (4, 1024, 1088)
    assert run.peers == (Peer.STATIC, Peer.STATIC_COMPILED)
    assert model.num_layers == 16
    assert parse_decode(run.to_dict())[0] == run
    assert set(run.to_dict()) == set(DecodeRun.__dataclass_fields__)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 0}, "decode.batch is 0: it must be an integer from 1 to 4096."),
        ({"context": 0}, "decode.context is 0: it must be an integer from 1 to 16777216."),
        ({"new_tokens": 1}, "decode.new_tokens is 1: it must be an integer from 2 to 65536."),
        (
            {"context": 131072},
            "with 64 new tokens it passes the 131072 positions of meta-llama/Llam",
        ),
        ({"cache": "ring"}, "decode.cache is 'ring': it must be one of contiguous, paged."),
        ({"page_size": 48}, "decode.page_size is 48: it must be one of 16, 32, 64, 128, 256."),
        (
            {"dtype": "fp32", "cache_dtype": "int8"},
            "decode.cache_dtype is 'int8' beside weights in",
        ),
        ({"peers": "static"}, "decode.peers is 'static': it must be a list of static, static_com"),
        ({"peers": ["vllm"]}, "decode.peers is 'vllm': it must be one of static, static_compiled."),
        ({"graphs": 1}, "decode.graphs is 1: it must be true or false."),
        ({"beams": 4}, "decode has no field 'beams': its fields are attention, batch, cache,"),
        ({"model": {"preset": "nothing-like-it-7x"}}, "is not a known preset"),
    ],
)
def test_what_cannot_run_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_decode({"model": MODEL, **change})
    assert sentence in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_a_run_without_a_model_says_so() -> None:
    with pytest.raises(PlanError, match="model is missing: a run needs it"):
        parse_decode({"batch": 2})


def test_figures_are_told_beside_each_peer_s() -> None:
    figures = {"prefill_time_s": 0.5, "decode_time_s": 0.002, "tokens_per_s": 500.0}
    static = {**figures, "decode_time_s": 0.005, "decode_time_over_ours": 2.5, "tokens_equal": 0.75}
    measured = {
        **figures,
        "allocated_bytes": 2**31,
        "cache_bytes": 2**25,
        "weights_bytes": 2**31,
        "peers": {
            "static": {**static, "peak_allocated_bytes": 2**32},
            "static_compiled": {"outcome": "oom_device"},
        },
    }
    ours, peer, lost = result_cells(measured)
    assert ours == ("peakmark", "500 ms", "2 ms", "500", "2.00 GiB", "1.00", "-")
    assert peer[0] == "transformers static"
    assert peer[2:] == ("5 ms", "500", "4.00 GiB", "2.50", "75 %")
    assert lost == ("transformers static compiled", "oom_device", "-", "-", "-", "-", "-")
    assert {len(row) for row in (ours, peer, lost)} == {len(COLUMNS)}
    run, _ = parse_decode({"model": MODEL, "batch": 4, "cache_dtype": "fp8"})
    assert headline(run.to_dict(), measured) == (
        "meta-llama/Llama-3.2-1B, batch 4, context 1024, 64 new tokens: paged cache in fp8, "
        "32.00 MiB beside 2.00 GiB of weights"
    )
    # A recorded run's spec leaves defaults out.
    assert "batch 8, context 1024, 64 new tokens: paged cache in the weights' dtype" in headline(
        {"model": MODEL, "batch": 8}, measured
    )
