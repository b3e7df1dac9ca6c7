"""Resources that this process may use (CPUs, memory, disk space), and a description of the machine."""

from __future__ import annotations

import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from h5pack.system.files import file_system_type

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_SELF = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_PACKAGES = ("h5pack", "h5py", "numpy", "torch", "pillow", "simplejpeg", "isal")


def available_cpus(cgroup_root: Path = _CGROUP_ROOT, cgroup_self: Path = _CGROUP_SELF) -> int:
    """Return the number of CPUs that this process may use, which may be fewer than the machine's cores.

    The result is the smaller of the number of CPUs in its affinity mask (set by taskset or SLURM) and the CPU quota of
    its control groups (set for containers), rounded up.

    Parameters
    ----------
    cgroup_root, cgroup_self : Path
        The folder where control groups are mounted and the file that lists this process's groups; tests pass others.

    Returns
    -------
    int
        At least 1.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup_root, cgroup_self)
    return max(1, min(affinity, math.ceil(quota)) if quota is not None else affinity)


def available_memory(
    cgroup_root: Path = _CGROUP_ROOT, cgroup_self: Path = _CGROUP_SELF, meminfo: Path = _MEMINFO
) -> int:
    """Return the number of bytes of memory that this process may still allocate without swapping.

    The result is the smaller of the machine's available memory and what remains below the limits of this process's
    control groups. Pages of the page cache that the kernel can drop count as available.

    Parameters
    ----------
    cgroup_root, cgroup_self, meminfo : Path
        The folder where control groups are mounted, the file that lists this process's groups, and the file that
        describes the machine's memory; tests pass others.
    """
    left = [_meminfo_available(meminfo)]
    for group in _cgroups(cgroup_self):
        for folder in (group, *group.parents):
            inside = str(folder).lstrip("/")
            left += _memory_left(cgroup_root / inside, "memory.max", "memory.current", "inactive_file")
            left += _memory_left(
                cgroup_root / "memory" / inside,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return max(0, min(left))


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes an unprivileged process can still write to the file system that contains `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def machine_facts(folder: Path) -> dict[str, Any]:
    """Return a JSON-serializable description of the machine and of the file system that contains `folder`."""
    return {
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.processor(),
        "cpus": available_cpus(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "virtual": "hypervisor" in (_first_value("/proc/cpuinfo", "flags") or ""),
        "file_system": file_system_type(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """Return the lowest CPU quota of this process's control groups and their parents, in CPUs; None if unlimited."""
    quotas: list[float] = []
    for group in _cgroups(membership):
        for folder in (group, *group.parents):
            quotas += _v2_quota(root / str(folder).lstrip("/")) + _v1_quota(root / "cpu" / str(folder).lstrip("/"))
    return min(quotas) if quotas else None


def _cgroups(membership: Path) -> list[Path]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return [Path("/")]
    groups = [Path(parts[2]) for parts in (line.split(":", 2) for line in lines) if len(parts) == 3]
    return groups or [Path("/")]


def _v2_quota(folder: Path) -> list[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _v1_quota(folder: Path) -> list[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return [] if quota <= 0 else [quota / period]
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _meminfo_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _memory_left(folder: Path, limit: str, usage: str, droppable: str) -> list[int]:
    try:
        maximum = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        if maximum == "max":
            return []
        dropped = 0
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == droppable:
                dropped = int(value)
        return [int(maximum) - used + dropped]
    except (OSError, ValueError):
        return []


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
