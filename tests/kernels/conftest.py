"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before its import."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton was imported before tests/kernels: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
