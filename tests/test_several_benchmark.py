"""The benchmark of several packs runs, tiny."""

from __future__ import annotations

from pathlib import Path

from benchmarks import several
from tests.makers import run_benchmark


def test_several_benchmark(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, several, "--large 16 --small 64 --repeats 1")
    for sizes in result["sizes"].values():
        for cases in sizes["loading"].values():
            assert cases[several.ONE]["of_one"]["median"] == 1
            assert all(case["images_per_s"]["median"] > 0 for case in cases.values())
    assert set(result["sizes"]["224"]["copying"]) == {"cp", "join", "append"}
