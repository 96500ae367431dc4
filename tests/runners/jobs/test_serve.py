"""Which requests of a served trace are served again alone."""

from __future__ import annotations

import torch

from runners.jobs.serve import to_check
from runners.serving.engine import Request, RequestState


def request(preemptions: int, state: RequestState = RequestState.DONE) -> Request:
    return Request(torch.zeros(1), 1, state=state, preemptions=preemptions)


def test_those_that_gave_way_most_often_are_checked_and_only_finished_ones() -> None:
    given = [request(count) for count in (0, 3, 0, 1, 0, 7)]
    given.insert(0, request(9, RequestState.CANCELLED))
    assert [one.preemptions for one in to_check(given)] == [7, 3, 1, 0]
    assert to_check(given)[-1] is given[1]
