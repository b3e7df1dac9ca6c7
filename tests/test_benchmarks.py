"""The benchmarks run on little data, and figures and tables are made from their results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chunk_size, compare, compressed, convert, foreign, plots, read, tables
from benchmarks.common import RESULTS
from h5pack.benchmark.bench import BenchRun
from h5pack.benchmark.ceilings import interleaved, spread
from tests.benchmark.files import StepClock
from tests.makers import class_folders


def test_convert_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = convert.peak_memory

    def peak_memory(folder: Path, out: Path, limit: int, workers: int) -> dict[str, float]:
        # One process is enough to see that it works.
        return measured(folder, out, limit, workers) if limit == 5 else {"images": limit, "parent_mb": 1.0}

    monkeypatch.setattr(convert, "peak_memory", peak_memory)
    few = ["--count", "20", "--repeats", "1", "--workers", "1"]
    convert.main([*few, "--scratch", str(tmp_path), "--json", str(tmp_path / "c.json")])
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["images"] == 20
    assert set(result["cases"]) == {"pillow auto", "pillow buffered", "simplejpeg auto", "simplejpeg buffered"}
    assert [part["images"] for part in result["memory"]] == [5, 20]
    assert result["memory"][0]["parent_mb"] > 10
    assert result["cases"]["pillow auto"]["ratio_to_last_write"]["repeats"] == 1
    plots.draw_convert(result, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.png"], "scratch is cleaned up"


def test_read_benchmark(tmp_path: Path) -> None:
    json_path = tmp_path / "r.json"
    sizes = ["--large", "40", "--small", "90"]
    read.main([*sizes, "--repeats", "2", "--scratch", str(tmp_path), "--json", str(json_path)])
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result["sizes"]) == ["116 KB", "3 KB"]
    for found, rows, batches in zip(result["sizes"].values(), (40, 90), ((20, 13), (45, 30)), strict=True):
        assert found["epoch"]["rows"] == rows
        assert found["epoch"]["chunk_misses"] == found["epoch"]["chunks"]
        assert found["epoch"]["amplification"] == 1.0
        cases = {(case["case"], case["threads"], case["batch"]) for case in found["hot"]}
        for threads in (1, 2):
            for batch in batches:
                assert {("memory copy", threads, batch), ("H5Loader", threads, batch)} <= cases
        assert ("H5Dataset with collate, DataLoader", 2, batches[0]) in cases
        assert all(case["images_per_s"]["min"] > 0 for case in found["hot"])
        assert next(case["case"] for case in found["cold"]["cases"]) == "sequential read"
    plots.draw_read(result, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert "H5Loader" in tables.cold_table(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.png"], "scratch is cleaned up"


def test_chunk_size_benchmark_and_its_settings_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock of its own, so that the time suffices on a busy machine.
    monkeypatch.setattr(BenchRun.__init__, "__kwdefaults__", {"progress": False, "clock": StepClock(step=0.05)})
    images, result = class_folders(tmp_path / "images", {"a": 50, "b": 50}, (64, 48)), tmp_path / "c.json"
    sizes = ["--chunk-rows", "4,16", "--batch-size", "16", "--seconds", "10"]
    chunk_size.main(["--images", str(images), *sizes, "--scratch", str(tmp_path), "--json", str(result)])
    found = json.loads(result.read_text())
    assert found["recommendation"]["variant"] in ("4 rows", "16 rows")
    assert str(tmp_path) not in result.read_text()
    command = ["--again", str(result), "--images", str(images), "--scratch", str(tmp_path), "--repeats", "2"]
    again = tmp_path / "again.json"
    once_more = chunk_size.main([*command, "--json", str(again)])
    assert json.loads(again.read_text()) == once_more
    assert set(once_more["images_per_s"]) == {"4 rows", "16 rows"}
    assert 0 < once_more["of_best"] <= 1
    assert {path.name for path in tmp_path.iterdir()} == {"again.json", "c.json", "images"}, "scratch is cleaned up"


def test_compressed_benchmark(tmp_path: Path) -> None:
    json_path = tmp_path / "c.json"
    sizes = ["--rows", "80", "--batch", "16"]
    compressed.main([*sizes, "--repeats", "2", "--scratch", str(tmp_path), "--json", str(json_path)])
    result = json.loads(json_path.read_text())
    assert list(result["compressions"]) == ["bitshuffle-lz4", "gzip", "zstd"]
    for found in result["compressions"].values():
        assert found["bytes_stored"] < found["bytes_raw"]
        assert found["chunk_misses"] == found["chunks"] == 3
        cases = {(case["case"], case["threads"]) for case in found["cases"]}
        assert cases >= {(case, threads) for case in ("decoder alone", "H5Loader") for threads in (1, 2)}
    assert tables.compressed_table(result).count("| H5Loader |") == 6
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"], "scratch is cleaned up"


def test_foreign_benchmark(tmp_path: Path) -> None:
    json_path = tmp_path / "f.json"
    sizes = ["--rows", "90", "--batch", "16", "--slow-rows", "32"]
    foreign.main([*sizes, "--repeats", "2", "--scratch", str(tmp_path), "--json", str(json_path)])
    result = json.loads(json_path.read_text())
    assert list(result["files"]) == list(foreign.FILES)
    for found in result["files"].values():
        assert found["rows_compared"] == 90
        assert {(case["when"], case["case"]) for case in found["cases"]} >= {
            ("before", "H5Loader"),
            ("after", "H5Loader"),
        }
        assert all(case["images_per_s"]["min"] > 0 for case in found["cases"])
    assert tables.foreign_table(result).count("| H5Loader |") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"], "scratch is cleaned up"


def test_compare_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, codes = compare.run, set[str]()

    def run(checkout: Path, code: str, job: dict[str, Any]) -> float:
        # Each kind of job runs in one process; the other speeds are invented.
        first = code not in codes
        codes.add(code)
        return measured(checkout, code, job) if first else 100.0

    monkeypatch.setattr(compare, "run", run)
    sizes = ["--large", "20", "--small", "40", "--images", "12", "--workers", "1", "--seconds", "0", "--repeats", "1"]
    options = ["--against", str(compare.ROOT), "--scratch", str(tmp_path), "--json", str(tmp_path / "c.json")]
    result = compare.main([*sizes, *options])
    assert len(codes) == 2
    assert len(result["measurements"]) == 7
    for found in result["measurements"].values():
        speeds = found["this_per_s"]["median"], found["other_per_s"]["median"]
        assert min(speeds) > 0
        assert found["ratio"]["median"] == pytest.approx(speeds[0] / speeds[1], abs=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"], "scratch is cleaned up"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_name_their_machine(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["machine"]["cpus"] >= 1
    assert result["machine"]["packages"]["h5pack"]
    assert result["command"].startswith("python -m benchmarks.")


def test_common() -> None:
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
