"""The benchmarks run, tiny, and their pictures are made from what they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import convert, plots
from benchmarks.common import RESULTS, interleaved, spread


def test_convert_benchmark(tmp_path: Path) -> None:
    convert.main(["--count", "60", "--repeats", "2", "--scratch", str(tmp_path), "--json", str(tmp_path / "c.json")])
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["images"] == 60
    assert set(result["ways"]) == {"pillow auto", "pillow buffered", "simplejpeg auto", "simplejpeg buffered"}
    assert [part["images"] for part in result["memory"]] == [15, 60]
    assert result["ways"]["pillow auto"]["ratio_to_last_write"]["repeats"] == 2
    plots.draw_convert(result, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.png"], "scratch is cleaned up"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_name_their_machine(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["machine"]["cpus"] >= 1
    assert result["machine"]["packages"]["h5pack"]
    assert result["command"].startswith("python -m benchmarks.")


def test_common() -> None:
    assert list(interleaved(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "repeats": 3}


def test_the_readme_shows_the_committed_figures() -> None:
    text = plots.convert_table(json.loads((RESULTS / "convert.json").read_text()))
    assert f"<!-- figures: convert -->\n{text}\n<!-- end figures -->" in (plots.ROOT / "README.md").read_text()
