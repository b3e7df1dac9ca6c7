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
    label_kind,
    measured_statistics,
    merge,
    merge_classes,
    open_part,
    require_alike,
    table_forms,
)
from h5pack.combine.write import CombineReport, virtual_name, write_combination, write_virtual
from h5pack.errors import NoImagesError, OptionsError, OutputExistsError, SizesDifferError, SourceError
from h5pack.pack.conversion import Conversion
from h5pack.pack.options import OF_ROWS
from h5pack.pack.output import ConvertReport, Output, OutputLock
from h5pack.pack.plan import ConvertPlan
from h5pack.read.hdf5 import encode_text, text
from h5pack.sources.catalog import NO_SPLITS, Catalog, Reject
from h5pack.sources.map_style import MapStyleDataset
from h5pack.system.files import require_replaceable
from h5pack.system.parameters import flags, invalid, require_local
from h5pack.system.text import counted, first_names, listed


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
    """Add the images of a source to a pack. The new rows follow the existing rows.

    The new images are converted like the images of the pack, with the size, mode and other options that the pack
    stores. Then a new file with all rows is written beside the pack. The new file replaces the pack once it is
    complete. Until then, and if anything fails, the pack is unchanged. If the file system supports it (XFS, Btrfs), the
    new file shares the disk blocks of the existing rows; otherwise, the existing rows are copied. Classes keep their
    numbers, and new classes get the next numbers.

    If the pack is a virtual file, the new images are written to a further pack beside the virtual file. The new virtual
    file refers to the further pack, too. The name of the further pack is, for example, ``NAME-00003.h5``, with the
    lowest number that the virtual file does not use yet.

    The new files get the permissions of the pack. They also get the owner and the group of the pack, if the system
    permits that.

    Parameters
    ----------
    pack : path
        The pack to add images to. If it is a symbolic link, the file that it leads to is replaced, and all other files
        are created beside that file.
    source : path or map-style dataset
        Any source that `h5pack.convert` accepts.
    split : str, optional
        Put all new images into this split, which is created if the pack does not have it. Not allowed together with
        `val`. Default: each new image gets the split that it has in the source. If the source has no splits, the new
        images get the split "all" if the pack has it, and otherwise the only split of the pack. If the pack has several
        splits and none of them is "all", give `split` or `val`.
    only_new : bool
        Leave out images whose names are already in the pack. By default, such images raise an error. Images that the
        pack lists as rejected are tried again.
    overwrite : bool
        Discard the files that an interrupted call left, and start from scratch. If the interrupted call left a complete
        further pack of a virtual file, raise an error instead, because another program may have written that file.
    resume : bool
        Continue an interrupted call. The source and the options must be the same as in that call. If that call had
        already completed the pack, do nothing.
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
        If the new images do not match the pack, if the pack already has an image with the name of a new image (and
        `only_new` is false), and for the same reasons as `h5pack.convert`.

    Examples
    --------
    >>> h5pack.append("photos.h5", "new_photos")  # doctest: +SKIP
    """
    require_local(pack, "pack")
    only_new, overwrite, resume = flags(only_new=only_new, overwrite=overwrite, resume=resume)
    if split is not None and (not isinstance(split, str) or not split or "\0" in split):
        raise invalid("split", split, "give the name of a split")
    # Resolve symbolic links. Renaming the new file to the path of a link would replace the link, not the pack.
    path = Path(os.path.realpath(os.fsdecode(pack)))
    old = open_part(path)
    require_replaceable(path, writable=False)
    _require_options(old, options, split)
    virtual, new_path = old.is_virtual, _path_for_new(old, overwrite=overwrite, resume=resume)
    unchanged = CombineReport(str(path), len(old), path.stat().st_size, already_complete=True)
    made_of = old.options.get("combined", {})
    # The interrupted call may have replaced the pack already. Then the pack has the new images, and finding their names
    # in it must not raise an error.
    may_have_ended = resume and made_of.get("verb") == "append"
    last = made_of["parts"][-1] if may_have_ended else None
    # `open_part` raises an error if `new_path` is not a pack. Otherwise, a resumed conversion with overwrite=True would
    # replace that file.
    if resume and not virtual and new_path.exists() and open_part(new_path).identity == last:
        if not Output(path).partial.exists():
            Output(path).remove_leftovers()
        _remove(new_path)
        return unchanged
    settings = {name: old.options[name] for name in OF_ROWS if name in old.options} | options
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
    statistics = added_statistics(parts, (*old.catalog.split_names, *new.catalog.split_names))
    # Use `group_rows`, because the `chunk_rows` of a contiguous dataset is the number of all its rows.
    chunk_rows = None if old.is_encoded else old.index.group_rows
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
    of_pack = (*OF_ROWS, "chunk_rows", "chunk_bytes", "compat")
    reasons = dict.fromkeys(of_pack, "the pack determines it; leave it out")
    reasons["shard_bytes"] = "append writes all new images to one file; leave it out"
    several = "append runs on one machine; convert the new images into a pack of their own, and join the two packs"
    reasons |= dict.fromkeys(("part", "finish", "client"), several)
    reasons["val_groups"] = "it would ignore the groups of the pack's images; define the splits in the source"
    if split is not None and options.get("val") is not None:
        problem = "val and split cannot be combined, because both choose splits of new images; give only one of them"
        raise OptionsError.at(old.path, problem, "val", "split")
    for name, reason in reasons.items():
        if name in options:
            raise OptionsError.at(old.path, f"{name} cannot be given, because {reason}", name)


