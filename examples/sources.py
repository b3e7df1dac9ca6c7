"""Pack other formats, train on each pack for an epoch, export it, and pack the export: the same values come back.

    python examples/sources.py FOLDER

makes captioned images (JSONL), WebDataset shards, a Parquet file and a dataset of Hugging Face on the disk (which need
pyarrow) of the same 48 small pictures, and does this with each of them. The packs keep the JPEG files, and crops are
decoded from them.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import nn

import h5pack

COUNT, CLASSES = 48, ("circle", "square")


def pictures() -> list[dict[str, Any]]:
    """JPEG bytes, class and caption of some pictures of several sizes."""
    found = []
    for number in range(COUNT):
        size, label = (random.randrange(40, 80), random.randrange(40, 80)), number % 2
        image = Image.new("RGB", size, "gray")
        draw = ImageDraw.Draw(image)
        (draw.ellipse if label == 0 else draw.rectangle)((8, 8, 32, 32), fill="white")
        stream = io.BytesIO()
        image.save(stream, "JPEG")
        found.append({"jpeg": stream.getvalue(), "label": label, "caption": f"a white {CLASSES[label]}, {number}"})
    return found


def captions(folder: Path, samples: list[dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Write images and a JSONL file; return what to pack, and how."""
    folder.mkdir(parents=True)
    with (folder / "list.jsonl").open("w") as lines:
        for number, sample in enumerate(samples):
            (folder / f"{number:03d}.jpg").write_bytes(sample["jpeg"])
            line = {"path": f"{number:03d}.jpg", "label": CLASSES[sample["label"]], "caption": sample["caption"]}
            print(json.dumps(line), file=lines)
    return folder / "list.jsonl", {"text_columns": ["caption"]}


def shards(folder: Path, samples: list[dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Write WebDataset shards."""
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard:03d}.tar", "w") as file:
            for number in range(shard, COUNT, 2):
                sample = samples[number]
                parts = {"jpg": sample["jpeg"], "cls": CLASSES[sample["label"]].encode()}
                for ending, data in (parts | {"txt": sample["caption"].encode()}).items():
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return folder, {"text_columns": ["txt"]}


def _table(samples: list[dict[str, Any]]) -> Any:
    import pyarrow

    kinds = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}
    kinds["caption"] = {"_type": "Value"}
    table = pyarrow.table(
        {
            "image": [{"bytes": sample["jpeg"], "path": None} for sample in samples],
            "label": [sample["label"] for sample in samples],
            "caption": [sample["caption"] for sample in samples],
        }
    )
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": kinds}})})


def parquet(folder: Path, samples: list[dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Write a Parquet file as Hugging Face publishes them."""
    import pyarrow.parquet

    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(_table(samples), folder / "train.parquet", row_group_size=20)
    return folder / "train.parquet", {"text_columns": ["caption"]}


def hugging_face(folder: Path, samples: list[dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Write what ``Dataset.save_to_disk`` writes."""
    import pyarrow

    folder.mkdir(parents=True)
    table = _table(samples)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text("{}")
    return folder, {"text_columns": ["caption"]}


SOURCES = {"captions": captions, "webdataset": shards, "parquet": parquet, "hugging_face": hugging_face}


def train(path: Path, text: str) -> float:
    """Train a tiny network for one epoch; return the last loss. `text` is the field of captions."""
    network = nn.Sequential(nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    dataset = h5pack.H5Dataset(path, fields=[text], with_rows=True)
    normalize = h5pack.Normalize.from_dataset(dataset, flip=0.5)
    loss = torch.zeros(())
    loader = h5pack.H5Loader(dataset, 8, decode=h5pack.RandomResizedCrop(32, scale=(0.5, 1)))
    for images, labels, texts, _ in h5pack.DeviceFeed(loader, transform=normalize):
        assert all(CLASSES[label] in caption for label, caption in zip(labels.tolist(), texts, strict=True))
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def export_and_pack(path: Path, text: str, folder: Path) -> int:
    """Export a pack, pack the export, and return in how many samples the two packs differ."""
    h5pack.export(path, folder, num_workers=1)
    again, settings = folder.with_suffix(".h5"), {"keep": "jpeg", "order": "sorted", "text_columns": [text]}
    h5pack.convert(folder / "manifest.csv", again, num_workers=1, **settings)
    one, other = (h5pack.H5Dataset(file, fields=[text]) for file in (path, again))
    assert (len(one), one.classes) == (len(other), other.classes)
    return sum(
        not torch.equal(sample.image, same.image) or sample[1:] != same[1:]
        for sample, same in zip(one[:], other[:], strict=True)
    )


def main(folder: Path) -> None:
    samples = pictures()
    for name, make in SOURCES.items():
        source, settings = make(folder / name, samples)
        path, (text,) = folder / f"{name}.h5", settings["text_columns"]
        h5pack.convert(source, path, keep="jpeg", order="sorted", num_workers=1, **settings)
        loss, differ = train(path, text), export_and_pack(path, text, folder / f"{name}-export")
        print(f"{name}: loss {loss:.2f} after an epoch; {differ} samples differ after an export")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
