"""What it takes to have a batch at hand: text through a tokenizer, and the copy to the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from planner.errors import PlanError

_REPEATS = 3
_SEED = 1


class DataSource(Protocol):
    """Makes batches of token ids from something, and says how long that takes."""

    def time_batch(
        self, rows: int, length: int, device: torch.device, *, answered: int = 0
    ) -> dict[str, Any]:
        """Return time_s, tokens, tokens_per_s and tokenizer of a batch, in one process, in series.

        `answered` tokens of every row are turned into text again, one by one.
        """


class NoData:
    """Tokens are there before the step begins: nothing to wait for."""

    def time_batch(
        self, rows: int, length: int, device: torch.device, *, answered: int = 0
    ) -> dict[str, Any]:
        """Return no time."""
        return {"time_s": 0.0, "tokens": rows * length, "tokens_per_s": None, "tokenizer": None}


class Tokenized:
    """Text of the tokenizer's own words, tokenized row by row and copied to the device."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name, self._tokenizer = name, tokenizer

    def time_batch(
        self, rows: int, length: int, device: torch.device, *, answered: int = 0
    ) -> dict[str, Any]:
        """Return the shortest of a few times: what else this host does is not the tokenizer's."""
        texts = [self._text(length, seed) for seed in range(_SEED, _SEED + rows)]
        seconds, tokens = min(
            _timed(lambda: self._batch(texts, device, answered)) for _ in range(_REPEATS)
        )
        return {
            "time_s": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "tokenizer": self._name,
        }

    def _text(self, length: int, seed: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(len(self._tokenizer), (length,), generator=generator)
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text

    def _batch(self, texts: list[str], device: torch.device, answered: int) -> int:
        rows = [self._tokenizer.encode(text) for text in texts]
        for row in rows:
            torch.tensor(row).to(device)
            for token in row[:answered]:
                self._tokenizer.decode([token])
        return sum(len(row) + min(answered, len(row)) for row in rows)


def _timed(call: Callable[[], int]) -> tuple[float, int]:
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


def open_source(folder: str | None) -> DataSource:
    """Return the tokenizer in a folder, or a source without any; raises PlanError for none in it."""
    if folder is None:
        return NoData()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        sentence = (
            f"tokenizer is {folder!r}: no tokenizer can be read there; give a folder with "
            f"tokenizer.json and tokenizer_config.json ({str(error).splitlines()[0][:120]})."
        )
        raise PlanError("tokenizer", folder, "a folder", sentence=sentence) from None
    return Tokenized(Path(folder).name, tokenizer)