def _path_for_new(old: Part, *, overwrite: bool, resume: bool) -> Path:
    """Return the path for a pack of the new images; raise OutputExistsError if there are files that must be kept."""
    if not old.is_virtual:
        new_path = old.path.with_name(f"{old.path.name}.new")
    else:
        # The further pack will have a similar name. Raise now if that name is not valid UTF-8, which a virtual file
        # cannot store.
        virtual_name(str(old.path), old.path.parent)
        used = {os.path.basename(file.path) for file in old.index.files}
        new_path = next(one for one in map(partial(shard_path, old.path), itertools.count()) if one.name not in used)
        if (overwrite or not resume) and new_path.exists():
            # Do not delete the file: it may be a file of the user that happens to have this name.
            problem = (
                f"exists, but {old.path} does not refer to it; if an interrupted call left it, run again with "
                "resume=True and without overwrite=True, otherwise rename it"
            )
            raise OutputExistsError.at(new_path, problem, "resume=True", "overwrite=True")
    for one in (new_path, Output(new_path).partial, Output(old.path).partial):
        if one.exists() and not (resume or overwrite):
            problem = (
                "belongs to an unfinished call; continue that call with resume=True, or discard its files with "
                "overwrite=True"
            )
            raise OutputExistsError.at(one, problem, "resume=True", "overwrite=True")
    return new_path


class _Addition(Conversion):
    def __init__(
        self, source: str | os.PathLike[str] | MapStyleDataset, out: Path, old: Part, only_new: bool,
        split: str | None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(source, out, **settings)
        self._old, self._only_new, self._split = old, only_new, split
        self.output.permissions_of = old.path

    def existing_report(self) -> ConvertReport | None:
        try:
            return super().existing_report()
        except OutputExistsError as error:
            # The error advises another name, but the name of this file follows from the name of the pack.
            problem = "was made from another source or with other options; append those again with resume=True, or "
            if self._old.is_virtual:
                raise OutputExistsError.at(self.output.final, f"{problem}rename it", "resume=True") from error
            problem += "discard it with overwrite=True and without resume=True"
            raise OutputExistsError.at(self.output.final, problem, "overwrite=True", "resume=True") from error

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
                f"has {len(found) - len(new):,} of {counted(len(found), 'image')} already, such as "
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
            raise _sizes_differ(old, plan.source, f"the shape {'x'.join(map(str, plan.row_shape))}")
        known, new = fitted([old.catalog, plan.catalog])
        own, added = table_forms(known, old.pixel_dtypes), table_forms(new, plan.mask_dtypes)
        require_alike(old.path, own, plan.source, added, "choose options so that both are the same")
        if label_kind(known) == "classes":
            merge_classes([(old.path, known.label_names or ()), (plan.source, new.label_names or ())])
        _split_for(old, plan.catalog, self._split)
        return plan


def _sizes_differ(old: Part, source: object, sizes: str) -> SizesDifferError:
    shape = "x".join(map(str, old.index.row_shape))
    problem = (
        f"has rows of the shape {shape}, but the images of {source} have {sizes}; resize the new images, or "
        "make a new pack of all images with 'h5pack convert --size'"
    )
    return SizesDifferError.at(old.path, problem)


def _pack_new(conversion: Conversion, rejects: Sequence[Reject]) -> tuple[str, ...] | None:
    """Pack the new images; return the notes of the plan that name no parameters.

    A note that names parameters advises other options, but `append` determines these options itself. Return None if
    there are no new images, or if none of them can be packed and all of them are in `rejects`. Return () if an
    interrupted call had already packed the new images.
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
    """Return the name that the pack will store for an image: bytes that are not valid UTF-8 are escaped."""
    return text(encode_text(name))


def _split_for(old: Part, new: Catalog, split: str | None) -> str | None:
    """Return the split for all new images, or None if the new images keep the splits of their source.

    If `split` is not None, return it. Otherwise, if the source has no splits and the pack has no split "all", return
    the only split of the pack; raise OptionsError if the pack has several splits.
    """
    names = new.split_names
    if split is None and names == NO_SPLITS and names[0] not in old.catalog.split_names:
        if len(old.catalog.split_names) > 1:
            problem = (
                f"has the splits {listed(old.catalog.split_names)}, but the new images have none; choose "
                "one for all new images with split, or divide the new images, e.g. with val=0.1"
            )
            raise OptionsError.at(old.path, problem, "split", "val=0.1")
        return old.catalog.split_names[0]
    return split


def _with_split(old: Part, new: Part, split: str | None) -> Part:
    """Return the part `new` with all images in the split that `_split_for` returns; unchanged if that is None."""
    split = _split_for(old, new.catalog, split)
    if split is None:
        return new
    catalog = replace(new.catalog, split_names=(split,), split_ids=np.zeros(len(new), np.int32))
    statistics = {**new.statistics, "split": split}
    if len(new.catalog.split_names) > 1:
        # The pack of the new images has statistics of one of the source's splits only.
        statistics = measured_statistics(new, catalog, np.arange(len(new)))
    return replace(new, catalog=catalog, statistics=statistics)


def _with_latest_rejects(merged: Catalog, new: Part) -> Catalog:
    """Return `merged` with updated rejects: those of `new`, and earlier ones whose images `new` did not try again."""
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
