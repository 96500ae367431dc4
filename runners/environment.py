"""Where a run took place: GPU, driver, versions, host, source revision."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from planner.as_run import ATTENTION_KERNELS

_PACKAGES = ("torch", "triton", "transformers", "numpy")
_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "TRITON_INTERPRET",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "NCCL_NVLS_ENABLE",
)
_THROTTLE_BITS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
_SETTLE_INTERVAL_S = 0.1
_SETTLE_READINGS = 30


def capture_environment(device: torch.device) -> dict[str, Any]:
    """Return the environment of a run on `device`; what cannot be read is null."""
    return {
        "gpu": _capture_gpu(device) if device.type == "cuda" else None,
        "versions": _capture_versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "host": _hash_host_name(),
        "source": _capture_source(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        ATTENTION_KERNELS: _capture_attention_kernels(),
    }


def _capture_attention_kernels() -> dict[str, list[str]] | None:
    """Return which kernels our attention ran on by direction; None where it was not asked for."""
    dispatch: Any = sys.modules.get("kernels.attention.dispatch")
    return None if dispatch is None else dispatch.chosen_backends()


def device_baseline_bytes(local_index: int) -> int | None:
    """Return the bytes in use on a GPU before this process touched it, or None without NVML.

    A process that has just ended may still be giving its memory back: waits until two readings
    agree, at most a few seconds.
    """
    with _nvml_device(local_index) as (nvml, handle):
        if handle is None:
            return None
        used = -1
        for _ in range(_SETTLE_READINGS):
            previous, used = used, int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            if used == previous:
                break
            time.sleep(_SETTLE_INTERVAL_S)
        return used


def visible_gpu_name(local_index: int) -> str:
    """Return the UUID or driver index behind torch's `cuda:local_index`, without touching CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if local_index < len(visible) and visible[local_index]:
        return visible[local_index].strip()
    return str(local_index)


@contextlib.contextmanager
def _nvml_device(local_index: int) -> Iterator[tuple[Any, Any]]:
    """Yield pynvml and the handle of a visible GPU; (None, None) where NVML does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no GPU: all mean the same here
        yield None, None
        return
    try:
        name = visible_gpu_name(local_index)
        by_index = name.isdecimal()
        find = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
        yield pynvml, find(int(name) if by_index else name)
    finally:
        pynvml.nvmlShutdown()


def _capture_gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    gpu: dict[str, Any] = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "total_bytes": properties.total_memory,
    }
    with _nvml_device(device.index or 0) as (nvml, handle):
        if handle is not None:
            gpu.update(_read_nvml(nvml, handle))
    return gpu


def _read_nvml(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = function(*arguments)
        except nvml.NVMLError:
            return None
        return answer.decode() if isinstance(answer, bytes) else answer

    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "uuid": ask(nvml.nvmlDeviceGetUUID, handle),
        "driver": ask(nvml.nvmlSystemGetDriverVersion),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "sm_clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "max_sm_clock_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "power_limit_mw": ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "temperature_c": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None if reasons is None else _name_reasons(reasons),
    }


def _name_reasons(bits: int) -> list[str]:
    return [name for name, bit in _THROTTLE_BITS.items() if bits & bit]


def _capture_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {name: _package_version(name) for name in _PACKAGES}
    versions["peakmark"] = _package_version("peakmark") or _source_version()
    versions["cuda"] = torch.version.cuda
    has_cuda = torch.version.cuda is not None
    versions["cudnn"] = str(torch.backends.cudnn.version()) if has_cuda else None
    nccl = torch.cuda.nccl.version() if has_cuda else None
    versions["nccl"] = ".".join(map(str, nccl)) if nccl else None
    return versions


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_version() -> str | None:
    """Return the version in the project file beside the sources, when run uninstalled."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if not project.is_file():
        return None
    import tomllib

    return str(tomllib.loads(project.read_text())["project"]["version"])


def _hash_host_name() -> str:
    """Tell hosts apart without naming them."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def _capture_source() -> dict[str, Any] | None:
    """Return the git revision of the sources and whether they differ from it; None without git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        sha = _git(root, "rev-parse", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", "planner", "kernels", "runners")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"git_sha": sha, "dirty": bool(changed.strip())}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
