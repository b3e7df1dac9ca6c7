"""The benchmarks of mixing run, tiny; the mixing page shows their committed figures, and its code runs."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import h5pack
from benchmarks import accuracy, mixing, plots, tables
from benchmarks.common import RESULTS
from h5pack.benchmark.mixing import mixing_report
from h5pack.order.window import DEFAULT_WINDOW
from tests.makers import run_benchmark

PAGE = plots.ROOT / "docs" / "mixing.md"


def size_of(picture: Path) -> tuple[int, int]:
    """Pixels of a picture that is not one color."""
    with Image.open(picture) as image:
        assert len(image.convert("L").getcolors() or ()) > 10
        return image.size


def test_mixing_benchmark(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, mixing, "--rows 600 --chunk-rows 20 --batch 50 --epochs 4")
    shuffled, by_class = result["packs"]["shuffled"], result["packs"]["sorted"]
    for report in (shuffled, by_class):
        assert (report["rows"], report["chunks"], report["batch_size"], report["epochs"]) == (600, 30, 50, 4)
        assert [order["window"] for order in report["orders"]] == [1, 2, 4, 8, 16, 30, None, None]
    # In stored order the sorted pack's batches have one class or two; 60 rows a class.
    stored = [report["orders"][-1]["label_distance"] for report in (shuffled, by_class)]
    assert stored[0] < 0.3 < 0.8 < stored[1]
    assert shuffled["expected_distance"] == by_class["expected_distance"]
    assert by_class["orders"][0]["label_distance"] > 2 * shuffled["orders"][0]["label_distance"]
    plots.draw_mixing(result, tmp_path / "m.png")
    assert size_of(tmp_path / "m.png") == (1080, 630)
    assert tables.mixing_table(result).count("| window=") == 6


def test_packs_of_the_mixing_benchmark_differ_in_order_alone() -> None:
    source = mixing.ClassSource(40, 4, 4)
    assert [source[row][1] for row in range(40)] == [row // 4 for row in range(40)]
    with pytest.raises(IndexError):
        source[40]


def test_accuracy_benchmark(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, accuracy, "--count 128 --seeds 2 --epochs 1 --batch 16 --chunk-rows 4")
    assert (result["train_images"], result["test_images"], result["classes"], result["steps"]) == (128, 64, 4, 8)
    assert (result["chunks"], result["chunk_rows"], result["training"]["window"]) == (32, 4, DEFAULT_WINDOW)
    arms = {(arm["pack"], arm["shuffle"]): arm for arm in result["arms"]}
    assert set(arms) == {(order, shuffle) for order in ("shuffled", "sorted") for shuffle in ("full", "window")}
    for arm in arms.values():
        assert arm["mean"] == pytest.approx(np.mean(arm["accuracy"]), abs=1e-6)
        assert arm["deviation"] == pytest.approx(np.std(arm["accuracy"], ddof=1), abs=1e-6)
    gap = result["differences"][1]
    assert (gap["of"], gap["less"]) == ("sorted window", "sorted full")
    pairs = zip(arms["sorted", "window"]["accuracy"], arms["sorted", "full"]["accuracy"], strict=True)
    assert gap["mean"] == pytest.approx(np.mean([one - other for one, other in pairs]), abs=1e-6)
    plots.draw_accuracy(result, tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == (1080, 600)
    assert "| sorted | window=16 |" in tables.accuracy_table(result)


@pytest.fixture(scope="module")
def gratings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packs of both orders, of generated images."""
    folder = tmp_path_factory.mktemp("gratings")
    return accuracy.packed(accuracy.generated(folder / "images", 320), folder, 8)


def test_the_generated_images_are_learnt(gratings: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    training = accuracy.Training(5, 32, DEFAULT_WINDOW, 0.1)
    score = accuracy.accuracy(accuracy.train(gratings["shuffled"], "window", 0, training), gratings["shuffled"], "test")
    assert 0.5 < score <= 1.0, "0.25 is chance"


def flat(model: torch.nn.Module) -> torch.Tensor:
    """A copy of all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_arms_differ_in_their_order_alone(gratings: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    training = accuracy.Training(1, 40, 2, 0.1)
    orders: list[dict[str, Any]] = []
    firsts: list[torch.Tensor] = []
    make_loader, make_network = h5pack.H5Loader, accuracy.network

    def loader(dataset: Any, batch: int, **options: Any) -> Any:
        orders.append({"batch": batch, **options})
        return make_loader(dataset, batch, **options)

    def network(classes: int) -> Any:
        model = make_network(classes)
        firsts.append(flat(model))
        return model

    monkeypatch.setattr(h5pack, "H5Loader", loader)
    monkeypatch.setattr(accuracy, "network", network)
    models = [accuracy.train(gratings["sorted"], shuffle, 3, training) for shuffle in ("full", "window", "full")]
    lasts = [flat(model) for model in models]
    assert torch.equal(firsts[0], firsts[1])
    assert torch.equal(lasts[0], lasts[2])
    assert not torch.equal(lasts[0], lasts[1])
    assert orders[1] == {**orders[0], "shuffle": "window", "window": 2}


def test_the_committed_runs_are_what_the_page_says() -> None:
    figures, runs = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("mixing", "accuracy"))
    shuffled, by_class = figures["packs"]["shuffled"], figures["packs"]["sorted"]
    assert shuffled["enough_window"] <= DEFAULT_WINDOW == figures["default_window"] == runs["training"]["window"]
    assert by_class["enough_window"] == by_class["chunks"], "only the window of all chunks will do"
    for report in (shuffled, by_class):
        full = report["orders"][-2]
        assert full["label_distance"] == pytest.approx(report["expected_distance"], abs=4 * full["standard_error"])
    window, sorted_window, luck = runs["differences"]
    assert abs(window["mean"]) < 2 * window["standard_error"] + abs(luck["mean"])
    assert sorted_window["mean"] < -4 * sorted_window["standard_error"]
    assert runs["chunks"] > 9 * runs["training"]["window"], "the window is a tenth of the pack"


def test_the_rule_of_thumb_of_the_page() -> None:
    report = json.loads((RESULTS / "mixing.json").read_text())["packs"]["sorted"]
    batch, chunks = report["batch_size"], report["chunks"]
    for order in report["orders"]:
        if order["window"] is not None and order["window"] >= 8:
            rule = (1 + batch / order["window"] * (1 - order["window"] / chunks)) ** 0.5
            assert order["label_distance"] / report["expected_distance"] == pytest.approx(rule, rel=0.1)


def test_every_option_of_the_report_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert rows == list(inspect.signature(mixing_report).parameters)
