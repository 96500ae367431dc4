"""A configuration from the hub, over a network that the tests imitate."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import huggingface_hub
import pytest

from planner.errors import PlanError
from planner.hub import fetch_hub_config

# Which httpx generation the hub's client is built on depends on its version.
httpx: Any = importlib.import_module(type(huggingface_hub.get_session()).__module__.split(".")[0])
Answer = Callable[[Any], Any]


def imitate_network(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """Let every request of the hub's client be answered by `answer`."""
    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: client)


def refused(code: str, status: int) -> Answer:
    """Return an answer with the error header that the hub sends."""
    return lambda request: httpx.Response(status, headers={"X-Error-Code": code}, request=request)


def unreachable(request: Any) -> Any:
    """Fail as a machine without a network does."""
    raise httpx.ConnectError("Name or service not known", request=request)


def test_only_the_configuration_is_fetched_in_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def answer(request: Any) -> Any:
        asked.append(request.url.path)
        return httpx.Response(200, json={"model_type": "llama"})

    imitate_network(monkeypatch, answer)
    assert fetch_hub_config("org/model") == {"model_type": "llama"}
    assert asked == ["/org/model/resolve/main/config.json"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refused("GatedRepo", 403), "access to it must be granted on the hub first"),
        (refused("RepoNotFound", 404), "the hub has no such public model"),
        (refused("EntryNotFound", 404), "it has no config.json"),
        (refused("", 503), "the hub cannot be reached from here"),
        (unreachable, "the hub cannot be reached from here"),
    ],
)
def test_every_failure_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, reason: str
) -> None:
    imitate_network(monkeypatch, answer)
    with pytest.raises(PlanError) as caught:
        fetch_hub_config("org/model")
    assert str(caught.value).startswith(f"model 'org/model' was not loaded: {reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hub_id", ["bad name!!/x", "", "a/b/c", "../../etc/passwd"])
def test_what_is_no_hub_id_never_reaches_the_network(
    monkeypatch: pytest.MonkeyPatch, hub_id: str
) -> None:
    def answer(request: Any) -> Any:
        raise AssertionError(f"asked for {request.url}")

    imitate_network(monkeypatch, answer)
    with pytest.raises(PlanError, match="the hub has no such public model"):
        fetch_hub_config(hub_id)


def test_an_endless_file_is_cut_off_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_network(monkeypatch, lambda request: httpx.Response(200, content=b" " * 3_000_000))
    with pytest.raises(PlanError, match="at most 1,000,000 bytes"):
        fetch_hub_config("org/model")
