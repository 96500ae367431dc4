"""What `calibrate` measures of several GPUs that compute and communicate at once, as a step's backward does.

A collective's kernels take multiprocessors and memory from what runs beside them, and wait for both. A
product and an addition are timed alone and while collectives run, and collectives while either runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from planner.calibration import Curve
from planner.units import MIB_BYTES
from runners.jobs.calibrate_case import DTYPES
from runners.jobs.stopwatch import Work
from runners.worlds import RunningWorld

_PRODUCT = (4096, 14336, 4096)
_ELEMENTS = 2**26
_COLLECTIVE_BYTES = 256 * MIB_BYTES
# What is timed lasts about 5 ms, what runs beside it three times as long.
_TIMED, _BESIDE = 8, 24
NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computing:
    """Work of about the time of one collective."""

    shape: tuple[int, ...]
    bytes: int
    flops: float
    work: Work


def overlap_curves(
    world: RunningWorld, collective: Callable[[str, int], Work], device: torch.device
) -> Iterator[Curve]:
    """Yield the points of this rank and all others: `beside_X` and `X_beside` for each collective X.

    `collective` gives the work of a collective over so many elements. A CPU does one at a time: none.
    """
    if device.type != "cuda":
        return
    elements = _COLLECTIVE_BYTES // DTYPES["bf16"].itemsize
    computing = list(_computing(device))
    for one in computing:
        yield _point(world, f"beside_{NOTHING}", one, _alone_s(one.work))
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        sent = collective(name, elements)
        for one in computing:
            yield _point(world, f"beside_{name}", one, _beside_s(one.work, sent, meets=sent))
            yield _point(world, f"{name}_beside", one, _beside_s(sent, one.work, meets=sent))


def _computing(device: torch.device) -> Iterator[_Computing]:
    m, n, k = _PRODUCT
    draw = partial(torch.randn, device=device, dtype=DTYPES["bf16"])
    left, right = draw(m, k), draw(n, k).t()
    product = torch.empty(m, n, device=device, dtype=DTYPES["bf16"])
    yield _Computing(
        shape=_PRODUCT,
        bytes=2 * (m * k + k * n + m * n),
        flops=2.0 * m * n * k,
        work=lambda: torch.mm(left, right, out=product),
    )
    a, b, total = (draw(_ELEMENTS) for _ in range(3))
    # Six times, to last as long as a product.
    yield _Computing(
        shape=(_ELEMENTS,),
        bytes=6 * 6 * _ELEMENTS,
        flops=0.0,
        work=lambda: [torch.add(a, b, out=total) for _ in range(6)],
    )


def _alone_s(work: Work) -> float:
    return _timed_s(work, lambda: None)


def _beside_s(work: Work, other: Work, *, meets: Work) -> float:
    """Time `work` while `other` runs on a stream of its own, from when all ranks meet in `meets`."""
    side = torch.cuda.Stream()

    def before() -> None:
        meets()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_BESIDE):
                other()

    seconds = _timed_s(work, before)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return seconds


def _timed_s(work: Work, before: Callable[[], None]) -> float:
    """Mean seconds of one of several repetitions in a row."""
    work()
    torch.cuda.synchronize()
    before()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_TIMED):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / _TIMED


def _point(world: RunningWorld, operation: str, one: _Computing, seconds: float) -> Curve:
    """The slowest rank's point."""
    slowest_s = max(rank["time_s"] for rank in world.gather({"time_s": seconds}))
    return Curve(
        operation=operation,
        shape=one.shape,
        dtype="bf16",
        bytes=one.bytes,
        flops=one.flops,
        time_s=slowest_s,
        n=_TIMED,
    )
