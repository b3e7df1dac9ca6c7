"""The examples of transforms on the device: MixUp, CutMix, two views and segmentation. Each learns something."""

from __future__ import annotations

import math
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import h5pack
from h5pack.data.draws import BatchKey
from h5pack.device.transforms import uniform
from tests.makers import color_folders

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def path_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Examples import each other as scripts do. One thread and no processes are quickest for work of this size."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(h5pack, "convert", partial(h5pack.convert, num_workers=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in ("mixup", "two_views", "segment", "detect", "networks"):
        sys.modules.pop(name, None)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    h5pack.convert(color_folders(tmp_path / "in", {"train": 192}, 80), tmp_path / "o.h5", chunk_rows=8)
    return tmp_path / "o.h5"


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_batches_teach(pack: Path, kind: str) -> None:
    import mixup

    losses = mixup.train(str(pack), kind, epochs=3)
    # Without learning, the loss of three classes is log(3).
    assert losses[-1] < losses[0]
    assert losses[-1] < 0.95 * math.log(3)


Batch = namedtuple("Batch", "images labels rows")


def batch_of(rows: torch.Tensor) -> Batch:
    """Images in which each pixel is the number of the row."""
    return Batch(rows.float().reshape(-1, 1, 1, 1).expand(len(rows), 3, 40, 30).clone(), rows % 4, rows)


def test_mixup_blends_images_and_labels_alike() -> None:
    import mixup

    mix = mixup.MixUp(4, alpha=0.4, seed=3)
    rows = torch.arange(1, 4001)
    labels = rows % 4
    mixed, soft, same = mix(batch_of(rows), BatchKey(rows, 2))
    share = mix.shares(uniform(BatchKey(rows, 2), 3, 1)[:, 0])
    torch.testing.assert_close(mixed[:, 0, 0, 0], share * rows + (1 - share) * rows.roll(1))
    expected = torch.zeros(len(rows), 4)
    expected[torch.arange(len(rows)), labels] += share
    expected[torch.arange(len(rows)), labels.roll(1)] += 1 - share
    torch.testing.assert_close(soft, expected)
    assert torch.equal(same, rows)
    # The share belongs to the sample: it is the same in another batch.
    part = mix.shares(uniform(BatchKey(rows[100:103], 2), 3, 1)[:, 0])
    assert torch.equal(part, share[100:103])
    assert not torch.equal(mix.shares(uniform(BatchKey(rows, 3), 3, 1)[:, 0]), share)


@pytest.mark.parametrize("alpha", [0.2, 0.4, 1.0, 2.0])
def test_shares_are_beta_distributed(alpha: float) -> None:
    import mixup

    quantiles = mixup.beta_quantiles(alpha).double()
    assert len(quantiles) == 4096
    # The distribution function of Beta(alpha, alpha), by quadrature in the middle, away from its poles.
    grid = torch.linspace(0.05, 0.95, 200_001, dtype=torch.float64)
    density = torch.exp((alpha - 1) * (grid.log() + (1 - grid).log()) + math.lgamma(2 * alpha) - 2 * math.lgamma(alpha))
    within = torch.trapezoid(density, grid).item()
    assert ((quantiles > 0.05) & (quantiles < 0.95)).double().mean().item() == pytest.approx(within, abs=1e-3)
    assert quantiles.mean().item() == pytest.approx(0.5, abs=1e-6)
    assert quantiles.var(correction=0).item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=2e-3)


def test_cutmix_replaces_a_box_and_as_much_of_the_label() -> None:
    import mixup

    cut = mixup.CutMix(4, alpha=1.0, seed=3)
    rows = torch.arange(1, 301)
    labels = rows % 4
    mixed, soft, _ = cut(batch_of(rows), BatchKey(rows, 2))
    own = (mixed[:, 0] == rows[:, None, None]).float()
    assert torch.equal(1 - own, (mixed[:, 0] == rows.roll(1)[:, None, None]).float())
    share = own.mean((1, 2))
    assert 0.3 < share.mean() < 0.7
    for box in 1 - own:
        height, width = box.any(1).sum(), box.any(0).sum()
        assert box.sum() == height * width
    different = labels != labels.roll(1)
    torch.testing.assert_close(soft[torch.arange(300), labels][different], share[different])
    torch.testing.assert_close(soft.sum(1), torch.ones(300))


@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_images_must_be_normalized_before_they_are_mixed(kind: str) -> None:
    import mixup

    rows = torch.arange(4)
    batch = Batch(torch.zeros(4, 40, 30, 3, dtype=torch.uint8), rows, rows)
    with pytest.raises(TypeError, match="put Normalize before"):
        getattr(mixup, kind)(4)(batch, BatchKey(rows, 0))


def test_two_views_teach_without_labels(pack: Path) -> None:
    import two_views

    losses = two_views.train(str(pack), epochs=4)
    assert losses[-1] < losses[0] - 0.1


def test_the_contrastive_loss_is_that_of_its_formula() -> None:
    import two_views

    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(5, 7, generator=random, dtype=torch.float64) for _ in range(2))
    features = [one / one.norm() for one in (*first, *second)]
    total = 0.0
    for i, one in enumerate(features):
        others = [math.exp(float(one @ other) / 0.5) for k, other in enumerate(features) if k != i]
        total -= math.log(math.exp(float(one @ features[(i + 5) % 10]) / 0.5) / sum(others))
    assert two_views.contrastive_loss(first, second).item() == pytest.approx(total / 10)


def test_masks_teach(tmp_path: Path) -> None:
    import segment

    segment.draw_discs(tmp_path / "discs.1", count=128)
    losses = segment.train(tmp_path / "discs.1", epochs=6)
    assert (tmp_path / "discs.1.h5").is_file()
    # It is 0.037, and 0.363 if the masks are left unmoved.
    assert losses[-1] < 0.1


def test_boxes_teach_and_come_back_from_an_export(tmp_path: Path) -> None:
    import detect

    detect.draw_shapes(tmp_path / "shapes.1", count=96)
    path = detect.pack(tmp_path / "shapes.1")
    assert path == tmp_path / "shapes.1.h5"
    losses = detect.train(path, epochs=4)
    # It is 0.31, and 0.67 if the boxes are left unmoved.
    assert losses[-1] < 0.45
    h5pack.export(path, tmp_path / "out", num_workers=1)
    settings = {"box_columns": "boxes", "text_columns": "captions", "field_columns": ["box_labels", "image_ids"]}
    h5pack.convert(tmp_path / "out" / "manifest.csv", tmp_path / "again.h5", order="sorted", **settings)
    names = [*detect.FIELDS, "image_ids"]
    samples = (h5pack.H5Dataset(file, fields=names)[:] for file in (path, tmp_path / "again.h5"))
    for one, other in zip(*samples, strict=True):
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.boxes, other.boxes)
        assert (one.captions, one.box_labels.tolist()) == (other.captions, other.box_labels.tolist())
        assert one.image_ids == other.image_ids


def test_packs_of_other_formats_train_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    import sources

    sources.main(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "after an epoch" in line]
    assert [line.partition(":")[0] for line in lines] == list(sources.SOURCES)
    assert all("; 0 samples differ" in line for line in lines)
