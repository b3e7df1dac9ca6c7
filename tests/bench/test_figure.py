"""The picture of a bench: what is drawn is what was measured, in files that are whole."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from h5pack.bench import figure
from h5pack.bench.report import BenchReport, Ceiling
from h5pack.errors import OptionsError
from tests.bench import reports

ROW = 116_412


def panels_of(report: BenchReport) -> list[Any]:
    return [axes for axes in figure._draw(report).axes if axes.axison]


def lines_of(panel: Any) -> dict[str, dict[float, float]]:
    """Medians by label and place, of all lines that belong to one label."""
    found: dict[str, dict[float, float]] = {}
    for container in panel.containers:
        line = container.lines[0]
        points = zip(line.get_xdata(), line.get_ydata(), strict=True)
        found.setdefault(container.get_label(), {}).update(points)
    return found


def texts_of(panel: Any) -> list[str]:
    return [text.get_text() for text in panel.texts]


def medians(report: BenchReport, order: str, engine: str, cache: str) -> list[float]:
    trials = {one.cell: one for one in report.trials}
    cells = ((one.cell, one.settled_by(trials.get(one.cell)).median) for one in report.measurements)
    return sorted(
        median for cell, median in cells if (cell.order, cell.engine, cell.cache) == (order, engine, cache) and median
    )


def test_each_line_has_the_medians_of_its_way_for_hot_and_cold() -> None:
    report = reports.foreign_report()
    hot, cold = panels_of(report)
    for panel, cache in ((hot, "hot"), (cold, "cold")):
        drawn = {label: sorted(points.values()) for label, points in lines_of(panel).items()}
        assert drawn == {
            "direct: window shuffle": medians(report, "window", "direct", cache),
            "direct: sequential": medians(report, "sequential", "direct", cache),
            "direct: full shuffle": medians(report, "full", "direct", cache),
            "direct: one index a call (H5Dataset)": medians(report, "single", "direct", cache),
            "h5py, tuned chunk cache: window shuffle": medians(report, "window", "tuned", cache),
            "plain h5py: one index a call": medians(report, "single", "default", cache),
        }
        assert panel.get_ylim()[0] == 0
        assert panel.get_ylabel() == "images/s"
        assert panel.get_xlabel() == "chunk: rows, and bytes (logarithmic)"
    assert hot.get_title(loc="left") == "file in the page cache (hot)"
    assert cold.get_title(loc="left") == "file dropped from the page cache (cold)"


def test_only_chunks_are_joined_by_lines() -> None:
    (panel, _) = panels_of(reports.foreign_report())
    window = [one.lines[0].get_xdata() for one in panel.containers if one.get_label() == "direct: window shuffle"]
    assert sorted(map(len, window)) == [1, 1, 5]


def test_whiskers_reach_from_the_slowest_to_the_fastest_repeat() -> None:
    report = reports.empty()
    report.files = [reports.packed(36, ROW)]
    one = reports.measured(report.files[0], "window", "direct", "hot")
    report.measurements = [dataclasses.replace(one, speeds=(900.0, 1000.0, 1300.0))]
    (panel,) = panels_of(report)
    ((lower, upper),) = panel.containers[0].lines[2][0].get_segments()
    assert (lower[1], upper[1]) == pytest.approx((900, 1300))
    assert panel.get_ylim()[1] >= 1300


def test_what_failed_is_not_drawn() -> None:
    report = reports.empty()
    report.files = [reports.packed(rows, ROW) for rows in (1, 9, 36)]
    report.measurements = [
        reports.measured(report.files[0], "window", "direct", "hot", 10.0),
        reports.failed(report.files[1], "window", "direct", "hot"),
        reports.measured(report.files[2], "window", "direct", "hot", 30.0),
        *(reports.failed(stored, "full", "direct", "hot") for stored in report.files),
        *(reports.failed(stored, "window", "direct", "cold") for stored in report.files),
    ]
    (panel,) = panels_of(report)
    assert {label: list(points.values()) for label, points in lines_of(panel).items()} == {
        "direct: window shuffle": [10.0, 30.0]
    }


def test_the_recommended_chunks_are_marked_and_named() -> None:
    report = reports.folder_report()
    hot, cold = panels_of(report)
    (star,) = (line for line in hot.lines if line.get_marker() == "*")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (pytest.approx(np.log2(36 * ROW)), 76_210.0)
    assert "recommended: 36 rows\n76.2k images/s" in texts_of(hot)
    assert not [line for line in cold.lines if line.get_marker() == "*"]
    bold = [tick.get_text() for tick in hot.get_xticklabels() if tick.get_fontweight() == "bold"]
    assert bold == ["36 rows\n4 MiB"]
    report.recommendation = reports.recommended(report.files[3], sure=False)
    assert "perhaps: 36 rows\n76.2k images/s" in texts_of(panels_of(report)[0])


def test_a_recommended_compressed_form_is_marked_at_its_bytes() -> None:
    report = reports.folder_report()
    packed = reports.packed(36, ROW, "gzip")
    report.files.append(packed)
    report.recommendation = reports.recommended(packed, 30_000.0)
    (star,) = (line for line in panels_of(report)[0].lines if line.get_marker() == "*")
    assert star.get_xdata()[0] == pytest.approx(np.log2(36 * ROW))


def test_what_is_recommended_without_being_listed_is_not_marked() -> None:
    report = reports.folder_report()
    report.recommendation = reports.recommended(reports.packed(7, ROW))
    assert not [line for panel in panels_of(report) for line in panel.lines if line.get_marker() == "*"]


def test_the_highest_ceiling_of_each_kind_is_a_line_and_one_far_above_a_word() -> None:
    report = reports.small_report()
    report.ceilings = [Ceiling("memory copy", 1, "hot", (1.8e6,)), Ceiling("memory copy", 2, "hot", (2.7e6,))]
    (panel,) = panels_of(report)
    assert "ceiling: memory copy, 2 threads: 2.70M" in texts_of(panel)
    # Lines from one side to the other.
    assert [line.get_ydata()[0] for line in panel.lines if list(line.get_xdata()) == [0, 1]] == [2.7e6]
    report.ceilings = [Ceiling("memory copy", 2, "hot", (2.7e7,)), Ceiling("sequential read", 1, "cold", (5.0,))]
    (panel,) = panels_of(report)
    assert [text for text in texts_of(panel) if "ceiling" in text] == ["↑ ceiling: memory copy, 2 threads: 27.0M"]
    assert panel.get_ylim()[1] < 3e6


def test_the_title_is_the_sentence_and_the_foot_the_subject() -> None:
    whole = figure._draw(reports.folder_report())
    (upper, below) = whole.subfigs
    title = upper._suptitle.get_text().replace("\n", " ")
    assert title.startswith("Chunks of 36 rows (4 MiB) give 76,200 images/s in shuffled batches on this machine, ")
    assert below.texts[0].get_text().startswith("/data/celebA: 202,599 images\nrows of 218 x 178 x 3 (114 KiB), sample")


@pytest.mark.parametrize("make", [reports.folder_report, reports.small_report, reports.foreign_report])
def test_nothing_is_cut_off_and_the_legend_covers_no_panel(make: Any) -> None:
    whole: Figure = figure._draw(make())
    FigureCanvasAgg(whole).draw()
    width, height = whole.bbox.width, whole.bbox.height
    upper, below = whole.subfigs
    (legend,) = upper.legends
    boxes = [legend.get_window_extent(), upper._suptitle.get_window_extent(), below.texts[0].get_window_extent()]
    for panel in whole.axes:
        ticks = [tick for tick in panel.get_xticklabels() if tick.get_text()]
        names = [tick.get_window_extent() for tick in ticks]
        assert not any(one.overlaps(other) for one, other in pairwise(names))
        boxes += [*names, *(text.get_window_extent() for text in panel.texts), panel.get_tightbbox()]
        assert not legend.get_window_extent().overlaps(panel.get_tightbbox())
    for box in boxes:
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= width + 1
        assert box.y1 <= height + 1


# Files.


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_says_of_which_kind(tmp_path: Path, suffix: str, begin: bytes) -> None:
    path = tmp_path / f"bench{suffix}"
    path.write_bytes(b"old")
    figure.draw_bench(reports.small_report(), path)
    first = path.read_bytes()
    assert first.startswith(begin)
    figure.draw_bench(reports.small_report(), path)
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == [path.name]


def test_a_png_is_a_picture_of_some_size(tmp_path: Path) -> None:
    figure.draw_bench(reports.foreign_report(), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1500
        assert len(np.unique(np.asarray(image.convert("L")))) > 20


@pytest.mark.parametrize("name", ["bench.jpg", "bench", ".png"])
def test_other_suffixes_are_refused_before_anything_is_drawn(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionsError, match=r"is no kind of picture; end it in \.png, \.svg or \.pdf"):
        figure.draw_bench(reports.empty(), tmp_path / name)
    with pytest.raises(OptionsError, match="is no kind of picture"):
        figure.require_plottable(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    for call in (
        figure.require_matplotlib,
        lambda: figure.require_plottable("a.png"),
        lambda: figure.draw_bench(reports.empty(), tmp_path / "a.png"),
        lambda: figure.svg_figure(reports.empty()),
    ):
        with pytest.raises(OptionsError, match=r"pip install 'h5pack\[plot\]'"):
            call()
    assert os.listdir(tmp_path) == []


def test_with_matplotlib_nothing_is_refused_nor_imported() -> None:
    code = (
        "import sys; from h5pack.bench import figure; figure.require_plottable('a.svg'); "
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_and_state_of_matplotlib_stay_as_they_were(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "figure.figsize": (1, 1)}):
        figure.draw_bench(reports.small_report(), tmp_path / "styled.png")
    figure.draw_bench(reports.small_report(), tmp_path / "plain.png")
    assert (tmp_path / "styled.png").read_bytes() == (tmp_path / "plain.png").read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_no_backend_is_chosen_for_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; from h5pack.bench import figure; from tests.bench import reports; "
        f"figure.draw_bench(reports.empty(), {str(tmp_path / 'a.png')!r}); "
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_names_of_others_are_only_text(tmp_path: Path) -> None:
    report = reports.empty()
    report.subject = "/data/$\\frac{a$ 画像" + "/ä" * 100 + "\x1b[31m\udc80<script>-->"
    figure.draw_bench(report, tmp_path / "odd.png")
    drawn = figure.svg_figure(report)
    assert "<script" not in drawn


def test_an_svg_is_one_element_without_comments_and_links() -> None:
    drawn = figure.svg_figure(reports.small_report())
    assert drawn.startswith("<svg")
    assert drawn.endswith("</svg>")
    assert "<!--" not in drawn
    assert "<metadata" not in drawn
    assert "<text" not in drawn
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")


def test_a_report_without_figures_is_drawn_too(tmp_path: Path) -> None:
    whole = figure._draw(reports.empty())
    assert [text.get_text() for axes in whole.axes for text in axes.texts] == ["nothing was measured"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"none/a\.png: No such file or directory; name a file"):
        figure.draw_bench(reports.small_report(), tmp_path / "none" / "a.png")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (500, "500"), (1_000, "1k"), (80_000, "80k"), (100_000, "100k"), (1_500_000, "1.5M"), (2_000_000, "2M")],
)
def test_ticks_keep_their_zeros_before_the_point(value: float, text: str) -> None:
    assert figure._scale_text(value) == text
