"""`peakmark decode` from the command line, through queue, worker and supervisor, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
SIZES = ("--batch", "2", "--context", "20", "--new-tokens", "6", "--page-size", "16")


def test_a_model_decodes_here_beside_transformers(run: Run, decoding_config: str) -> None:
    code, out, _ = run("decode", "--config", decoding_config, *SIZES, "--world", "cpu", "--json")
    document = json.loads(out)
    assert code == 0, document["summary"]
    measured = document["measured"]
    assert (measured["attention_backend"], measured["graphs"]) == ("torch", False)
    # 2 rows of 2 pages of 16 tokens: 2 layers, keys and values of 2 heads of 8 in fp32.
    assert measured["cache_bytes"] == 2 * 2 * 16 * 2 * 2 * 2 * 8 * 4
    assert measured["peers"]["static"]["tokens_equal"] == 1.0
    assert measured["decode_statistics"]["n"] == 6 - 1 - 3
    code, shown, _ = run("runs", "show", document["summary"]["id"])
    assert code == 0
    assert "tiny, batch 2, context 20, 6 new tokens: paged cache in the weights' dtype" in shown
    assert "transformers static" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--context", "60"), "with 64 new tokens it passes the 64 positions of tiny"),
        (("--context", "0"), "decode.context is 0: it must be an integer from 1 to"),
        (("--world", "nccl"), "--world is 'nccl': it must be solo or cpu."),
        (("--model", "llama-3.2-1b"), "--model and --config both name a model"),
        (("--peer", "vllm"), "decode.peers is 'vllm': it must be one of static, static_compiled."),
    ],
)
def test_what_cannot_run_is_one_sentence(
    run: Run, decoding_config: str, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("decode", "--config", decoding_config, *arguments)
    assert code == 2
    assert sentence in err
