"""What figures depend on besides the case: the device by its name, its libraries, and the code."""

import platform
import subprocess
from pathlib import Path

import torch

from vicinal.versions import made_by

CPU_FACTS = Path("/proc/cpuinfo")
PATIENCE = 20.0  # seconds for a driver to say its version


def device_name(device: torch.device) -> str:
    """Return what a record calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {cpu_model()}, {torch.get_num_threads()} threads"


def cpu_model(facts: Path = CPU_FACTS) -> str:
    """Return the name of the processor, or at least of its kind."""
    try:
        lines = facts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "unknown"


def all_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of packages, of the code and, on a GPU, of what drives it."""
    return {**made_by(), **(gpu_versions() if device.type == "cuda" else {})}


def gpu_versions() -> dict[str, str]:
    """Return the versions of CUDA, cuDNN and the driver, each where it can be known."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    found = {"cuda": torch.version.cuda, "cudnn": cudnn, "driver": _driver()}
    return {name: str(version) for name, version in found.items() if version}


def _driver() -> str:
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.strip().partition("\n")[0].strip()
