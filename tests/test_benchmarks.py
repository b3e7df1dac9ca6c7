"""The benchmarks run on little data, and figures and tables are made from their results."""

from __future__ import annotations

import itertools
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chunk_size, cluster, compare, compressed, convert, crops, foreign, plots, read, several, tables
from benchmarks.common import RESULTS, scratch_folder, spread
from h5pack.benchmark.bench import BenchRun
from h5pack.benchmark.ceilings import interleaved
from tests.makers import class_folders, run_benchmark
from tests.monitor.fake_clock import FakeClock


@pytest.fixture(autouse=True)
def few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in this process, and read in one worker: tiny data need no more."""
    monkeypatch.setattr("h5pack.pack.conversion.available_cpus", lambda: 1)
    monkeypatch.setattr("benchmarks.common.WORKERS", 1)
    # Generated photos are crops of a picture of this size, which takes half a second.
    monkeypatch.setattr("h5pack.benchmark.synthetic.MAX_SIDE", 512)


def test_convert_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = convert.peak_memory

    def peak_memory(folder: Path, out: Path, limit: int, workers: int) -> dict[str, float]:
        # One process is enough to see that it works.
        found = {"images": limit, "parent_mb": 1.0, "largest_worker_mb": 1.0}
        return measured(folder, out, limit, workers) if limit == 5 else found

    monkeypatch.setattr(convert, "peak_memory", peak_memory)
    result = run_benchmark(tmp_path, convert, "--count 20 --repeats 1 --workers 1")
    assert result["images"] == 20
    assert set(result["cases"]) == {"pillow auto", "pillow buffered", "simplejpeg auto", "simplejpeg buffered"}
    assert [part["images"] for part in result["memory"]] == [5, 20]
    assert result["memory"][0]["parent_mb"] > 10
    assert result["cases"]["pillow auto"]["ratio_to_last_write"]["repeats"] == 1
    plots.draw_convert(result, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_read_benchmark(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, read, "--large 40 --small 90 --repeats 1")
    assert list(result["sizes"]) == ["116 KB", "3 KB"]
    for found, rows, batches in zip(result["sizes"].values(), (40, 90), ((20, 13), (45, 30)), strict=True):
        assert (found["epoch"]["rows"], found["epoch"]["amplification"]) == (rows, 1.0)
        assert found["epoch"]["chunk_misses"] == found["epoch"]["chunks"]
        cases = {(case["case"], case["threads"], case["batch"]) for case in found["hot"]}
        assert cases >= set(itertools.product(("memory copy", "H5Loader"), (1, 2), batches))
        assert ("H5Dataset with collate, DataLoader", 2, batches[0]) in cases
        assert all(case["images_per_s"]["min"] > 0 for case in found["hot"])
        assert next(case["case"] for case in found["cold"]["cases"]) == "sequential read"
    plots.draw_read(result, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert "H5Loader" in tables.cold_table(result)


def test_chunk_size_benchmark_and_its_settings_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock of its own, so that the time suffices on a busy machine.
    monkeypatch.setattr(
        BenchRun.__init__, "__kwdefaults__", {**BenchRun.__init__.__kwdefaults__, "clock": FakeClock(tick=0.05)}
    )
    class_folders(tmp_path / "a", {"a": 50, "b": 50}, (64, 48))
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    sizes = "--images a --chunk-rows 4,16 --batch-size 16 --seconds 10"
    found = run_benchmark(tmp_path / "scratch", chunk_size, sizes)
    assert found["recommendation"]["variant"] in ("4 rows", "16 rows")
    assert str(tmp_path) not in json.dumps(found)
    assert {case["cache"] for case in found["cold"]["measurements"]} == {"cold"}
    assert tables.cold_chunk_table(found).count(" rows") == 2
    (tmp_path / "scratch" / "r.json").rename(tmp_path / "first.json")
    again = run_benchmark(tmp_path / "scratch", chunk_size, "--again first.json --images a --repeats 2")
    assert set(again["images_per_s"]) == {"4 rows", "16 rows"}
    assert 0 < again["of_best"] <= 1


def test_compressed_benchmark(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, compressed, "--rows 80 --batch 16 --repeats 1")
    assert list(result["compressions"]) == ["bitshuffle-lz4", "gzip", "zstd"]
    for found in result["compressions"].values():
        assert found["bytes_stored"] < found["bytes_raw"]
        assert found["chunk_misses"] == found["chunks"] == 3
        cases = {(case["case"], case["threads"]) for case in found["cases"]}
        assert cases >= set(itertools.product(("decoder alone", "H5Loader"), (1, 2)))
    assert tables.compressed_table(result).count("| H5Loader |") == 6


def test_foreign_benchmark(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, foreign, "--rows 90 --batch 16 --slow-rows 32 --repeats 1")
    assert list(result["files"]) == list(foreign.FILES)
    for found in result["files"].values():
        assert found["rows_compared"] == 90
        cases = {(case["when"], case["case"]) for case in found["cases"]}
        assert cases >= {("before", "H5Loader"), ("after", "H5Loader")}
        assert all(case["images_per_s"]["min"] > 0 for case in found["cases"])
    assert tables.foreign_table(result).count("| H5Loader |") == 4


def test_crops_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crops, "version", lambda _: version("not-installed"))
    result = run_benchmark(tmp_path, crops, "--count 6 --repeats 1")
    assert result["images"] == 6
    assert "nvidia-nvimgcodec-cu12" not in result["machine"]["packages"]
    assert result["checked"]["crops"] == result["checked"]["equal"] == 6
    for cases in result["threads"].values():
        assert cases[crops.CEILING]["of_ceiling"]["median"] == 1
        assert all(case["images_per_s"]["median"] > 0 for case in cases.values())


def test_several_benchmark(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, several, "--large 16 --small 64 --repeats 1")
    for sizes in result["sizes"].values():
        for cases in sizes["loading"].values():
            assert cases[several.ONE]["of_one"]["median"] == 1
            assert all(case["images_per_s"]["median"] > 0 for case in cases.values())
    copying = result["sizes"]["224"]["copying"]
    assert set(copying) == {"cp", "join", "append"}
    for found in copying.values():
        ratio = found["seconds"]["median"] / copying["cp"]["seconds"]["median"]
        assert found["of_cp"]["median"] == pytest.approx(ratio, rel=0.2)


def test_compare_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, codes = compare.run, set[str]()

    def once(checkout: Path, code: str, job: dict[str, Any]) -> float:
        # Each kind of job runs in one process; the other speeds are invented.
        first = code not in codes
        codes.add(code)
        return measured(checkout, code, job) if first else 100.0

    monkeypatch.setattr(compare, "run", once)
    sizes = "--large 20 --small 40 --images 12 --workers 1 --seconds 0 --repeats 1"
    result = run_benchmark(tmp_path, compare, f"{sizes} --against {compare.ROOT}")
    assert (len(codes), len(result["measurements"])) == (2, 5)
    for found in result["measurements"].values():
        speeds = found["this_per_s"]["median"], found["other_per_s"]["median"]
        assert min(speeds) > 0
        assert found["ratio"]["median"] == pytest.approx(speeds[0] / speeds[1], abs=1e-3)


def test_cluster_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WORKERS", (1,))
    result = run_benchmark(tmp_path, cluster, "--count 20 --repeats 1 --tasks 8 --rows 2000 --simulated 4")
    assert result["identical"]
    assert set(result["images_per_s"]) == {"local, 1 workers", "Dask, 1 workers"}
    assert [one["machines"] for one in result["simulation"]] == list(cluster.MACHINES)
    assert result["paper"]["write_tasks"] * result["task"]["rows_per_task"] >= 10**8
    assert tables.cluster_table(result).count("\n| ") == 3 + len(cluster.MACHINES)


def test_the_simulated_coordinator_limits_many_workers() -> None:
    few, many = (cluster.simulate(workers, 1.0, 0.001, 0.01, 40 * workers) for workers in (10, 1000))
    assert few["tasks_per_s"] == pytest.approx(10, rel=0.05)
    assert many["tasks_per_s"] == pytest.approx(100, rel=0.05)
    assert many["coordinator_busy"] == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_name_their_machine(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["machine"]["cpus"] >= 1
    assert result["machine"]["packages"]["h5pack"]
    assert result["command"].startswith("python -m benchmarks.")


def test_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with scratch_folder(Path("scratch")) as folder:
        assert folder.is_absolute(), "processes with another working directory use it"
    assert list(interleaved(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "repeats": 3}


def test_the_docs_show_the_committed_figures() -> None:
    texts = plots.all_tables({path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")})
    shown = set()
    for page in plots.pages():
        for name, text in re.findall(r"<!-- figures: (.*?) -->\n(.*?)\n<!-- end figures -->", page.read_text(), re.S):
            assert text == texts[name], (page, name)
            shown.add(name)
    assert shown <= set(texts)
    assert len(shown) > 10
