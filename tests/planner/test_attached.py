"""The machine's GPUs, read from a driver that the tests imitate."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from planner.attached import attached_gpus, match_preset
from planner.hardware import parse_gpu

H200_TOTAL = 150_754_820_096
H200_RESERVED = 644_939_776


class NvmlError(Exception):
    """What the driver raises."""


def fake_nvml(**replaced: object) -> SimpleNamespace:
    """Return a module with one idle H200; `replaced` functions imitate other machines."""
    functions = {
        "NVMLError": NvmlError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlMemory_v2": 2,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.65",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: "GPU-1",
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(
            total=H200_TOTAL, reserved=H200_RESERVED, used=5_000_000
        ),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [1, 2],
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x4 | 0x40,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1980 if kind == 1 else 3201,
        "nvmlDeviceGetTemperature": lambda handle, kind: 41,
    }
    return SimpleNamespace(**{**functions, **replaced})


def test_a_gpu_is_described_as_the_driver_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    found = attached_gpus()
    assert found.reason is None
    (gpu,) = found.gpus
    assert gpu.total_bytes == H200_TOTAL - H200_RESERVED == 150_109_880_320
    assert (gpu.used_bytes, gpu.driver, gpu.compute_processes) == (5_000_000, "580.65", 2)
    assert (gpu.sm_clock_mhz, gpu.memory_clock_mhz, gpu.temperature_c) == (1980, 3201, 41)
    assert gpu.throttle_reasons == ("software power cap", "hardware thermal slowdown")
    planned = gpu.to_gpu()
    assert planned is not None
    assert (planned.kind, planned.peak_dense_flop_s["bf16"]) == ("attached", 989e12)
    assert parse_gpu(planned.to_dict()).visible_bytes == 150_109_880_320


def test_what_a_card_does_not_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise NvmlError("Not Supported")

    nvml = fake_nvml(
        nvmlDeviceGetTemperature=unsupported,
        nvmlDeviceGetClockInfo=unsupported,
        nvmlDeviceGetComputeRunningProcesses=unsupported,
        nvmlDeviceGetCurrentClocksThrottleReasons=unsupported,
        nvmlDeviceGetName=lambda handle: "Unheard-of 9000",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (gpu,) = attached_gpus().gpus
    assert gpu.temperature_c is gpu.sm_clock_mhz is gpu.compute_processes is None
    assert gpu.throttle_reasons == ()
    assert gpu.preset_id is None
    assert gpu.to_gpu() is None


def test_an_old_driver_has_one_memory_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(handle: object, version: object = None) -> SimpleNamespace:
        if version is not None:
            raise NvmlError("Function Not Found")
        return SimpleNamespace(total=H200_TOTAL, used=7)

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetMemoryInfo=memory))
    (gpu,) = attached_gpus().gpus
    assert (gpu.total_bytes, gpu.used_bytes) == (H200_TOTAL, 7)


def test_no_library_no_driver_and_no_gpu_each_give_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not available" in (attached_gpus().reason or "")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=broken))
    assert "Driver Not Loaded" in (attached_gpus().reason or "")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetCount=broken))
    assert "cannot describe" in (attached_gpus().reason or "")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetCount=lambda: 0))
    assert attached_gpus().reason == "NVML sees no GPU."
    assert attached_gpus().gpus == ()


@pytest.mark.parametrize(
    ("name", "total_bytes", "preset_id"),
    [
        ("NVIDIA H200", 150_109_880_320, "h200-sxm5-141gb"),
        ("NVIDIA H100 80GB HBM3", 85_045_477_376, "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", 85_000_000_000, "h100-pcie-80gb"),
        ("NVIDIA A100 80GB PCIe", 85_000_000_000, "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", 85_100_068_864, "a100-sxm4-80gb"),
        ("NVIDIA A100-SXM4-40GB", 42_298_834_944, "a100-sxm4-40gb"),
        ("NVIDIA A10", 23_700_000_000, "a10"),
        ("NVIDIA A10G", 23_684_186_112, "a10g"),
        ("Tesla T4", 15_600_000_000, "t4"),
        ("NVIDIA GeForce RTX 3080", 25_300_000_000, None),
        ("NVIDIA H20", 102_000_000_000, None),
        ("", 10**10, None),
    ],
)
def test_a_product_name_means_the_preset_of_that_chip_and_size(
    name: str, total_bytes: int, preset_id: str | None
) -> None:
    assert match_preset(name, total_bytes) == preset_id
