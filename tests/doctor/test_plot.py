"""The figure of the stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from h5pack.doctor.plot import draw_stages
from h5pack.doctor.report import STAGE_TITLES, DoctorReport
from tests.doctor.test_report import report


def drawn(monkeypatch: pytest.MonkeyPatch, found: DoctorReport, path: Path) -> Any:
    """The figure that was saved."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    draw_stages(found, path)
    return figures[0]


def test_every_stage_has_a_bar_and_the_bottleneck_a_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report()
    figure = drawn(monkeypatch, found, tmp_path / "a.png")
    axes = figure.axes[0]
    medians = [one.rates.median for one in found.stages if one.rates is not None]
    assert [label.get_text() for label in axes.get_yticklabels()] == [STAGE_TITLES[one.stage] for one in found.stages]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx(medians)
    color = axes.patches[ends.index(850)].get_facecolor()
    assert [end for end, bar in zip(ends, axes.patches, strict=True) if bar.get_facecolor() == color] == [850]
    words = [text.get_text() for text in axes.texts]
    assert "850   bottleneck" in words
    assert sum("it is not there" in word for word in words) == len(found.stages) - len(medians)
    assert figure.get_suptitle().startswith("The bottleneck is the loader")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 800
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_an_interrupted_report_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(report(), verdict=None, evidence=None)
    found = replace(found, stages=tuple(replace(one, rates=None, reason="late") for one in found.stages))
    assert len(drawn(monkeypatch, found, tmp_path / "a.svg").axes[0].patches) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
