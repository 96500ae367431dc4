"""The GPUs of this machine, through NVML: identity, memory, load. No CUDA context is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planner.hardware import Gpu, gpu_presets

# A preset without a printed total has the marketing size in 10^9 bytes, up to 7 % low.
_SIZE_TOLERANCE = 0.1

_THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedGpu:
    """One GPU as the driver shows it now; None where the driver does not say."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    driver: str
    compute_processes: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    throttle_reasons: tuple[str, ...]
    preset_id: str | None

    def to_gpu(self) -> Gpu | None:
        """Return the preset of the same name with this card's memory, None without a preset.

        The total is the card's whole memory less what the driver reserves for itself.
        """
        preset = next((gpu for gpu in gpu_presets() if gpu.id == self.preset_id), None)
        if preset is None:
            return None
        return replace(
            preset, kind="attached", name=self.name, visible_bytes=self.total_bytes, notes=()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedGpus:
    """All GPUs of the machine, or none and the reason."""

    gpus: tuple[AttachedGpu, ...]
    reason: str | None


def _words(text: str) -> set[str]:
    return set(text.lower().replace("-", " ").split())


def match_preset(name: str, total_bytes: int) -> str | None:
    """Return the preset that a driver's product name and memory size mean, None if unclear.

    Every word that names a chip (a digit in it, no memory size) must occur in the preset.
    """
    wanted = _words(name)
    chips = {word for word in wanted if any(c.isdigit() for c in word)}
    chips -= {word for word in chips if word.endswith("gb") or word.startswith("hbm")}
    shared = {
        gpu.id: len(wanted & (_words(gpu.id) | _words(gpu.name)))
        for gpu in gpu_presets()
        if _same_size(gpu, total_bytes) and chips <= (_words(gpu.id) | _words(gpu.name))
    }
    best = [preset_id for preset_id, count in shared.items() if count == max(shared.values())]
    return best[0] if len(best) == 1 and chips else None


def _same_size(gpu: Gpu, total_bytes: int) -> bool:
    return abs(gpu.visible_bytes - total_bytes) < _SIZE_TOLERANCE * total_bytes


def _ask(query: Callable[[], Any]) -> Any:
    """Return the answer of one NVML call, None where this card or driver does not support it."""
    # Every NVML failure is a subclass of NVMLError, itself known only once pynvml is imported.
    try:
        return query()
    except Exception:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return visible total and used bytes: version 2 of the call tells the driver's share apart."""
    split = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    if split is not None:
        return int(split.total - split.reserved), int(split.used)
    plain = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(plain.total), int(plain.used)


def _describe(nvml: Any, index: int, driver: str) -> AttachedGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = _text(nvml.nvmlDeviceGetName(handle))
    total_bytes, used_bytes = _memory(nvml, handle)
    processes = _ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    mask = _ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return AttachedGpu(
        index=index,
        name=name,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        driver=driver,
        compute_processes=None if processes is None else len(processes),
        sm_clock_mhz=_ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_clock_mhz=_ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        temperature_c=_ask(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        throttle_reasons=tuple(text for bit, text in _THROTTLE_REASONS.items() if mask & bit),
        preset_id=match_preset(name, total_bytes),
    )


def attached_gpus() -> AttachedGpus:
    """Return the GPUs that NVML sees now; an empty tuple comes with the reason."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        # Missing library, missing driver or no permission: each is a plain "no GPU here".
        reason = f"NVML is not available ({type(error).__name__}: {error})."
        return AttachedGpus(gpus=(), reason=reason)
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        gpus = tuple(_describe(pynvml, index, driver) for index in range(count))
    except pynvml.NVMLError as error:
        return AttachedGpus(gpus=(), reason=f"NVML cannot describe the GPUs ({error}).")
    finally:
        pynvml.nvmlShutdown()
    return AttachedGpus(gpus=gpus, reason=None if gpus else "NVML sees no GPU.")
