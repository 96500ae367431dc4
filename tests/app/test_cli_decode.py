"""`peakmark decode` from the command line, through queue, worker and supervisor, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
SIZES = ("--batch", "2", "--context", "20", "--new-tokens", "6", "--page-size", "16")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_model_decodes_here_beside_transformers(run: Run, config: str) -> None:
    code, out, _ = run("decode", "--config", config, *SIZES, "--world", "cpu", "--json")
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
    run: Run, config: str, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("decode", "--config", config, *arguments)
    assert code == 2
    assert sentence in err
