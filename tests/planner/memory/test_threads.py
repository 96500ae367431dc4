"""Templates are shared by threads: pages predict while the accuracy job does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from planner.memory import templates
from planner.presets import resolve_model
from planner.workload import Checkpointing, TrainingWorkload

# Two equal layers that did not find each other were seen in one try of twelve.
NUM_TRIES = 6


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads that take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def moments_of(num_layers: int) -> templates.Moments:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": num_layers})
    every = 2 + num_layers % 3
    workload = TrainingWorkload(checkpointing=Checkpointing.FULL, checkpoint_every=every)
    return templates.load_moments(templates.traced(spec, workload, 4096), "kept")


def forget() -> None:
    for cached in (templates._steps, templates.load_steps, templates.load_moments):
        cached.cache_clear()


@pytest.mark.usefixtures("eager_switches")
def test_threads_that_read_one_template_find_what_one_thread_does() -> None:
    depths = range(6, 30)
    forget()
    alone = [moments_of(depth) for depth in depths]
    for _ in range(NUM_TRIES):
        forget()
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(moments_of, depths))
        for one, other in zip(alone, together, strict=True):
            assert one.place == other.place
            assert np.array_equal(one.constant, other.constant)
