"""The bench's figure shows what was measured; files are written whole."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from h5pack.benchmark import plots
from h5pack.benchmark.cases import Ceiling, SweepTable
from h5pack.benchmark.report import BenchReport
from h5pack.errors import OptionsError
from tests.benchmark import reports


def panels_of(report: BenchReport) -> list[Any]:
    return [axes for axes in plots.bench_figure(report).axes if axes.axison]


def lines_of(panel: Any) -> dict[str, list[float]]:
    """Medians by label, of all lines that belong to one label."""
    found: dict[str, list[float]] = {}
    for container in panel.containers:
        found.setdefault(container.get_label(), []).extend(container.lines[0].get_ydata())
    return {label: sorted(values) for label, values in found.items()}


def medians(report: BenchReport, order: str, engine: str, cache: str) -> list[float]:
    table = SweepTable(report.measurements, report.variants, report.run_off)
    found = (table.found(one.label, order, engine, cache) for one in report.variants)
    return sorted(one.median for one in found if one is not None)


def stars_of(panel: Any) -> list[tuple[float, float]]:
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in panel.lines if line.get_marker() == "*"]


def test_each_line_has_the_medians_of_its_order_and_engine() -> None:
    report = reports.file_report()
    shown = {
        "direct: window shuffle": ("window", "direct"), "direct: sequential": ("sequential", "direct"),
        "direct: full shuffle": ("full", "direct"), "direct: one index a call": ("single", "direct"),
        "h5py, tuned chunk cache: window": ("window", "tuned"), "plain h5py: single": ("single", "default"),
    }  # fmt: skip
    for panel, cache in zip(panels_of(report), ("hot", "cold"), strict=True):
        assert lines_of(panel) == {label: medians(report, *names, cache) for label, names in shown.items()}
        assert panel.get_ylim()[0] == 0
        assert f"({cache})" in panel.get_title(loc="left")


def small_report(*speeds: float) -> BenchReport:
    """A report of two variants, which is quick to draw; with speeds, of one variant with these repeats."""
    report = reports.empty()
    report.variants = [reports.packed(rows) for rows in ((36,) if speeds else (9, 36))]
    report.measurements = [reports.measured(one, "window", "direct", "hot") for one in report.variants]
    if speeds:
        report.measurements = [dataclasses.replace(report.measurements[0], speeds=speeds)]
    return report


def test_only_chunk_sizes_are_joined_by_lines() -> None:
    panel = panels_of(reports.file_report())[0]
    window = [one.lines[0].get_xdata() for one in panel.containers if one.get_label() == "direct: window shuffle"]
    assert sorted(map(len, window)) == [1, 1, 5]


def test_whiskers_reach_from_the_slowest_to_the_fastest_repeat() -> None:
    report = small_report(900.0, 1000.0, 1300.0)
    (panel,) = panels_of(report)
    ((lower, upper),) = panel.containers[0].lines[2][0].get_segments()
    assert (lower[1], upper[1]) == pytest.approx((900, 1300))
    assert panel.get_ylim()[1] >= 1300


def test_failed_cases_are_not_drawn() -> None:
    report = small_report()
    first, second = report.variants
    report.measurements = [
        reports.measured(first, "window", "direct", "hot", 10.0), reports.failed(second, "window", "direct", "hot"),
        reports.failed(first, "full", "direct", "hot"), reports.failed(first, "window", "direct", "cold"),
    ]  # fmt: skip
    (panel,) = panels_of(report)
    assert lines_of(panel) == {"direct: window shuffle": [10.0]}


def test_the_recommended_variant_is_marked() -> None:
    hot, cold = panels_of(reports.folder_report())
    assert (stars_of(hot), stars_of(cold)) == ([(3, 76_210.0)], [])
    bold = [tick.get_text() for tick in hot.get_xticklabels() if tick.get_fontweight() == "bold"]
    assert bold == ["36 rows\n4 MiB"]
    report = reports.folder_report()
    report.recommendation = reports.recommended(reports.packed(7))
    assert not any(map(stars_of, panels_of(report)))


def test_a_ceiling_is_a_line_and_one_far_above_only_a_word() -> None:
    report = reports.folder_report()
    report.ceilings = [Ceiling("memory copy", 1, "hot", (58e3,)), Ceiling("memory copy", 2, "hot", (90e3,))]
    panel = panels_of(report)[0]
    assert [line.get_ydata()[0] for line in panel.lines if list(line.get_xdata()) == [0, 1]] == [90e3]
    report.ceilings = [Ceiling("memory copy", 2, "hot", (9e6,))]
    panel = panels_of(report)[0]
    assert [text.get_text() for text in panel.texts] == ["↑ memory copy, 2 threads: 9.00M"]
    assert panel.get_ylim()[1] < 1e6


@pytest.mark.parametrize("count", [1, 30])
def test_nothing_is_cut_off_and_names_do_not_touch(count: int) -> None:
    report = reports.file_report()
    report.variants = [reports.as_it_is(), *(reports.packed(rows) for rows in range(1, count + 1))]
    report.measurements = reports.sweep(report.variants)
    figure: Figure = plots.bench_figure(report)
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    boxes = [legend.get_window_extent()]
    for panel in figure.axes:
        ticks = [tick for tick in panel.get_xticklabels() if tick.get_text()]
        names = [tick.get_window_extent() for tick in ticks]
        assert not any(one.overlaps(other) for one, other in pairwise(names))
        assert not legend.get_window_extent().overlaps(panel.get_tightbbox())
        boxes += [*names, panel.get_tightbbox()]
    for box in boxes:
        assert -1 <= box.x0 <= box.x1 <= figure.bbox.width + 1
        assert -1 <= box.y0 <= box.y1 <= figure.bbox.height + 1


def test_a_report_without_measurements_is_drawn() -> None:
    figure = plots.bench_figure(reports.empty())
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["nothing was measured"]


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_is_the_format_and_equal_reports_give_equal_files(tmp_path: Path, suffix: str, begin: bytes) -> None:
    path = tmp_path / f"bench{suffix}"
    path.write_bytes(b"old")
    plots.draw_bench(small_report(), path)
    first = path.read_bytes()
    assert first.startswith(begin)
    plots.draw_bench(small_report(), path)
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == [path.name]


def test_the_figure_behind_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "a.png").symlink_to("far/figure")
    plots.check_plot_file(tmp_path / "a.png")
    plots.draw_bench(reports.empty(), tmp_path / "a.png")
    assert (tmp_path / "a.png").is_symlink()
    assert (tmp_path / "far/figure").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["bench.jpg", "bench", ".png", "none/a.png", "loop.png", "nowhere.png"])
def test_files_that_cannot_be_drawn_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "nowhere.png").symlink_to("none/a.png")
    with pytest.raises(OptionsError) as caught:
        plots.check_plot_file(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


@pytest.mark.parametrize("error", [ModuleNotFoundError, OSError])
def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=error("matplotlib")))
    with pytest.raises(OptionsError, match="pip install matplotlib"):
        plots.check_plot_file(tmp_path / "a.png")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OptionsError):
        plots.draw_bench(reports.empty(), path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.png"]


def test_settings_of_matplotlib_stay_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Reading rcParams imports pyplot if no backend is set.
    before = dict(matplotlib.rcParams)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "figure.figsize": (1, 1)}):
        plots.draw_bench(small_report(), tmp_path / "styled.png")
    plots.draw_bench(small_report(), tmp_path / "plain.png")
    assert (tmp_path / "styled.png").read_bytes() == (tmp_path / "plain.png").read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_paths_are_drawn_as_plain_text(tmp_path: Path) -> None:
    report = reports.empty()
    report.source = "/data/$\\frac{a$ 画像" + "/ä" * 100 + "\x1b[31m\udc80<script>"
    plots.draw_bench(report, tmp_path / "odd.svg")
    assert "<script" not in (tmp_path / "odd.svg").read_text()
