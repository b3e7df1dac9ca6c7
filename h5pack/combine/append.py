"""`h5pack append`: add new images to a pack."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from h5pack.combine.combination import Combination
from h5pack.combine.convert import shard_path
from h5pack.combine.parts import (
    Part,
    added_statistics,
    fitted,
    merge,
    merge_classes,
    open_part,
    require_alike,
    table_forms,
)
from h5pack.combine.write import CombineReport, virtual_name, write_combination, write_virtual
from h5pack.errors import NoImagesError, OptionsError, OutputExistsError, SizesDifferError, SourceError
from h5pack.pack.conversion import Conversion
from h5pack.pack.output import Output, OutputLock
from h5pack.pack.plan import ConvertPlan
from h5pack.read.hdf5 import encode_text, text
from h5pack.sources.catalog import Catalog, Reject, one_split
from h5pack.sources.map_style import MapStyleDataset
from h5pack.system.files import require_replaceable
from h5pack.system.parameters import flags, invalid, require_local
from h5pack.system.text import first_names, listed

_OF_ROWS = (
    "fit", "resample", "draft", "mode", "layout", "keep", "max_side", "quality", "max_pixels", "compression",
)  # fmt: skip
"""Options of a conversion that determine how an image becomes a row. They are taken from the pack."""


def append(
    pack: str | os.PathLike[str],
    source: str | os.PathLike[str] | MapStyleDataset,
    *,
    split: str | None = None,
    only_new: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
    **options: Any,
) -> CombineReport:
    """Add the images of a source to a pack, after its rows.

    The new images are packed with the options that the pack was made with. Then a file with all rows is written beside
    the pack. It replaces the pack once it is complete; until then, and if anything fails, the pack is unchanged. If the
    file system supports it (XFS, Btrfs), the new file shares the disk blocks of the existing rows; otherwise these rows
    are copied. Classes keep their numbers, and new classes get the next numbers.

    If the pack is a virtual file, the new images are written to a further pack beside it, and the new virtual file also
    refers to that pack. Its name has the lowest number that is not used yet, such as ``NAME-00003.h5``.

    The new files get the permissions of the pack, and its owner and group if the system permits that.

    Parameters
    ----------
    pack : path
        The pack to add images to. If it is a symbolic link, the file that it leads to is replaced, and all other files
        are created beside that file.
    source : path or map-style dataset
        Any source that `h5pack.convert` accepts.
    split : str, optional
        Put all new images into this split, which is created if the pack does not have it; not with `val`. Default: the
        splits of the source, or the pack's only split if the source has no splits.
    only_new : bool
        Leave out images whose names are already in the pack. By default, such images are an error. Images that the pack
        lists as rejected are tried again.
    overwrite : bool
        Discard the files that an interrupted call left, and start from scratch. If it left a complete further pack of a
        virtual file, raise an error, because another program may have written that file.
    resume : bool
        Continue an interrupted call with the same parameters. If that call had completed the pack, do nothing.
    progress : bool
        Show progress bars on standard error if it is a terminal.
    **options
        Keywords of `h5pack.convert` that describe the source (such as `source_kind`, `label_columns`, `include`), and
        `order`, `seed`, `val`, `strict`, `num_workers`, `start_method` and `io`.

    Returns
    -------
    CombineReport

    Raises
    ------
    H5PackError
        If the new images do not match the pack, if the pack has some of their names already (without `only_new`), and
        for the same reasons as `h5pack.convert`.

    Examples
    --------
    >>> h5pack.append("photos.h5", "new_photos")  # doctest: +SKIP
    """
    require_local(pack, "pack")
    only_new, overwrite, resume = flags(only_new=only_new, overwrite=overwrite, resume=resume)
    if split is not None and (not isinstance(split, str) or not split or "\0" in split):
        raise invalid("split", split, " is not the name of a split")
    # Renaming the new file to a symbolic link would replace the link and leave the pack unchanged.
    path = Path(os.path.realpath(os.fsdecode(pack)))
    old = open_part(path)
    require_replaceable(path, writable=False)
    _require_options(old, options, split)
    virtual = old.is_virtual
    if virtual:
        virtual_name(str(path), path.parent)  # raises an error if a virtual file cannot name the further pack
    new_path = _shard_path(old) if virtual else path.with_name(f"{path.name}.new")
    if virtual and (overwrite or not resume) and new_path.exists():
        # It may just as well be a file of the user's with such a name.
        problem = f"is not part of {path}; continue with resume=True if an interrupted call left it, or rename it"
        raise OutputExistsError.at(new_path, problem, "resume=True")
    if not resume and not overwrite:
        _require_no_leftovers(new_path, Output(new_path).partial, Output(path).partial)
    unchanged = CombineReport(str(path), len(old), path.stat().st_size, already_complete=True)
    made_of = old.options.get("combined", {})
    # The interrupted call may have replaced the pack already. Then the pack has the new images, which is no error.
    may_have_ended = resume and made_of.get("verb") == "append"
    last = made_of["parts"][-1] if may_have_ended else None
    # Raise an error for a file that is no pack. With overwrite=True, the resumed conversion would replace it.
    if resume and not virtual and new_path.exists() and open_part(new_path).identity == last:
        if not Output(path).partial.exists():
            Output(path).remove_leftovers()
        _remove(new_path)
        return unchanged
    settings = {name: old.options[name] for name in (*_OF_ROWS, "size") if name in old.options} | options
    only_new = only_new or may_have_ended
    settings |= {"overwrite": overwrite, "resume": resume, "progress": progress}
    with _Addition(source, new_path, old, only_new, split, **settings) as conversion:
        notes = _pack_new(conversion, old.rejects if only_new else ())
        if notes is None:
            if overwrite and not resume:
                _discard(new_path, path)
            return unchanged
    new = _with_split(old, open_part(new_path), split)
    parts = [old, new]
    merged = _with_latest_rejects(merge(parts), new)
    statistics = added_statistics(parts, merged)
    chunk_rows = None if old.is_encoded else old.index.group_rows  # `chunk_rows` of a contiguous dataset is its length
    plan = Combination.of("append", parts, merged, np.arange(len(merged)), statistics, chunk_rows)
    new_classes = (merged.label_names or ())[len(old.catalog.label_names or ()) :]
    if new_classes:
        notes = (*notes, f"classes that the pack did not have: {first_names(new_classes, 10)}")
    if virtual:
        report = write_virtual(plan, path, overwrite=True)
    else:
        report = write_combination(plan, path, overwrite=True, resume=resume, progress=progress)
        _remove(new_path)
    return replace(report, added=len(new), notes=notes)


def _require_options(old: Part, options: dict[str, Any], split: str | None) -> None:
    files = ("size", "chunk_rows", "chunk_bytes", "compat", "shard_bytes")
    reasons = dict.fromkeys((*_OF_ROWS, *files), "the pack determines it; leave it out")
    several = "append runs on one machine; convert the new images into a pack of their own, and join the two packs"
    reasons |= dict.fromkeys(("part", "finish", "client"), several)
    reasons["val_groups"] = "it would ignore the groups of the pack's images; define the splits in the source"
    if split is not None and options.get("val") is not None:
        reasons["val"] = "split puts all new images into one split; give one of the two"
    for name, reason in reasons.items():
        if name in options:
            text = f"{old.path}: {name} cannot be given, because {reason}"
            raise OptionsError(text, path=old.path, parameters=(name,))


def _require_no_leftovers(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            problem = "was left by an interrupted call; continue it with resume=True, or discard it with overwrite=True"
            raise OutputExistsError.at(path, problem, "resume=True", "overwrite=True")


def _shard_path(old: Part) -> Path:
    """Return the path for a further pack of the virtual file `old`: the first shard path that it does not use yet."""
    used = {os.path.basename(file.path) for file in old.index.files}
    return next(path for path in map(partial(shard_path, old.path), itertools.count()) if path.name not in used)


class _Addition(Conversion):
    def __init__(
        self, source: str | os.PathLike[str] | MapStyleDataset, out: Path, old: Part, only_new: bool,
        split: str | None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(source, out, **settings)
        self._old, self._only_new, self._split = old, only_new, split
        self.output.permissions_of = old.path

    @cached_property
    def catalog(self) -> Catalog:
        found, old = super().catalog, self._old
        known = set(old.catalog.names)
        names = [*map(_stored_name, found.names)]
        new = [index for index, name in enumerate(names) if name not in known]
        if len(new) == len(found):
            return found
        if not self._only_new:
            problem = (
                f"has {len(found) - len(new):,} of the {len(found):,} images already, such as "
                f"{next(filter(known.__contains__, names))}; give only_new=True to append only the others"
            )
            raise SourceError.at(old.path, problem, "only_new=True")
        return found.take(np.array(new, np.int64))

    def plan(self, *, resumable: bool = False) -> ConvertPlan:
        old = self._old
        try:
            plan = super().plan(resumable=resumable)
        except SizesDifferError as error:
            raise _sizes_differ(old, error.path, "several sizes") from error
        if not old.is_encoded and plan.row_shape != old.index.row_shape:
            raise _sizes_differ(old, plan.source, "x".join(map(str, plan.row_shape)))
        known, new = fitted([old.catalog, plan.catalog])
        forms, advice = table_forms(known, old.pixel_dtypes), "choose options so that both are the same"
        require_alike(old.path, forms, plan.source, table_forms(new, plan.mask_dtypes), advice)
        if forms["labels"] == "classes":
            merge_classes([(old.path, known.label_names or ()), (plan.source, new.label_names or ())])
        _split_for(old, plan.catalog, self._split)
        return plan


def _sizes_differ(old: Part, source: object, sizes: str) -> SizesDifferError:
    shape = "x".join(map(str, old.index.row_shape))
    problem = f"has rows of {shape}, but images of {source} have {sizes}; resize them, or convert all again with size"
    return SizesDifferError.at(old.path, problem, "size")


def _pack_new(conversion: Conversion, rejects: Sequence[Reject]) -> tuple[str, ...] | None:
    """Pack the new images and return the notes of the plan that do not advise other options.

    Return None if there are no new images, or if all of them are in `rejects` and again cannot be packed.
    """
    if not len(conversion.catalog):
        return None
    try:
        report = conversion.run()
    except NoImagesError:
        if not {reject.name for reject in rejects}.issuperset(map(_stored_name, conversion.catalog.names)):
            raise
        return None
    if report.already_complete:
        return ()
    return tuple(note.text for note in conversion.plan().notes() if not note.parameters)


def _stored_name(name: str) -> str:
    """Return the name of an image as the pack will have it: with escapes for bytes that are not valid UTF-8."""
    return text(encode_text(name))


def _split_for(old: Part, new: Catalog, split: str | None) -> str | None:
    """Return the split for all new images, or None if they keep the splits of their source.

    All get `split` if it is given. If not, images of a source without splits get the only split of the pack.
    """
    names = new.split_names
    if split is None and names == one_split(0)[0] and names[0] not in old.catalog.split_names:
        if len(old.catalog.split_names) > 1:
            problem = (
                f"has the splits {listed(old.catalog.split_names)}, but the new images have none; choose "
                "one for them with split, or divide them, such as with val=0.1"
            )
            raise OptionsError.at(old.path, problem, "split", "val=0.1")
        return old.catalog.split_names[0]
    return split


def _with_split(old: Part, new: Part, split: str | None) -> Part:
    """Return `new` with the split that its images get in the pack; see `_split_for`."""
    split = _split_for(old, new.catalog, split)
    if split is None:
        return new
    catalog = replace(new.catalog, split_names=(split,), split_ids=np.zeros(len(new), np.int32))
    return replace(new, catalog=catalog, statistics={**new.statistics, "split": split})


def _with_latest_rejects(merged: Catalog, new: Part) -> Catalog:
    """Return the tables with the rejects of `new`, and earlier rejects unless `new` packed or rejected them again."""
    names = {*new.catalog.names, *(reject.name for reject in new.rejects)}
    old = (reject for reject in merged.rejects if reject.name not in names)
    return replace(merged, rejects=(*old, *new.rejects))


def _discard(new_path: Path, path: Path) -> None:
    """Remove the files that an interrupted call left; raise OutputBusyError if another call is writing them."""
    for output in (Output(path), Output(new_path)):
        with contextlib.closing(OutputLock(output)) as lock:
            lock.renew()
            output.remove_leftovers()
    _remove(new_path)


def _remove(path: Path) -> None:
    """Remove the temporary pack of the new images, and its table of rejects."""
    # Remove the pack last: if the call is interrupted in between, a resumed call finds the pack and removes it.
    for one in (Output(path).rejects, path):
        one.unlink(missing_ok=True)
