"""The figure of the stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from h5pack.doctor.plot import draw_stages
from h5pack.doctor.report import STAGE_TITLES
from h5pack.monitor.bottleneck import Stage, StageResult
from tests.doctor.test_report import report


def test_every_stage_has_a_bar_and_the_bottleneck_a_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    found = report()
    draw_stages(found, tmp_path / "a.png")
    axes = figures[0].axes[0]
    medians = [one.rates.median for one in found.stages if one.rates is not None]
    assert [label.get_text() for label in axes.get_yticklabels()] == [STAGE_TITLES[one.stage] for one in found.stages]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx(medians)
    color = axes.patches[ends.index(850)].get_facecolor()
    assert [end for end, bar in zip(ends, axes.patches, strict=True) if bar.get_facecolor() == color] == [850]
    words = [text.get_text() for text in axes.texts]
    assert "850   bottleneck" in words
    assert sum("it is not there" in word for word in words) == len(found.stages) - len(medians)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 800
    # A report that was interrupted at once.
    empty = tuple(StageResult(stage, reason="late") for stage in Stage)
    draw_stages(replace(found, verdict=None, evidence=None, stages=empty), tmp_path / "a.svg")
    assert len(figures[1].axes[0].patches) == 0
