"""CPUs, memory, disk space and packages that this process may use, large buffers, and facts about the machine."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import mmap
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from h5pack.system.files import file_system_type
from h5pack.system.libc import libc_function
from h5pack.system.text import counted

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_SELF = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_BUSY_LOAD = 0.5  # Per CPU.
_PACKAGES = ("h5pack", "h5py", "numpy", "torch", "pillow", "simplejpeg", "isal")


def available_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1.

    It is the smaller of the number of CPUs in the affinity mask (set by taskset or SLURM) and the lowest CPU quota of
    the process's control groups (set for containers), rounded up.
    """
    cpus = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group in _cgroups():
        v1 = _CGROUP_ROOT / "cpu" / group
        cpus += _cpu_quota(_CGROUP_ROOT / group / "cpu.max")
        cpus += _cpu_quota(v1 / "cpu.cfs_quota_us", v1 / "cpu.cfs_period_us")
    return max(1, min(cpus))


def available_memory() -> int:
    """Return the number of bytes of memory that this process may still allocate without swapping.

    It is the smaller of the machine's available memory and what remains below the limits of the process's control
    groups. Pages of the page cache that the kernel can drop count as available.
    """
    left = [_meminfo_available()]
    for group in _cgroups():
        left += _memory_left(_CGROUP_ROOT / group, "memory.max", "memory.current", "inactive_file")
        v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        left += _memory_left(_CGROUP_ROOT / "memory" / group, *v1)
    return max(0, min(left))


def huge_page_memory(size: int) -> mmap.mmap:
    """Allocate `size` bytes (at least 1) of zeroed, page-aligned private memory, on huge pages if the system has them.

    Huge pages cause fewer page faults, are faster to copy, and leave fewer pages to pin for a direct write.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels without transparent huge pages reject this advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes a process without privileges can write to the disk of `folder`; sys.maxsize if unknown."""
    # ramfs and some FUSE file systems do not know their size.
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize


_trim = libc_function("malloc_trim", ctypes.c_int, ctypes.c_size_t)


def release_free_memory() -> None:
    """Return freed memory to the system. Without this, glibc kept 175 of 650 MB after ten million files were listed."""
    if _trim is not None:
        _trim(0)


def load_average() -> float | None:
    """Return the system's load average of the last minute; None where it is unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def load_text(load: float | None) -> str:
    """Return a load average as text if it means that processes keep more than half of the CPUs busy; else ""."""
    cpus = os.cpu_count() or 1
    busy = load is not None and load > _BUSY_LOAD * cpus
    return f"load average {load:.1f} on {counted(cpus, 'CPU')}" if busy else ""


def machine_facts(folder: Path) -> dict[str, Any]:
    """Return a JSON-serializable description of the machine and of the file system that contains `folder`."""
    cpu = _proc_fields(Path("/proc/cpuinfo"))
    return {
        "processor": cpu.get("model name") or platform.processor(),
        "cpus": available_cpus(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "virtual": "hypervisor" in cpu.get("flags", ""),
        "file_system": file_system_type(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in _PACKAGES},
    }


def _cgroups() -> list[str]:
    """Return the paths, below the mount point, of this process's control groups and of their parents."""
    try:
        lines = _CGROUP_SELF.read_text().splitlines()
    except OSError:
        lines = []
    groups = [Path(parts[2]) for line in lines if len(parts := line.split(":", 2)) == 3] or [Path("/")]
    # In cgroup version 1, each controller has a line of its own, and most lines name the same group: drop duplicates.
    return list(dict.fromkeys(str(folder).lstrip("/") for group in groups for folder in (group, *group.parents)))


def _cpu_quota(*files: Path) -> list[int]:
    """Return [number of CPUs, rounded up] that the files of a control group allow, or [] if they set no limit.

    The files contain the quota and its period: one file in cgroup version 2, two in version 1.
    """
    try:
        quota, period = " ".join(file.read_text() for file in files).split()[:2]
        return [] if quota == "max" or int(quota) <= 0 else [math.ceil(int(quota) / int(period))]
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _meminfo_available() -> int:
    try:
        return int(_proc_fields(_MEMINFO)["MemAvailable"].removesuffix("kB")) * 1024
    except (KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _memory_left(folder: Path, limit: str, usage: str, droppable: str) -> list[int]:
    """Return the number of bytes left below a control group's limit, as a list; [] if there is no limit.

    `limit` and `usage` are names of files in the group's `folder`, and `droppable` is a key in memory.stat there.
    """
    try:
        maximum = (folder / limit).read_text().strip()
        if maximum == "max":
            return []
        used = int((folder / usage).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        return [int(maximum) - used + int(stat.get(droppable, 0))]
    except (OSError, ValueError):
        return []


def optional_module(name: str) -> Any:
    """Import a module of an optional package; return None if the package is not installed, or broken."""
    try:
        return importlib.import_module(name)
    except Exception:  # A broken package may raise other errors than ImportError.
        return None


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _proc_fields(file: Path) -> dict[str, str]:
    """Return the fields in the first paragraph of a file in /proc; {} if the system has no such file."""
    try:
        lines = file.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
