"""Compile the kernels of the fused loss for real GPUs, without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.cross_entropy.triton import row_options

TYPES = {
    "logits": "*bf16",
    "labels": "*i64",
    "losses": "*fp32",
    "num_labels": "*i64",
    "row_stride": "i64",
    "num_classes": "i32",
    "ignored_label": "i32",
    "cap": "fp32",
}


@pytest.mark.parametrize("arch", [80, 90, "gfx942"])
def test_a_row_of_a_large_vocabulary_spills_nothing(
    arch: int | str, compile_for_gpus: Callable[..., list[dict[str, Any]]]
) -> None:
    options = row_options(128_256)
    requests = [
        {
            "module": "kernels.cross_entropy.device",
            "kernel": "cross_entropy_kernel",
            "arch": arch,
            "warps": options["num_warps"],
            "types": TYPES,
            "divisible": ["num_classes"],
            "constants": {
                "CAPPED": capped,
                "MEAN": True,
                "WITH_GRADIENT": True,
                "BLOCK": options["BLOCK"],
            },
        }
        for capped in (False, True)
    ]
    for report in compile_for_gpus(requests):
        assert report["spilled_bytes"] == 0, report
        assert report["wide_loads"] > 0, report
