"""What compilers and mistaken callers see of decode_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.decode import triton as fused
from kernels.decode.triton import decode_attention


def change(**tensors: Any) -> dict[str, Any]:
    """Return arguments that are valid but for the given ones."""
    valid = {"q": torch.randn(2, 4, 1, 16), "k": torch.randn(2, 2, 9, 16)}
    rest = {"v": torch.randn(2, 2, 9, 16), "lengths": torch.tensor([9, 4])}
    return valid | rest | tensors


def one_byte(scale: Tensor | None) -> dict[str, Any]:
    cache = torch.zeros(2, 2, 9, 16, dtype=torch.int8)
    return change(q=torch.zeros(2, 4, 1, 16).half(), k=cache, v=cache, k_scale=scale, v_scale=scale)


def test_compiled_and_eager_agree(device: str) -> None:
    inputs = {name: tensor.to(device) for name, tensor in change().items()}
    compiled = torch.compile(decode_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**inputs), decode_attention(**inputs))
    arguments = (*inputs.values(), 0.25, None, None, None, 0, 2)
    torch.library.opcheck(fused.decode, arguments, test_utils=("test_schema", "test_faketensor"))


def test_splits_allocate_their_parts_and_one_split_nothing() -> None:
    q = torch.zeros(2, 4, 3, 16)
    parts, lse = fused._new_parts(q, 5)
    assert (parts.shape, lse.shape) == ((5, 2, 4, 3, 16), (5, 2, 4, 3))
    assert parts.nbytes + lse.nbytes == 4 * (16 + 1) * 5 * 2 * 4 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (change(q=torch.zeros(2, 4, 16)), r"q has shape \(2, 4, 16\); it must have 4 dimensions"),
        (change(q=torch.zeros(2, 3, 1, 16)), "q has 3 heads; it must be a multiple of k's 2"),
        (change(q=torch.zeros(2, 4, 65, 16)), "q has 65 tokens for 2 heads of a group, 130 rows"),
        (change(q=torch.zeros(2, 4, 1, 16).double()), "q has dtype torch.float64; allowed are"),
        (change(q=torch.zeros(2, 4, 1, 17)), "k has head size 16; it must be q's, 17"),
        (change(v=torch.zeros(2, 2, 8, 16)), r"v has shape .*; it must be k's"),
        (change(q=torch.zeros(3, 4, 1, 16)), "k has batch size 2; it must be q's, 3"),
        (change(lengths=torch.tensor([3])), r"lengths has shape \(1,\); it must be \(2,\)"),
        (change(lengths=torch.zeros(2)), "lengths has dtype torch.float32; allowed are int32, int"),
        (change(block_table=torch.zeros(3, 1).int()), r"block_table has shape \(3, 1\); it must"),
        (change(block_table=torch.zeros(2, 1).long()), "block_table has dtype torch.int64; allow"),
        (change(k=torch.zeros(2, 2, 16, 9).transpose(2, 3)), "k's last dimension has stride 9"),
        (change(v=torch.zeros(2, 2, 9, 16).half()), "v has dtype torch.float16; it must be k's"),
        (change(k_scale=torch.ones(2)), "k_scale is given for a cache of torch.float32"),
        (one_byte(None), "k_scale is missing for a cache of torch.int8; fp8 and int8 need it"),
        (one_byte(torch.ones(3)), r"k_scale has shape \(3,\); allowed are \(2,\) or \(2, 2, 9\)"),
        (one_byte(torch.ones(2).half()), "k_scale has dtype torch.float16; allowed are float32"),
        (
            one_byte(torch.ones(2)) | {"q": torch.zeros(2, 4, 1, 16)},
            "q has dtype torch.float32; al",
        ),
        (change(scale=-1.0), "scale is -1.0; it must be a positive finite number"),
        (change(num_splits=0), "num_splits is 0; allowed are 1 to 128"),
        (change(window=0), "window is 0; it must be at least 1 key"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_attention(**arguments)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="q is on cpu; it must be on a CUDA device"):
        decode_attention(**change())
