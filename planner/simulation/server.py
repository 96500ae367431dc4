"""What a simulated server is: its rows, pages and chunks, what its steps take, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.errors import PlanError
from planner.model import ModelSpec
from planner.serve_run import ServeRun, TraceRequest

# More requests than a person waits for; each is kept with its times.
MAX_REQUESTS = 100_000
MAX_STEPS = 4_000_000


class StepTime(Protocol):
    """What a step of a server takes."""

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context_total: int,
        waits: bool = True,
    ) -> float:
        """Return seconds of one step, either part of which may be empty.

        Not `waits`: no token is read at its end, so the host goes on while the GPU still works.

        `prefill_tokens` of one prompt run after `prefill_context` that were run before, then one token
        of each of `decode_batch` requests, which see `decode_context_total` tokens together.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """At most `rows` requests at once over `pages` of `page_size` tokens; prompts run in chunks.

    `window` is that of a model all of whose layers slide, which gives pages back; else None.
    """

    rows: int
    pages: int
    page_size: int
    chunk_tokens: int
    window: int | None = None

    def pages_of(self, tokens: int) -> int:
        """Return ceil(tokens / page_size)."""
        return -(-tokens // self.page_size)

    def passed(self, tokens: int) -> int:
        """Return how many pages the next query of a request of `tokens` does not see any more."""
        if self.window is None:
            return 0
        return max(0, tokens + 1 - self.window) // self.page_size


def server_of(run: ServeRun, model: ModelSpec) -> Server:
    """Return the server that a serving run sets up."""
    return Server(
        rows=run.rows,
        pages=run.pages,
        page_size=run.page_size,
        chunk_tokens=run.chunk_tokens,
        window=sliding_window(model),
    )


def sliding_window(model: ModelSpec) -> int | None:
    """Return the window of a model all of whose layers slide; None for another."""
    return model.sliding_window if model.num_sliding_layers == model.num_layers else None


def check_trace(server: Server, trace: Sequence[TraceRequest], max_steps: int) -> None:
    """Raise PlanError for a request that no page count serves, and for a trace too long to simulate."""
    chunks, tokens = 0, 0
    for index, one in enumerate(trace):
        needed = server.pages_of(one.prompt_tokens + one.new_tokens)
        if needed > server.pages:
            sentence = (
                f"trace[{index}] needs {needed} pages of {server.page_size} tokens and the cache has "
                f"{server.pages}: give it more or shorten the request."
            )
            raise PlanError("pages", server.pages, f"at least {needed}", sentence=sentence)
        wanted = one.new_tokens if one.cancel_after is None else one.cancel_after
        if wanted:
            chunks += -(-one.prompt_tokens // server.chunk_tokens)
            # A prompt's last chunk gives the first one.
            tokens += min(wanted, one.new_tokens) - 1
    if max(chunks, tokens // server.rows) > max_steps:
        raise too_many_steps(max_steps)


def too_many_steps(max_steps: int) -> PlanError:
    """Return the refusal of a trace that takes more steps than are simulated."""
    sentence = (
        f"trace takes more than {max_steps:,} steps to serve, which is more than is simulated: take fewer "
        "requests, shorter answers or larger chunks."
    )
    return PlanError("trace", "too long", f"at most {max_steps} steps", sentence=sentence)
