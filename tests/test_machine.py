"""CPUs and space that this process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from h5pack.machine import available_cpus, free_bytes

CPUS = len(os.sched_getaffinity(0))


def counted(code: str) -> int:
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return int(output)


def test_affinity_is_respected() -> None:
    everywhere = "available_cpus(Path('/nowhere'), Path('/nowhere'))"
    code = f"import os; from pathlib import Path; from h5pack.machine import available_cpus; {{}}print({everywhere})"
    first = min(os.sched_getaffinity(0))
    assert counted(code.format(f"os.sched_setaffinity(0, {{{first}}}); ")) == 1
    assert counted(code.format("")) == CPUS


def test_this_machine_allows_at_least_one() -> None:
    assert 1 <= available_cpus() <= CPUS


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
        ("800000 100000\n", 8),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("100000\n", 64),
        ("junk junk\n", 64),
        ("100 0\n", 64),
        ("", 64),
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
@pytest.mark.parametrize(("quota", "cpus"), [(-1, 64), (0, 64), (300_000, 3), (250_000, 3)])
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
def test_without_groups_the_affinity_holds(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "none", tmp_path / "none") == 64
    assert available_cpus(tmp_path / "none", member(tmp_path, "not a list\n")) == 64


def test_a_quota_never_raises_the_affinity(tmp_path: Path) -> None:
    v2(tmp_path / "fs", "", "99900000 100000")
    assert available_cpus(tmp_path / "fs", member(tmp_path, "0::/\n")) == CPUS


def test_free_bytes_is_what_an_ordinary_user_may_write(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= status.f_blocks * status.f_frsize
    with pytest.raises(FileNotFoundError):
        free_bytes(tmp_path / "missing")
