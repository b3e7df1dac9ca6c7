"""`h5pack subset`: make a pack of some rows of another pack."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from h5pack.combine.combination import Combination
from h5pack.combine.parts import Part, Rows, measured_statistics, merge, open_part
from h5pack.combine.write import CombineReport, write_combination
from h5pack.errors import NoImagesError, OptionsError
from h5pack.format import schema
from h5pack.pack.options import output_path
from h5pack.sources.catalog import Catalog
from h5pack.system.arrays import shuffled
from h5pack.system.files import require_other_files
from h5pack.system.parameters import texts, whole_number
from h5pack.system.text import listed


def subset(
    pack: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    splits: str | Sequence[str] = (),
    classes: str | Sequence[str] = (),
    rows: Sequence[int] | str | None = None,
    sample: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> CombineReport:
    """Make a pack of some rows of another pack, in the same order.

    A row is selected if its split is one of `splits`, its class is one of `classes`, and its number is one of `rows`.

    Parameters
    ----------
    pack : path
        The pack to take rows from.
    out : path
        The file to create. If it is a symbolic link, the file that it leads to is written, and all other files are
        created beside that file.
    splits : str or sequence of str
        Splits to take. Default: all.
    classes : str or sequence of str
        Classes to take, which are numbered in the given order. Default: all.
    rows : sequence of int or str, optional
        Rows to take: row numbers, or text such as "0:1000,5000:6000,7123"; the end of a range is not included.
        Default: all.
    sample : int, optional
        Take at most this many of the selected rows, drawn at random without replacement. Default: all selected rows.
    seed : int
        Seed of the random draw for `sample`, 0 to 2**63 - 1.
    overwrite : bool
        Replace an existing output once the new one is complete, and discard an unfinished one.
    resume : bool
        Continue an interrupted call, which must have selected the same rows of the same pack. If the output is already
        complete, only check that it was made of these rows.
    progress : bool
        Show a progress bar on standard error if it is a terminal.

    Returns
    -------
    CombineReport

    Raises
    ------
    H5PackError
        If a split, class or row does not exist, if no row is selected, and for the same reasons as `h5pack.convert`.

    Examples
    --------
    >>> h5pack.subset("all.h5", "small.h5", splits="train", sample=1000)  # doctest: +SKIP
    """
    seed = whole_number("seed", seed, 0, 2**63 - 1)
    target, part = output_path(out), open_part(pack)
    require_other_files([target], part.reader.paths())
    merged = merge([part])
    chosen = np.ones(len(part), np.bool_)
    names = _unique("splits", splits)
    if names:
        _require_known(part, "splits", names, merged.split_names)
        chosen &= np.isin(merged.split_ids, [merged.split_names.index(name) for name in names])
    names = _unique("classes", classes)
    if names:
        chosen &= _of_classes(part, merged, names)
        merged = _with_classes(merged, names)
    if rows is not None:
        chosen &= _of_rows(part, rows)
    order = np.flatnonzero(chosen)
    if sample is not None:
        sample = whole_number("sample", sample, 1)
        order = np.sort(order[shuffled(len(order), seed)[:sample]])
    if not len(order):
        problem = "no row matches the given splits, classes and rows; choose others"
        raise NoImagesError.at(part.path, problem)
    merged = _with_used_splits(merged, order)
    plan = Combination.of("subset", [part], merged, order, measured_statistics(part, merged, order))
    return write_combination(plan, target, overwrite=overwrite, resume=resume, progress=progress)


def _unique(parameter: str, names: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts(parameter, names)))


def _require_known(part: Part, parameter: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionsError.at(
            part.path,
            f"{parameter}={unknown[0]!r} does not exist; the pack has {listed([*map(repr, known)]) or 'none'}",
            f"{parameter}={unknown[0]!r}",
        )


def _of_classes(part: Part, merged: Catalog, names: Sequence[str]) -> np.ndarray:
    if merged.labels is None or merged.labels.ndim != 1 or merged.label_names is None:
        raise OptionsError.at(part.path, "classes requires a pack with class names; leave it out", "classes")
    _require_known(part, "classes", names, merged.label_names)
    return np.isin(merged.labels, [number for number, name in enumerate(merged.label_names) if name in names])


def _with_classes(merged: Catalog, names: tuple[str, ...]) -> Catalog:
    """Return `merged` with only the classes `names`, numbered in this order; labels of other classes become -1."""
    assert merged.labels is not None
    assert merged.label_names is not None
    # A pack may have several classes of the same name. They stay different classes.
    kept = sorted((names.index(name), old) for old, name in enumerate(merged.label_names) if name in names)
    numbers = np.full(len(merged.label_names) + 1, schema.NO_LABEL, np.int64)
    numbers[[old for _, old in kept]] = np.arange(len(kept))
    kept_names = tuple(merged.label_names[old] for _, old in kept)
    return replace(merged, label_names=kept_names, labels=numbers[merged.labels])


def _of_rows(part: Part, rows: Sequence[int] | str) -> np.ndarray:
    chosen = np.zeros(len(part), np.bool_)
    try:
        found = _parsed(rows, len(part)) if isinstance(rows, str) else np.asarray(rows)
        found = found if found.size else np.empty(0, np.int64)  # np.asarray([]) has dtype float64.
        if found.ndim != 1 or found.dtype.kind not in "iu" or (found < 0).any() or (found >= len(part)).any():
            raise ValueError
    except ValueError:
        problem = f"rows must be numbers from 0 to {len(part) - 1:,}, or text such as '0:1000,5000:6000'"
        raise OptionsError.at(part.path, problem, "rows") from None
    chosen[found] = True
    return chosen


def _parsed(rows: str, count: int) -> Rows:
    """Return the row numbers in text such as "0:1000,7123"; raise ValueError for invalid text or a number > `count`."""
    ranges = [[int(number) for number in one.split(":")] for one in rows.split(",")]
    if any(len(one) > 2 or not all(0 <= number <= count for number in one) for one in ranges):
        raise ValueError
    return np.concatenate([np.arange(*one) if len(one) == 2 else np.array(one) for one in ranges])


def _with_used_splits(merged: Catalog, order: Rows) -> Catalog:
    """Return `merged` with only those splits that have rows in `order`. No rows are removed."""
    used = np.unique(merged.split_ids[order])
    numbers = np.zeros(len(merged.split_names), np.int32)
    numbers[used] = np.arange(len(used))
    names = tuple(merged.split_names[number] for number in used.tolist())
    return replace(merged, split_names=names, split_ids=numbers[merged.split_ids])
