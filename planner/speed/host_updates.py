"""The time of an optimizer's update in host memory, along measured points."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.calibration import Curve

_OPERATION = "host_update"


@dataclass(frozen=True, slots=True, eq=False)
class HostUpdates:
    """Measured seconds (`times_s`) of the update of a shard of so many `elements` by `threads`.

    As many as a rank takes on a host with 16 CPUs beside each GPU (runners/zero/offload.py).
    """

    elements: NDArray[np.float64]
    times_s: NDArray[np.float64]
    threads: int

    def update_s(self, elements: Any) -> Any:
        """Return the time of one shard's update: between two points a line, beyond them at the last rate."""
        inside = np.interp(elements, self.elements, self.times_s)
        return inside * np.maximum(1.0, np.asarray(elements) / self.elements[-1])


def updates_from_curves(curves: Iterable[Curve]) -> HostUpdates | None:
    """Return what points of `peakmark calibrate` say, those of most threads; None without any."""
    found = {curve.shape: curve.time_s for curve in curves if curve.operation == _OPERATION}
    if not found:
        return None
    threads = max(shape[1] for shape in found)
    sizes = sorted(shape[0] for shape in found if shape[1] == threads)
    times_s = [found[size, threads] for size in sizes]
    return HostUpdates(np.array(sizes, dtype=np.float64), np.array(times_s), threads)
