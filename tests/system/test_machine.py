"""CPUs, memory and space that this process may use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from h5pack.system.machine import available_cpus, available_memory, free_bytes, machine_facts

CPUS = len(os.sched_getaffinity(0))
MEGA = 1024 * 1024


def test_affinity_is_respected(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cpus(tmp_path, tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, before)
    assert available_cpus(tmp_path, tmp_path / "none") == CPUS


def test_this_machine_has_cpus_and_memory() -> None:
    assert 1 <= available_cpus() <= CPUS
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_facts_can_be_written_as_json(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["processor"] or not Path("/proc/cpuinfo").exists()


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node of 64 cores, of which a quota leaves fewer."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def v2(root: Path, folder: str, text: str) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / "cpu.max").write_text(text)


def v1(root: Path, folder: str, quota: int, period: int) -> None:
    group = root / "cpu" / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (group / "cpu.cfs_period_us").write_text(f"{period}\n")


def member(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "self"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000\n", 64),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("100000\n", 64),
        ("junk junk\n", 64),
        ("100 0\n", 64),
        ("999999999 1000", 64),
    ],
)
def test_version_2_quota(tmp_path: Path, text: str, cpus: int) -> None:
    v2(tmp_path / "fs", "job", text)
    assert available_cpus(tmp_path / "fs", member(tmp_path, "0::/job\n")) == cpus


@pytest.mark.usefixtures("many_cpus")
def test_the_tightest_quota_on_the_way_to_the_root_holds(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    v2(root, "slurm/job/step", "max 100000")
    v2(root, "slurm/job", "600000 100000")
    v2(root, "slurm", "700000 100000")
    v2(root, "elsewhere", "100000 100000")
    assert available_cpus(root, member(tmp_path, "0::/slurm/job/step\n")) == 6


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(("quota", "cpus"), [(-1, 64), (0, 64), (250_000, 3)])
def test_version_1_quota(tmp_path: Path, quota: int, cpus: int) -> None:
    v1(tmp_path / "fs", "docker/abc", quota, 100_000)
    membership = member(tmp_path, "5:memory:/other\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x:y\n")
    assert available_cpus(tmp_path / "fs", membership) == cpus


@pytest.mark.usefixtures("many_cpus")
def test_a_container_that_sees_only_its_own_groups(tmp_path: Path) -> None:
    """Its membership names a path of the host's, its mount shows the group as the root."""
    v1(tmp_path / "one", "", 200_000, 100_000)
    assert available_cpus(tmp_path / "one", member(tmp_path, "4:cpu:/docker/abc\n")) == 2
    v2(tmp_path / "two", "", "500000 100000")
    assert available_cpus(tmp_path / "two", member(tmp_path, "0::/\n")) == 5


@pytest.mark.usefixtures("many_cpus")
def test_a_file_that_lists_no_groups_leaves_the_affinity(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "none", member(tmp_path, "not a list\n")) == 64


def test_free_bytes_is_what_an_ordinary_user_may_write(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= status.f_blocks * status.f_frsize
    with pytest.raises(FileNotFoundError):
        free_bytes(tmp_path / "missing")


def meminfo(tmp_path: Path, available: int = 1000 * MEGA) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable: {available // 1024:8} kB\nBuffers: 7 kB\n")
    return path


def memory_v2(root: Path, folder: str, most: int | str, used: int, inactive: int = 0) -> None:
    group = root / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\nfile 9\ninactive_file {inactive}\nactive_file 3\n")


def memory_v1(root: Path, folder: str, most: int, used: int, inactive: int = 0) -> None:
    group = root / "memory" / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{most}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_memory_without_groups_is_the_machines(tmp_path: Path) -> None:
    """Files that list no groups, or are not there, leave what the machine has."""
    nowhere = tmp_path / "none"
    assert available_memory(nowhere, nowhere, meminfo(tmp_path)) == 1000 * MEGA
    assert available_memory(nowhere, member(tmp_path, "not a list\n"), meminfo(tmp_path, 3 * MEGA)) == 3 * MEGA


@pytest.mark.parametrize("text", [None, "", "MemFree: 5 kB\n", "MemAvailable:\n", "MemAvailable: many kB\n"])
def test_memory_of_systems_that_do_not_say(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert available_memory(tmp_path / "none", tmp_path / "none", path) == half


@pytest.mark.parametrize(
    ("most", "used", "inactive", "left"),
    [
        (500 * MEGA, 200 * MEGA, 0, 300 * MEGA),
        (500 * MEGA, 500 * MEGA, 450 * MEGA, 450 * MEGA),
        (500 * MEGA, 600 * MEGA, 0, 0),
        ("max", 200 * MEGA, 0, 1000 * MEGA),
        (5000 * MEGA, 200 * MEGA, 0, 1000 * MEGA),
        ("junk", 0, 0, 1000 * MEGA),
    ],
)
def test_memory_below_a_version_2_limit(tmp_path: Path, most: int | str, used: int, inactive: int, left: int) -> None:
    memory_v2(tmp_path / "fs", "job", most, used, inactive)
    assert available_memory(tmp_path / "fs", member(tmp_path, "0::/job\n"), meminfo(tmp_path)) == left


def test_the_tightest_memory_limit_on_the_way_to_the_root_holds(tmp_path: Path) -> None:
    root, groups = tmp_path / "fs", member(tmp_path, "0::/slurm/job/step\n")
    memory_v2(root, "slurm/job/step", "max", 10 * MEGA)
    memory_v2(root, "slurm/job", 400 * MEGA, 100 * MEGA)
    memory_v2(root, "slurm", 900 * MEGA, 650 * MEGA, 20 * MEGA)
    memory_v2(root, "elsewhere", MEGA, 0)
    assert available_memory(root, groups, meminfo(tmp_path)) == 270 * MEGA
    memory_v2(root, "slurm/job/step", 60 * MEGA, 10 * MEGA)
    assert available_memory(root, groups, meminfo(tmp_path)) == 50 * MEGA


def test_memory_below_a_version_1_limit(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    groups = member(tmp_path, "5:memory:/docker/abc\n4:cpu,cpuacct:/other\n1:name=systemd:/x:y\n")
    memory_v1(root, "", (1 << 63) - 4096, 9000 * MEGA)
    assert available_memory(root, groups, meminfo(tmp_path)) == 1000 * MEGA
    memory_v1(root, "docker/abc", 300 * MEGA, 250 * MEGA, 40 * MEGA)
    assert available_memory(root, groups, meminfo(tmp_path)) == 90 * MEGA


def test_memory_of_a_container_that_sees_only_its_own_groups(tmp_path: Path) -> None:
    for make, groups in ((memory_v1, "5:memory:/docker/abc\n"), (memory_v2, "0::/\n")):
        make(tmp_path / make.__name__, "", 300 * MEGA, 100 * MEGA, 7 * MEGA)
        assert available_memory(tmp_path / make.__name__, member(tmp_path, groups), meminfo(tmp_path)) == 207 * MEGA
