"""The settings of a bench, measured once more: all its chunk sizes side by side, in whole epochs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import h5pack
from h5pack.measure.consuming import consume
from h5pack.measure.machine_facts import machine_facts
from h5pack.measure.page_cache import drop_cache
from h5pack.measure.repeats import interleaved, spread

_EPOCHS = 5
"""Of a file that was loaded once."""


def measure_again(bench: Path, folder: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    """Pack a folder with each of a bench's chunk sizes, and read each as its recommendation says.

    Parameters
    ----------
    bench : Path
        What ``h5pack bench --json`` printed, or `benchmarks.chunk_size` wrote.
    folder : Path
        The images that it was about.
    scratch : Path
        For the packs.
    repeats : int

    Returns
    -------
    dict
        The machine, images/s of each chunk size, and the recommended one's part of the best.
    """
    found = json.loads(bench.read_text())
    chosen = found["recommendation"]
    if chosen is None or not chosen["convert"]:
        raise SystemExit(f"{bench}: it recommends no conversion; there is nothing to measure again")
    machine = machine_facts(scratch)
    forms = [one for one in found["files"] if one["chunk_rows"] is not None and not one["own"]]
    # The bench may have given images of several sizes one.
    size = tuple(found["row_shape"][:2]) if "--size" in chosen["command"] else None
    loaders, paths = {}, {}
    for form in forms:
        path = scratch / f"{form['chunk_rows']}-{form['compression']}.h5".replace(":", "-")
        options = h5pack.ConvertOptions(
            limit=found["sample_rows"],
            chunk_rows=form["chunk_rows"],
            compression=form["compression"],
            size=size,
        )
        h5pack.convert(folder, path, options)
        paths[form["label"]] = path
        loaders[form["label"]] = h5pack.H5Loader(
            h5pack.H5Dataset(path),
            chosen["batch"],
            window=chosen["window"],
            threads=chosen["threads"],
            resident="no",
        )
    cold = chosen["judged_by"] == "cold"
    speeds: dict[str, list[float]] = {label: [] for label in loaders}
    for label in interleaved(list(loaders), repeats):
        # How a file's pages come to lie in memory makes all epochs faster or slower by up to a fifth until it is loaded
        # again. So it is, before each repeat, as in training: by an epoch.
        consume(loaders[label])
        stays = drop_cache(paths[label])
        if cold and stays:
            raise SystemExit(f"{paths[label]}: its pages stay in the page cache, so that nothing cold can be measured")
        if not cold:
            consume(loaders[label])
        speeds[label].append(statistics.median(consume(loaders[label]) for _ in range(1 if cold else _EPOCHS)))
    medians = {label: spread(values)["median"] for label, values in speeds.items()}
    return {
        "machine": machine,
        "recommended": chosen["stored"],
        "settings": {name: chosen[name] for name in ("batch", "window", "threads", "judged_by")},
        "images_per_s": {label: spread(values) for label, values in speeds.items()},
        "of_best": round(medians[chosen["stored"]] / max(medians.values()), 4),
    }
