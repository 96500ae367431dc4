"""Static batching, for comparison: nobody joins a batch, and its rows stay until the last one is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from planner.serve_run import TraceRequest
from planner.simulation.replay import Replay
from planner.simulation.server import MAX_STEPS, Server, StepTime
from planner.simulation.tally import Request, Simulation


def simulate_static(
    trace: Sequence[TraceRequest], server: Server, times: StepTime, max_steps: int = MAX_STEPS
) -> Simulation:
    """Serve a trace in batches of what waits when the last batch is done.

    Every row of a batch has room for its longest prompt and answer from the start, so nothing is
    preempted; first tokens come when all prompts of the batch are done. Raises PlanError as `simulate`.
    """
    return _Static(trace, server, times, max_steps).run()


class _Static(Replay[Request]):
    def _serve(self) -> bool:
        if not self._waiting:
            return False
        self._run_batch(*self._batch())
        return True

    def _request(self, number: int, asked: TraceRequest) -> Request:
        return Request(number, asked)

    def _batch(self) -> tuple[list[Request], int]:
        """Take what waits, in order, while a row as long as the longest has room for each."""
        batch: list[Request] = []
        prompt = answer = 0
        while self._waiting and len(batch) < self._server.rows:
            asked = self._waiting[0].asked
            longest = max(prompt, asked.prompt_tokens), max(answer, asked.new_tokens)
            pages = (len(batch) + 1) * self._server.pages_of(sum(longest))
            if batch and pages > self._server.pages:
                break
            prompt, answer = longest
            batch.append(self._waiting.popleft())
        return batch, len(batch) * self._server.pages_of(prompt + answer)

    def _run_batch(self, batch: list[Request], pages: int) -> None:
        for request in batch:
            request.admitted_s = self._now_s
            self._prefill(request, len(batch), pages)
        for request in batch:
            request.tokens, request.first_token_s = 1, self._now_s
        context = sum(request.asked.prompt_tokens for request in batch)
        ends = deque(sorted(batch, key=_wanted))
        for token in range(1, max(map(_wanted, batch)) + 1):
            while ends and _wanted(ends[0]) <= token:
                self._leave(ends.popleft(), token)
            if ends:
                context += len(batch)
                self._step((0, 0, len(batch), context, True), len(batch), pages)

    def _prefill(self, request: Request, running: int, pages: int) -> None:
        prompt, chunk = request.asked.prompt_tokens, self._server.chunk_tokens
        for past in range(0, prompt, chunk):
            tokens = min(chunk, prompt - past)
            self._step((tokens, past, 0, 0, past + tokens == prompt), running, pages)

    def _step(self, work: tuple[int, int, int, int, bool], running: int, pages: int) -> None:
        self._arrive()
        self._pass(self._times.step_s(*work), running, pages)

    def _leave(self, request: Request, tokens: int) -> None:
        """Note a request's last token; one whose client went away was there for its batch all the same."""
        request.tokens = tokens
        is_done = tokens == request.asked.new_tokens
        self._end(request, "done" if is_done else "cancelled", self._now_s)


def _wanted(request: Request) -> int:
    """Tokens until the request is done or its client goes away; a batch gives each one at least."""
    asked = request.asked
    limit = asked.new_tokens if asked.cancel_after is None else asked.cancel_after
    return max(1, min(asked.new_tokens, limit))
