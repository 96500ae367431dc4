"""A small model that learns to recall: it reads pairs among noise and is asked for them at the end.

One token holds a key and its value, the last ones ask for keys, the answers are their values. How far
back a pair lies is known, so what attention cannot see shows as answers by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from runners.serving.quality import NAME, Probe, register

KEYS, VALUES, NOISE, PAIRS = 4, 8, 8, 3
# Tokens at the end that ask.
ASKED = 8
CHANCE = 1 / VALUES
BATCH = 32
LEARNING_RATE = 1e-2
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": KEYS * VALUES + KEYS + NOISE,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Questions:
    """Sequences (B, S), the values asked for at their end (B, ASKED), how far back their pairs lie."""

    tokens: Tensor
    answers: Tensor
    distances: Tensor


def ask(rows: int, length: int, generator: torch.Generator) -> Questions:
    """Draw sequences of noise with PAIRS pairs of different keys anywhere, and questions at the end."""
    tokens = KEYS * VALUES + KEYS + torch.randint(NOISE, (rows, length), generator=generator)
    keys = torch.rand(rows, KEYS, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.randint(VALUES, (rows, PAIRS), generator=generator)
    places = torch.rand(rows, length - ASKED, generator=generator).argsort(1)[:, :PAIRS]
    tokens.scatter_(1, places, keys * VALUES + values)
    asked = torch.randint(PAIRS, (rows, ASKED), generator=generator)
    tokens[:, -ASKED:] = KEYS * VALUES + keys.gather(1, asked)
    distances = torch.arange(length - ASKED, length) - places.gather(1, asked)
    return Questions(tokens, values.gather(1, asked), distances)


def train(probe: Probe, length: int, steps: int, device: torch.device, seed: int) -> nn.Module:
    """Return a model trained for `steps` on questions of `length` tokens, attending as `probe` says.

    Values, questions and their order come from `seed`.
    """
    register()
    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", **_SIZES)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=NAME, dtype=torch.float32
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        asked = ask(BATCH, length, generator)
        output = model(
            input_ids=asked.tokens.to(device),
            use_cache=False,
            logits_to_keep=ASKED,
            quality=probe,
        )
        answers = asked.answers.to(device).flatten()
        loss = cross_entropy(output.logits.float().flatten(0, 1), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def shares_right(logits: Tensor, asked: Questions, window: int) -> dict[str, float | None]:
    """Return the share of right answers: of all, of pairs within the window, of those beyond it.

    `logits` (B x ASKED, vocabulary) are those of the tokens that ask. None where there is no such question.
    """
    right = (logits.argmax(-1).cpu().view_as(asked.answers) == asked.answers).double()
    far = asked.distances >= window
    return {
        "accuracy": float(right.mean()),
        "near": float(right[~far].mean()) if bool((~far).any()) else None,
        "far": float(right[far].mean()) if bool(far.any()) else None,
    }
