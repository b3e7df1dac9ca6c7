"""What this machine lets this process use: CPUs, memory and disk space."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_SELF = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_cpus(cgroup_root: Path = _CGROUP_ROOT, cgroup_self: Path = _CGROUP_SELF) -> int:
    """Count the CPUs this process may keep busy.

    The smaller of its affinity mask (taskset, SLURM) and its control groups' CPU quota (containers), rounded up;
    never the machine's core count, which a job on a shared node does not own.

    Parameters
    ----------
    cgroup_root, cgroup_self : Path
        Where the control groups are mounted and where this process's groups are listed; tests pass their own.

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
    """Bytes of memory this process may still take without pushing others out.

    The smaller of what the machine has available and what its control groups leave below their limits; pages of files
    that could be dropped count as available.

    Parameters
    ----------
    cgroup_root, cgroup_self, meminfo : Path
        Where the control groups are mounted, where this process's groups are listed, and the machine's memory; tests
        pass their own.
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
    """Bytes an unprivileged process may still write on the file system that holds `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """The tightest CPU quota on the way from this process's group to the root, in CPUs; None without one."""
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
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        if most == "max":
            return []
        dropped = 0
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == droppable:
                dropped = int(value)
        return [int(most) - used + dropped]
    except (OSError, ValueError):
        return []
