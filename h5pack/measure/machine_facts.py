"""The machine, as far as figures depend on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from h5pack.machine import available_cpus

_PACKAGES = ("h5pack", "h5py", "numpy", "torch", "pillow", "simplejpeg", "isal")


def machine_facts(folder: Path) -> dict[str, Any]:
    """The machine, as far as figures depend on it; `folder` is where files are written."""
    return {
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.processor(),
        "cpus": available_cpus(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "virtual": "hypervisor" in (_first_value("/proc/cpuinfo", "flags") or ""),
        "file_system": _file_system(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_value(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _file_system(folder: Path) -> str | None:
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return None
