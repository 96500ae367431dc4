from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import psutil
import pytest

from runners import process_tree
from runners.process_tree import (
    TAG_VARIABLE,
    ProcessId,
    descendants,
    identify,
    is_alive,
    kill_run,
    send,
    tagged,
)

SLEEP = "import time; time.sleep(60)"
NESTED = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def child(run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, TAG_VARIABLE: run_id}
    process = subprocess.Popen(
        [sys.executable, "-c", NESTED], env=environment, start_new_session=True
    )
    while not psutil.Process(process.pid).children():
        pass
    yield process
    for left in [*psutil.Process(process.pid).children(), process]:
        left.kill()
    process.wait()


def test_a_process_is_named_by_its_start(child: subprocess.Popen[bytes]) -> None:
    name = identify(child.pid)
    assert name is not None
    # psutil turns the same start ticks into seconds since 1970.
    seconds = name.start_ticks / os.sysconf("SC_CLK_TCK")
    assert psutil.Process(child.pid).create_time() - psutil.boot_time() == pytest.approx(
        seconds, abs=1.5
    )
    assert is_alive(name)
    assert not is_alive(ProcessId(name.pid, name.start_ticks + 1))


def test_tag_and_descent_find_the_same_family(child: subprocess.Popen[bytes], run_id: str) -> None:
    family = {child.pid, *(process.pid for process in psutil.Process(child.pid).children())}
    assert {process.pid for process in tagged(run_id)} == family
    assert {process.pid for process in descendants(os.getpid())} >= family
    assert tagged(run_id[:-1]) == set()


def test_a_reused_pid_is_never_signalled(child: subprocess.Popen[bytes]) -> None:
    name = identify(child.pid)
    assert name is not None
    send([ProcessId(name.pid, name.start_ticks - 1)], 9)
    assert child.poll() is None


def test_killing_a_run_leaves_nothing_and_a_corpse_is_not_alive(run_id: str) -> None:
    environment = {**os.environ, TAG_VARIABLE: run_id}
    process = subprocess.Popen([sys.executable, "-c", NESTED], env=environment)
    name = identify(process.pid)
    assert name is not None
    assert kill_run(run_id)
    assert not is_alive(name)
    assert process.wait() == -9
    assert kill_run(run_id)


def test_a_run_is_dead_when_all_that_was_seen_of_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends loses its variables first, one that begins gets them late."""
    one, late = ProcessId(2**22 + 1, 1), ProcessId(2**22 + 2, 1)
    found = iter([{one}, set(), set(), {late}, set(), set(), set()])
    lives = {one: 2, late: 1}
    killed: list[ProcessId] = []

    def is_alive(process: ProcessId) -> bool:
        lives[process] -= 1
        return lives[process] >= 0

    monkeypatch.setattr(process_tree, "tagged", lambda run_id: next(found))
    monkeypatch.setattr(process_tree, "is_alive", is_alive)
    monkeypatch.setattr(process_tree, "send", lambda processes, _: killed.extend(processes))
    assert kill_run("run")
    # Rounds: the first lives, is ending, is gone; the other appears, and is gone for two rounds.
    assert killed == [one, one, late]
    assert list(found) == [set()]
