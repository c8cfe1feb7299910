"""What this process runs on: versions and hardware, as plain values that fit into JSON."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def installed(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def hardware(device: torch.device) -> str:
    """The name of the chip behind a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver() -> str | None:
    """The NVIDIA driver's version as ``nvidia-smi`` gives it; None where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def versions() -> dict[str, str | None]:
    """Versions of what a measured number depends on."""
    return {
        "phonograph": installed("phonograph"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": driver(),
        "cuda-bindings": installed("cuda-bindings"),
    }


def pick_device(wanted: str) -> torch.device:
    """A device by name; ``auto`` is a GPU where there is one, the CPU otherwise.

    Raises:
        ValueError: there is no such device here.
    """
    present = devices()
    if wanted == "auto":
        return present[-1] if len(present) == 1 else torch.device("cuda", torch.cuda.current_device())
    try:
        device = torch.device("cuda:0" if wanted == "cuda" else wanted)
    except RuntimeError as error:
        raise ValueError(f"{wanted!r} is no device") from error
    if device not in present:
        raise ValueError(f"no device {wanted!r} here, only {', '.join(map(str, present))}")
    return device


def devices() -> list[torch.device]:
    """Every device that a recording can be made on here."""
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
