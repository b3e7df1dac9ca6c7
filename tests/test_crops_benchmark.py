"""The benchmark of crops runs, tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import crops
from tests.makers import run_benchmark


def test_crops_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg", reason="pip install simplejpeg")
    result = run_benchmark(tmp_path, crops, "--count 6 --repeats 1")
    assert result["images"] == 6
    assert result["checked"]["crops"] == result["checked"]["equal"] == 6
    for cases in result["threads"].values():
        assert cases[crops.CEILING]["of_ceiling"]["median"] == 1
        assert all(case["images_per_s"]["median"] > 0 for case in cases.values())
