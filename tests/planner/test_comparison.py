"""Which counters of a run are compared with its prediction."""

from __future__ import annotations

from typing import Any

import pytest

from planner.comparison import compare
from planner.plan import default_plan
from planner.predict import predict

SEEN: dict[str, Any] = {"allocated_bytes": 10, "reserved_bytes": 20, "device_bytes": 30}


@pytest.mark.parametrize(
    ("seen", "quantities"),
    [
        (SEEN, ["allocated", "reserved", "device"]),
        # Segments given back by the end of the run: the device's figure is not what it needed.
        ({**SEEN, "device_bytes": 19}, ["allocated", "reserved"]),
        # Its optimizer's states were there first: the allocator's segments lie otherwise.
        ({**SEEN, "loaded": {"step": 7}}, ["allocated"]),
    ],
)
def test_only_what_the_prediction_is_of_is_compared(
    seen: dict[str, Any], quantities: list[str]
) -> None:
    prediction = predict(default_plan()).to_dict()
    found = compare(prediction, seen, "solo")
    assert [one.quantity for one in found] == quantities
    assert found[0].predicted == prediction["memory"]["allocated_bytes"]
