"""The comparison with the peers runs on little data with what is installed, and its checks find errors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from benchmarks import peer_worker, peers, plots, tables
from benchmarks.peer_cases.base import ImageFolder, Reading, chosen, decode
from benchmarks.peers import PeerProcess
from h5pack.benchmark.synthetic import make_folder
from tests.makers import run_benchmark


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "images"
    make_folder(path, 40, (24, 16))
    np.save(path.with_suffix(".npy"), peer_worker.truth(ImageFolder(path), 1))
    return path


def job_of(folder: Path, out: Path) -> dict[str, Any]:
    settings = {"batch": 16, "workers": 1, "seed": 0, "seconds": 0.05}
    return {"folder": str(folder), "out": str(out), "truth": str(folder.with_suffix(".npy")), **settings}


def test_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, threads = PeerProcess.run, torch.get_num_threads()

    def reported(self: PeerProcess, job: dict[str, Any], watch: bool = False) -> dict[str, Any]:
        # The memory of a process of its own is watched; the other jobs run in this one.
        return alone(self, job, watch) if watch else peer_worker.report_of(job)

    monkeypatch.setattr(PeerProcess, "run", reported)
    result = run_benchmark(tmp_path, peers, "--count 0 --small 24 --repeats 1 --seconds 0.1 --only h5loader,ffcv")
    torch.set_num_threads(threads)
    found = result["sizes"]["3 KB"]
    assert found["rows"] == 24
    assert set(found["ceilings"]) == {"memory copy 1", "memory copy 2", "sequential read"}
    assert result["packages"]["h5pack"] == result["machine"]["packages"]["h5pack"]
    cases = {case["key"]: case for case in found["cases"]}
    assert list(cases) == ["h5loader", "ffcv"]
    for case in cases.values():
        assert case["skipped"] or case["verified"], case
        if not case["skipped"]:
            assert case["checksum"] == found["checksum"]
            assert case["cold_pages_found_in_cache"] <= case["pages"]
            assert min(case["hot_images_per_s"]["min"], case["cold_images_per_s"]["min"]) > 0
    assert cases["h5loader"]["peak_memory_mb"] > 0
    plots.draw_peers(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    table = tables.peers_table(result)
    for case in cases.values():
        assert f"{case['case']} was skipped: {case['skipped']}" in table if case["skipped"] else case["case"] in table


@pytest.mark.parametrize("key", ["h5loader", "h5dataset", "memmap", "h5py", "h5py-auto", "h5py-recipe", "jpeg"])
def test_a_way_gives_each_image_once(key: str, folder: Path, tmp_path: Path) -> None:
    (listed,) = chosen(key)
    case, job = listed.load(), job_of(folder, tmp_path / "out")
    assert peer_worker.convert(case, job)["workers"] == (0 if key == "jpeg" else 1)
    report = peer_worker.check(case, job)
    assert report["verified"], report["reason"]
    assert report["checksum"] == peer_worker.checksum(np.load(job["truth"]))
    if key in ("h5py-auto", "h5py-recipe"):
        with h5py.File(tmp_path / "out" / "images.h5") as file:
            assert file["images"].chunks[1:] != file["images"].shape[1:], "chunks cut images"
    if key == "h5loader":
        measured = peer_worker.read(case, {**job, "pages_found_in_cache": 0})
        assert measured["cold"]["batches"] == 3
        assert measured["hot"]["images_per_s"] > 0


class Wrong:
    """Gives the same batches in every epoch, one image twice and another never."""

    settings, packages, parallel = "", (), "nothing"

    def __init__(self, source: ImageFolder) -> None:
        self.images = np.stack([source[row][0] for row in range(len(source))])
        self.labels = source.labels
        self.images[1] = self.images[0]

    def open(self, out: Path, reading: Reading) -> Wrong:
        return self

    def epoch(self) -> Generator[Any, None, None]:
        for start in range(0, len(self.labels), 16):
            yield self.images[start : start + 16], self.labels[start : start + 16]

    def close(self) -> None:
        pass


def test_a_wrong_epoch_is_found(folder: Path, tmp_path: Path) -> None:
    report = peer_worker.check(Wrong(ImageFolder(folder)), job_of(folder, tmp_path))  # type: ignore[arg-type]
    assert not report["verified"]
    assert "epoch 1: 40 images came for 40: 1 of them are missing, and 1 came twice" in report["reason"]
    assert "the order does not change" in report["reason"]


def test_marks_know_the_label_and_not_the_layout(folder: Path) -> None:
    source = ImageFolder(folder)
    images = np.stack([decode(path) for path in source.paths])
    expected = peer_worker.truth(source, 1)
    assert peer_worker.fault(peer_worker.marks(images.transpose(0, 3, 1, 2), source.labels)[::-1], expected) is None
    assert peer_worker.fault(peer_worker.marks(images, np.roll(source.labels, 1)), expected)
    assert peer_worker.fault(peer_worker.marks(images, source.labels)[:-1], expected)
    assert peer_worker.checksum(expected) == int(images.sum(dtype=np.int64))


def test_an_epoch_is_cut_short_where_it_takes_too_long(folder: Path) -> None:
    opened = Wrong(ImageFolder(folder))
    whole = peer_worker.timed(opened)
    assert (whole.rows, whole.batches, whole.whole) == (40, 3, True)
    # Not before 8 batches.
    assert peer_worker.timed(opened, -1).whole
    opened.labels, opened.images = np.tile(opened.labels, 5), np.tile(opened.images, (5, 1, 1, 1))
    cut = peer_worker.timed(opened, -1)
    assert (cut.rows, cut.batches, cut.whole) == (8 * 16, 8, False)
    assert 0 < cut.first_seconds < cut.seconds


def test_files_are_dropped_from_the_page_cache_though_they_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    np.save(tmp_path / "one" / "rows.npy", np.zeros(1 << 20, np.uint8))
    (tmp_path / "one" / "empty").touch()
    (tmp_path / "two").symlink_to(tmp_path / "one")
    files = peer_worker.PeerFiles(tmp_path / "two")
    files.flush()
    assert files.disk_bytes() >= 1 << 20
    mapped = np.load(tmp_path / "one" / "rows.npy", mmap_mode="r")
    assert not mapped.sum()
    stayed = files.drop()
    files.unmap()
    assert files.drop() <= stayed
    assert files.drop() == 0
    assert not mapped.sum()


def test_memory_is_private_memory_of_a_session() -> None:
    before = peer_worker.private_bytes([os.getpid()])
    # A map of its own: numpy may be given memory that this process has already.
    with mmap.mmap(-1, 1 << 25) as held:
        held.write(b"x" * len(held))
        assert peer_worker.private_bytes([os.getpid()]) - before > len(held) * 0.9
    assert os.getpid() in peer_worker.session(os.getsid(0))
    assert peer_worker.private_bytes([2**22 + 1]) == 0


def test_a_process_that_fails_is_a_report(tmp_path: Path) -> None:
    process = PeerProcess("/bin/false", tmp_path)
    assert process.run({"task": "versions"})["error"] == "ended with 1: it said nothing"
    absent = PeerProcess(str(tmp_path / "python"), tmp_path).run({"task": "versions"})
    assert absent["error"] == "cannot be started: No such file or directory"


def test_the_figures_of_a_case_are_of_its_visits() -> None:
    reports = [
        {
            "hot": {"images_per_s": hot, "batches": 9, "whole_epochs": whole},
            "cold": {"images_per_s": 5.0, "batches": 3, "whole_epoch": True, "pages_found_in_cache": 0, "pages": 7},
            "import_seconds": 0.5, "first_batch_seconds": 0.25,
        }
        for hot, whole in ((100.0, True), (300.0, False))
    ]  # fmt: skip
    found = peers._measured(reports, [200.0, 400.0])
    assert found["hot_images_per_s"] == {"median": 200, "min": 100, "max": 300, "repeats": 2}
    assert found["hot_of_memory_copy"] == {"median": 0.625, "min": 0.5, "max": 0.75, "repeats": 2}
    assert (found["first_batch_seconds"]["median"], found["cold_images_per_s"]["median"]) == (0.75, 5)
    assert (found["hot_whole_epochs"], found["cold_whole_epoch"]) == (False, True)


def test_too_little_space_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    with pytest.raises(SystemExit, match=r"1.0 GB are free and 3.5 GB are needed; give --scratch a"):
        peers.main(["--count", "10000", "--only", "memmap", "--scratch", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def figures(name: str, hot: float, memory: float, **changes: Any) -> dict[str, Any]:
    def one(value: float) -> dict[str, float]:
        return {"median": value, "min": value, "max": value, "repeats": 1}

    return {
        "case": name, "key": name.lower(), "ours": name.startswith("H5"), "skipped": None, "parallel": "2 threads",
        "verified": True, "hot_images_per_s": one(hot), "hot_of_memory_copy": one(hot / 100),
        "cold_images_per_s": one(10), "first_batch_seconds": one(1), "peak_memory_mb": memory, "convert": None,
        "file_mb": 1, "hot_whole_epochs": True, "cold_whole_epoch": True, "cold_pages_found_in_cache": 0, **changes,
    }  # fmt: skip


OURS = figures("H5Loader", 100, 100)
# Faster by less than the margin.
CLOSE = figures("Close", 104, 70)


def test_where_a_peer_is_better_is_said() -> None:
    def better(*cases: dict[str, Any]) -> list[str]:
        return tables.where_peers_are_better({"cases": [OURS, *cases]})

    assert better(figures("Peer", 90, 50)) == ["peak memory (H5Loader: 100 MB): Peer 50 MB"]
    assert better(figures("Peer", 90, 50, verified=False)) == []
    # Better than H5Loader, but not than another case of h5pack; and a difference within the margin is none.
    (said,) = better(figures("H5Other", 50, 60), CLOSE)
    assert said.startswith("peak memory (H5Loader: 100 MB; h5pack's best, H5Other: 60 MB): ")
    assert said.endswith(": better than H5Loader as it comes only: Close 70 MB")


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([OURS, figures("Fast", 200, 1)], "fewer than Fast (200 images/s)"),
        ([OURS, figures("Slow", 90, 1)], "1.1 times as many as the fastest peer, Slow"),
    ],
)
def test_the_message_compares_with_the_fastest_peer(cases: list[dict[str, Any]], said: str) -> None:
    assert said in tables.peers_message({"cases": cases})
