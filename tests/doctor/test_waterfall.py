"""The picture: what is in it, and what keeps it from being drawn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from h5pack.doctor.waterfall import draw, guilty_stages, require_plot
from h5pack.errors import OptionsError
from tests.doctor.figures import facts
from tests.doctor.test_text import diagnosis


def drawn(monkeypatch: pytest.MonkeyPatch, found: Any, path: Path) -> Any:
    """The axes of what was drawn."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    draw(found, path)
    return figures[0]


def test_a_bar_for_each_stage_and_the_bottleneck_in_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosis()
    figure = drawn(monkeypatch, found, tmp_path / "a.png")
    axes = figure.axes[0]
    measured = [stage for stage in found.stages if stage.rates is not None]
    assert [label.get_text() for label in axes.get_yticklabels()] == [stage.name for stage in found.stages]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx([stage.rates.median for stage in measured])
    red = [bar for bar in axes.patches if bar.get_facecolor() == axes.patches[ends.index(850)].get_facecolor()]
    assert [bar.get_x() + bar.get_width() for bar in red] == [850]
    words = [text.get_text() for text in axes.texts]
    assert "850   bottleneck" in words
    assert sum("not measured: it is not there" in word for word in words) == len(found.stages) - len(measured)
    assert figure.get_suptitle().startswith("The bottleneck is the loader")
    assert "images/s" in axes.get_xlabel()
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 800
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_where_the_bottleneck_shows() -> None:
    found = diagnosis()
    assert guilty_stages(found) == {"loader"}
    storage = replace(found, verdict=replace(found.verdict, bottleneck=("storage", "copy")))  # type: ignore[type-var]
    assert guilty_stages(storage) == {"storage_hot", "copy"}
    assert guilty_stages(replace(storage, facts=facts(fits_cache=False))) == {"storage_cold", "copy"}
    decoding = replace(found, verdict=replace(found.verdict, bottleneck=("decoding",)))  # type: ignore[type-var]
    assert guilty_stages(decoding) == {"storage_hot"}
    assert guilty_stages(replace(found, verdict=None)) == set()


def test_an_interrupted_one_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(diagnosis(), verdict=None, facts=None)
    found = replace(found, stages=tuple(replace(stage, rates=None, reason="late") for stage in found.stages))
    figure = drawn(monkeypatch, found, tmp_path / "a.svg")
    assert figure.get_suptitle() == "Interrupted: no verdict"
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_what_keeps_a_picture_from_being_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionsError, match="there is no folder"):
        require_plot(tmp_path / "no" / "a.png")
    with pytest.raises(OptionsError, match="its ending is none of"):
        require_plot(tmp_path / "a.docx")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OptionsError, match="cannot be written"):
        draw(diagnosis(), tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionsError, match=r"pip install 'h5pack\[plot\]'"):
        require_plot(tmp_path / "b.png")
