"""CPUs, memory and space that this process may use, and large buffers."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from h5pack.system import machine
from h5pack.system.machine import available_cpus, available_memory, free_bytes, huge_page_memory, machine_facts

CPUS = len(os.sched_getaffinity(0))
MEGA = 1024 * 1024


def write_group(folder: Path, **texts: object) -> None:
    """Write files of a control group; ``cpu_max=1`` is the file cpu.max."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def quota_v1(folder: Path, quota: int) -> None:
    write_group(folder, cpu_cfs_quota_us=quota, cpu_cfs_period_us=100_000)


def memory_v2(folder: Path, limit: int | str, used: int, inactive: int = 0) -> None:
    stat = f"anon 5\nfile 9\ninactive_file {inactive}\nactive_file 3"
    write_group(folder, memory_max=limit, memory_current=used, memory_stat=stat)


def memory_v1(folder: Path, limit: int, used: int, inactive: int = 0) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}"
    write_group(folder, memory_limit_in_bytes=limit, memory_usage_in_bytes=used, memory_stat=stat)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mount point of the control groups of a node with 64 cores and 1000 MiB of available memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name in ("_CGROUP_ROOT", "_CGROUP_SELF", "_MEMINFO"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    (tmp_path / "_MEMINFO").write_text(
        f"MemTotal: 9999999 kB\nMemFree: 5 kB\nMemAvailable: {1000 * 1024:8} kB\nX: 7 kB\n"
    )
    return tmp_path / "_CGROUP_ROOT"


def join_groups(text: str) -> None:
    machine._CGROUP_SELF.write_text(f"{text}\n")


def test_a_file_system_without_a_size_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_blocks=0, f_bavail=0, f_frsize=4096))
    assert free_bytes(tmp_path) == sys.maxsize
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_blocks=9, f_bavail=0, f_frsize=4096))
    assert free_bytes(tmp_path) == 0


def test_this_machine(tmp_path: Path) -> None:
    assert 1 <= available_cpus() <= CPUS
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    status = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= status.f_blocks * status.f_frsize
    facts = machine_facts(tmp_path)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["packages"]["numpy"] == np.__version__


def test_affinity_is_respected() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("150000 100000", 2), ("10000 100000", 1)]
    + [(text, 64) for text in ("max 100000", "100000", "junk junk", "100 0", "999999999 1000")],
)
def test_version_2_quota(root: Path, text: str, cpus: int) -> None:
    write_group(root / "job", cpu_max=text)
    join_groups("0::/job")
    assert available_cpus() == cpus


@pytest.mark.parametrize(("quota", "cpus"), [(-1, 64), (0, 64), (250_000, 3)])
def test_version_1_quota(root: Path, quota: int, cpus: int) -> None:
    quota_v1(root / "cpu/docker/abc", quota)
    join_groups("5:memory:/other\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x:y")
    assert available_cpus() == cpus


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "left"),
    [
        *((500 * MEGA, 200, 0, 300), (500 * MEGA, 500, 450, 450), (500 * MEGA, 600, 0, 0)),
        *(("max", 200, 0, 1000), (5000 * MEGA, 200, 0, 1000), ("junk", 0, 0, 1000)),
    ],
)
def test_version_2_memory(root: Path, limit: int | str, used: int, inactive: int, left: int) -> None:
    memory_v2(root / "job", limit, used * MEGA, inactive * MEGA)
    join_groups("0::/job")
    assert available_memory() == left * MEGA


def test_version_1_memory(root: Path) -> None:
    join_groups("5:memory:/docker/abc\n4:cpu,cpuacct:/other\n1:name=systemd:/x:y")
    memory_v1(root / "memory", (1 << 63) - 4096, 9000 * MEGA)
    assert available_memory() == 1000 * MEGA
    memory_v1(root / "memory/docker/abc", 300 * MEGA, 250 * MEGA, 40 * MEGA)
    assert available_memory() == 90 * MEGA


def test_the_lowest_limit_on_the_way_to_the_root_holds(root: Path) -> None:
    join_groups("0::/slurm/job/step")
    for folder, quota, limit, used, inactive in (
        ("slurm/job/step", "max 100000", "max", 10, 0),
        ("slurm/job", "600000 100000", 400 * MEGA, 100, 0),
        ("slurm", "700000 100000", 900 * MEGA, 650, 20),
        ("elsewhere", "100000 100000", MEGA, 0, 0),
    ):
        write_group(root / folder, cpu_max=quota)
        memory_v2(root / folder, limit, used * MEGA, inactive * MEGA)
    assert available_cpus() == 6
    assert available_memory() == 270 * MEGA
    memory_v2(root / "slurm/job/step", 60 * MEGA, 10 * MEGA)
    assert available_memory() == 50 * MEGA


def test_a_container_that_sees_only_its_own_groups(root: Path) -> None:
    """Its list of groups names a path of the host's, but its mount shows the group as the root."""
    quota_v1(root / "cpu", 200_000)
    memory_v1(root / "memory", 300 * MEGA, 100 * MEGA)
    join_groups("5:memory:/docker/abc\n4:cpu:/docker/abc")
    assert (available_cpus(), available_memory()) == (2, 200 * MEGA)
    shutil.rmtree(root)
    write_group(root, cpu_max="500000 100000")
    memory_v2(root, 300 * MEGA, 100 * MEGA, 7 * MEGA)
    join_groups("0::/")
    assert (available_cpus(), available_memory()) == (5, 207 * MEGA)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("text", [None, "not a list"])
def test_without_groups_the_machine_is_the_limit(text: str | None) -> None:
    if text is not None:
        join_groups(text)
    assert (available_cpus(), available_memory()) == (64, 1000 * MEGA)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("text", [None, "", "MemFree: 5 kB\n", "MemAvailable: junk\n", "MemAvailable:\n"])
def test_half_of_the_memory_is_available_if_the_system_does_not_say(text: str | None) -> None:
    machine._MEMINFO.unlink() if text is None else machine._MEMINFO.write_text(text)
    assert available_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@pytest.mark.parametrize("size", [0, 1, 4096, 3_000_000])
def test_memory_is_zeroed_page_aligned_and_of_the_size_asked_for(size: int) -> None:
    array = np.frombuffer(huge_page_memory(size), np.uint8)
    assert len(array) == max(1, size)
    assert array.ctypes.data % mmap.PAGESIZE == 0
    assert not array.any()


def test_a_kernel_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert len(huge_page_memory(8192)) == 8192
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(huge_page_memory(8192)) == 8192
