"""Detection with boxes that move with their images: ``python examples/detect.py FOLDER``.

FOLDER is laid out as COCO is, with two categories: ``annotations/instances_train.json``, ``captions_train.json`` beside
it, and the images in ``train/``. If FOLDER does not exist, it is made: discs and squares on noise, with captions. It is
packed into FOLDER.h5, with images of 64x64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epochs import train_epochs
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional as F

import h5pack

BATCH, EPOCHS, SIZE, CELL = 16, 8, 64, 8
KINDS = ("disc", "square")
FIELDS = ("boxes", "box_labels", "captions")


def draw_shapes(folder: Path, count: int = 256) -> None:
    """Write images of one to three shapes with boxes and captions, as COCO lays them out."""
    random = np.random.default_rng(0)
    boxes: list[dict[str, Any]] = []
    (folder / "train").mkdir(parents=True)
    (folder / "annotations").mkdir()
    images = [{"id": n, "file_name": f"{n:04d}.png", "height": 80, "width": 96} for n in range(count)]
    captions = [{"id": n, "image_id": n, "caption": ""} for n in range(count)]
    for number, entry in enumerate(images):
        image = Image.fromarray(random.integers(0, 96, (80, 96, 3), np.uint8))
        kinds = random.integers(0, 2, random.integers(1, 4)).tolist()
        for kind in kinds:
            side, left, top = (int(random.integers(*bounds)) for bounds in ((14, 26), (0, 70), (0, 54)))
            draw = ImageDraw.Draw(image)
            (draw.ellipse if kind == 0 else draw.rectangle)((left, top, left + side - 1, top + side - 1), "white")
            box = {"image_id": number, "category_id": kind + 1, "bbox": [left, top, side, side], "iscrowd": 0}
            boxes.append({"id": len(boxes), **box})
        captions[number]["caption"] = " and ".join(KINDS[kind] for kind in kinds)
        image.save(folder / "train" / str(entry["file_name"]))
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(KINDS)]
    for name, found in (("instances", boxes), ("captions", captions)):
        content = {"images": images, "annotations": found, "categories": categories}
        (folder / "annotations" / f"{name}_train.json").write_text(json.dumps(content))


def pack(folder: Path) -> Path:
    """Pack the folder, unless this was done before."""
    path = folder.with_name(f"{folder.name}.h5")
    if not path.exists():
        h5pack.convert(folder, path, size=SIZE)
    return path


def targets_of(boxes: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    """Return the class at the center of each box, on a grid of cells: int64 (N, H, W), 0 for nothing."""
    grid = torch.zeros(len(boxes), SIZE // CELL, SIZE // CELL, dtype=torch.int64, device=boxes[0].device)
    images = torch.arange(len(boxes)).repeat_interleave(torch.tensor([len(one) for one in boxes])).to(grid.device)
    corners = torch.cat(boxes)
    # Boxes that a crop has cut off have no area.
    seen = (corners[:, 2:] > corners[:, :2]).all(1)
    x, y = ((corners[seen, :2] + corners[seen, 2:]) / 2 // CELL).long().clamp(0, SIZE // CELL - 1).unbind(1)
    grid[images[seen], y, x] = torch.cat(labels)[seen] + 1
    return grid


def train(path: Path, epochs: int = EPOCHS) -> list[float]:
    """Train a small network to find the centers of boxes and their classes; return the mean loss of each epoch."""
    torch.manual_seed(0)
    dataset = h5pack.H5Dataset(path, labels=None, fields=FIELDS, with_rows=True)
    # The boxes are flipped and cropped by the same random numbers as the images.
    normalize = h5pack.Normalize(flip=0.5, crop=4, fields={"boxes": "boxes"})
    feed = h5pack.DeviceFeed(h5pack.H5Loader(dataset, BATCH), transform=normalize)
    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1)]
    network = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 3, 1))
    network = network.to(feed.device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), 0.005)
    # Most cells hold nothing.
    weight = torch.tensor([0.1, 1.0, 1.0], device=feed.device)
    return train_epochs(
        feed,
        optimizer,
        lambda batch: F.cross_entropy(network(batch.images), targets_of(batch.boxes, batch.box_labels), weight),
        epochs,
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if not folder.exists():
        draw_shapes(folder)
    train(pack(folder))
