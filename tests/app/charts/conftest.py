"""A prediction with numbers chosen by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _sample() -> ModuleType:
    path = Path(__file__).with_name("prediction_sample.py")
    spec = importlib.util.spec_from_file_location("prediction_sample", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def memory() -> dict[str, Any]:
    return _sample().sample_memory()
