"""The comparison with the peers runs on little data with what is installed, and its checks find errors."""

from __future__ import annotations

import json
import mmap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from benchmarks import peers, plots, tables
from benchmarks.peer_cases.base import ImageFolder, Reading, chosen, decode
from benchmarks.peer_worker import (
    PeerFiles,
    check,
    checksum,
    convert,
    fault,
    marks,
    private_bytes,
    read,
    report_of,
    session,
    timed,
    truth,
)
from benchmarks.peers import PeerProcess
from h5pack.benchmark.synthetic import make_folder

_COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "images"
    make_folder(path, _COUNT, (24, 16))
    np.save(path.with_suffix(".npy"), truth(ImageFolder(path), 1))
    return path


def job_of(folder: Path, out: Path) -> dict[str, Any]:
    settings = {"batch": 16, "workers": 1, "seed": 0, "seconds": 0.05}
    return {"folder": str(folder), "out": str(out), "truth": str(folder.with_suffix(".npy")), **settings}


def test_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, threads = PeerProcess.run, torch.get_num_threads()

    def run(self: PeerProcess, job: dict[str, Any], watch: bool = False) -> dict[str, Any]:
        # The memory of a process of its own is watched; the other jobs run in this one.
        return alone(self, job, watch) if watch else report_of(job)

    monkeypatch.setattr(PeerProcess, "run", run)
    json_path = tmp_path / "p.json"
    sizes = ["--count", "0", "--small", "24", "--repeats", "1", "--seconds", "0.1"]
    more = ["--only", "h5loader,ffcv", "--scratch", str(tmp_path), "--json", str(json_path)]
    peers.main([*sizes, *more])
    torch.set_num_threads(threads)
    result = json.loads(json_path.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"], "scratch is cleaned up"
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
    assert not cases["h5loader"]["skipped"]
    assert cases["h5loader"]["peak_memory_mb"] > 0

    plots.draw_peers(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    table = tables.peers_table(result)
    for case in cases.values():
        assert f"{case['case']} was skipped: {case['skipped']}" in table if case["skipped"] else case["case"] in table


@pytest.mark.parametrize("key", ["h5loader-file", "h5dataset", "memmap", "h5py", "h5py-auto", "h5py-recipe", "jpeg"])
def test_a_way_gives_each_image_once(key: str, folder: Path, tmp_path: Path) -> None:
    (listed,) = chosen(key)
    case, job = listed.load(), job_of(folder, tmp_path / "out")
    assert convert(case, job)["workers"] == (0 if key == "jpeg" else 1)
    report = check(case, job)
    assert report["verified"], report["reason"]
    assert report["checksum"] == checksum(np.load(job["truth"]))
    if key in ("h5py-auto", "h5py-recipe"):
        with h5py.File(tmp_path / "out" / "images.h5") as file:
            assert file["images"].chunks[1:] != file["images"].shape[1:], "chunks cut images"
    if key == "h5loader-file":
        measured = read(case, {**job, "pages_found_in_cache": 0})
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
    report = check(Wrong(ImageFolder(folder)), job_of(folder, tmp_path))  # type: ignore[arg-type]
    assert not report["verified"]
    assert "epoch 1: 40 images came for 40: 1 of them are missing, and 1 came twice" in report["reason"]
    assert "the order does not change" in report["reason"]


def test_marks_know_the_label_and_not_the_layout(folder: Path) -> None:
    source = ImageFolder(folder)
    images = np.stack([decode(path) for path in source.paths])
    expected = truth(source, 1)
    assert fault(marks(images.transpose(0, 3, 1, 2), source.labels)[::-1], expected) is None
    assert fault(marks(images, np.roll(source.labels, 1)), expected)
    assert fault(marks(images, source.labels)[:-1], expected)
    assert checksum(expected) == int(images.sum(dtype=np.int64))


def test_an_epoch_is_cut_short_where_it_takes_too_long(folder: Path) -> None:
    opened = Wrong(ImageFolder(folder))
    assert (timed(opened).rows, timed(opened).batches, timed(opened).whole) == (40, 3, True)
    # Not before 8 batches.
    assert timed(opened, -1).whole
    opened.labels, opened.images = np.tile(opened.labels, 5), np.tile(opened.images, (5, 1, 1, 1))
    cut = timed(opened, -1)
    assert (cut.rows, cut.batches, cut.whole) == (8 * 16, 8, False)
    assert 0 < cut.first_seconds < cut.seconds


def test_files_are_dropped_from_the_page_cache_though_they_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    np.save(tmp_path / "one" / "rows.npy", np.zeros(1 << 20, np.uint8))
    (tmp_path / "one" / "empty").touch()
    (tmp_path / "two").symlink_to(tmp_path / "one")
    files = PeerFiles(tmp_path / "two")
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
    import os

    before = private_bytes([os.getpid()])
    # A map of its own: numpy may be given memory that this process has already.
    with mmap.mmap(-1, 1 << 25) as held:
        held.write(b"x" * len(held))
        assert private_bytes([os.getpid()]) - before > len(held) * 0.9
    assert os.getpid() in session(os.getsid(0))
    assert private_bytes([2**22 + 1]) == 0


def test_a_process_that_fails_is_a_report(tmp_path: Path) -> None:
    process = PeerProcess("/bin/false", tmp_path)
    assert process.run({"task": "versions"})["error"] == "ended with 1: it said nothing"
    absent = PeerProcess(str(tmp_path / "python"), tmp_path).run({"task": "versions"})
    assert absent["error"] == "cannot be started: No such file or directory"


def test_too_little_space_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    with pytest.raises(SystemExit, match=r"1.0 GB are free and 3.5 GB are needed; give --scratch a"):
        peers.main(["--count", "10000", "--only", "memmap", "--scratch", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def figures(name: str, ours: bool, hot: float, memory: float) -> dict[str, Any]:
    def one(value: float) -> dict[str, float]:
        return {"median": value, "min": value, "max": value, "repeats": 1}

    return {
        "case": name, "key": name.lower(), "ours": ours, "skipped": None, "parallel": "2 threads", "verified": True,
        "hot_images_per_s": one(hot), "hot_of_memory_copy": one(hot / 100),
        "cold_images_per_s": one(10), "first_batch_seconds": one(1), "peak_memory_mb": memory, "convert": None,
        "file_mb": 1, "hot_whole_epochs": True, "cold_whole_epoch": True, "cold_pages_found_in_cache": 0,
    }  # fmt: skip


def test_where_a_peer_is_better_is_said() -> None:
    ours, peer = figures("H5Loader", True, 100, 100), figures("Peer", False, 90, 50)
    other = figures("H5Other", True, 50, 60)
    said = tables.where_peers_are_better({"cases": [ours, peer]})
    assert said == ["peak memory (H5Loader: 100 MB): Peer 50 MB"]
    # Better than H5Loader, but not than another case of h5pack; and a difference within the margin is none.
    close = figures("Close", False, 104, 70)
    (said,) = tables.where_peers_are_better({"cases": [ours, other, close]})
    assert said.startswith("peak memory (H5Loader: 100 MB; h5pack's best, H5Other: 60 MB): ")
    assert said.endswith(": better than H5Loader as it comes only: Close 70 MB")
    peer["verified"] = False
    assert tables.where_peers_are_better({"cases": [ours, peer]}) == []
    assert "fewer than Fast (200 images/s)" in tables.peers_message({"cases": [ours, figures("Fast", False, 200, 1)]})
    # H5Loader as it comes keeps rows in memory; what it does without is said beside what peers do.
    again = {**figures("H5Loader from its file", True, 60, 100), "key": "h5loader-file"}
    faster = tables.where_peers_read_faster({"cases": [ours, again, figures("Quick", False, 70, 1), close]})
    assert faster.endswith("(60 images/s): Close 104 images/s, Quick 70 images/s")
    assert not tables.where_peers_read_faster({"cases": [ours, again, figures("Level", False, 62, 1)]})
    assert "; 60 where it reads its file in every epoch" in tables.peers_message(
        {"cases": [ours, again, peer | {"verified": True}]}
    )
    assert "1.1 times as many as the fastest peer, Slow" in tables.peers_message(
        {"cases": [ours, figures("Slow", False, 90, 1)]}
    )
