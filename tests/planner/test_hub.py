"""A configuration from the hub, with a client that the tests imitate."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from planner.errors import PlanError
from planner.hub import fetch_hub_config


def named_error(name: str) -> Exception:
    """Return an error of a class with this name, as the client's own need a live response."""
    return type(name, (Exception,), {})("no")


def test_only_the_configuration_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    asked = []

    def download(repo_id: str, filename: str, **_: object) -> str:
        asked.append((repo_id, filename))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert fetch_hub_config("org/model") == {"model_type": "llama"}
    assert asked == [("org/model", "config.json")]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (named_error("GatedRepoError"), "access to it must be granted on the hub first"),
        (named_error("RepositoryNotFoundError"), "the hub has no such public model"),
        (named_error("HFValidationError"), "the hub has no such public model"),
        (named_error("EntryNotFoundError"), "it has no config.json"),
        (LocalEntryNotFoundError("offline"), "the hub cannot be reached from here"),
        (OSError("network unreachable"), "the hub cannot be reached from here"),
    ],
)
def test_every_failure_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(PlanError) as caught:
        fetch_hub_config("org/model")
    assert str(caught.value).startswith("model 'org/model' was not loaded: ")
    assert sentence in str(caught.value)
