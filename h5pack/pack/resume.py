"""Resuming: check that a run continues the same conversion, open its unfinished file, verify a complete output."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import IncompletePackError, OutputExistsError, ResumeError
from h5pack.format import schema
from h5pack.format.checksums import crc32, row_checksums
from h5pack.format.fields import FieldValues, RaggedRows
from h5pack.format.row_offsets import RowOffsets
from h5pack.images.decode import decoder_versions
from h5pack.pack.file_structure import Addresses, FileStructure, copy_structure, options_text, write_structure
from h5pack.pack.journal import Journal, RowResults
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import Output, OutputLock, PartFile
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.writer import WriteJob
from h5pack.read.hdf5 import attribute_names, encode_text, is_pack, open_file, require_complete, same_names, text
from h5pack.read.ragged import index_ragged
from h5pack.sources.catalog import Catalog
from h5pack.sources.validation import divided_names, training_split
from h5pack.system.files import drop_pages
from h5pack.system.text import counted, stored_option_text


def identity(plan: ConvertPlan) -> dict[str, Any]:
    """Return the properties that, besides the images' fingerprints, must be equal in a resumed run."""
    return {
        "packages": decoder_versions(),
        "options": plan.options.content(),
        "shape": [plan.rows, *plan.row_shape, *plan.mask_dtypes],
        "tables": [*plan.catalog.identity().values(), crc32(plan.row_order.origins)],
    }


class RowCounts(Protocol):
    """What `Unfinished` needs of a plan: the planned number of rows, and the length of the images dataset."""

    @property
    def rows(self) -> int: ...

    def stored_rows(self, rows: int) -> int:
        """Return the length of axis 0 of the images dataset for `rows` rows: `rows`, or their bytes if encoded."""


class Unfinished:
    """An unfinished file, of a conversion or of combined packs, to which tables are added after its rows."""

    plan: RowCounts
    output: Output
    own_lock: OutputLock  # not set in a part of an array job, which holds no lock
    structure: FileStructure
    addresses: Addresses
    all_offsets: tuple[RowOffsets, ...]  # of the images, and of each field that is chunked like them


class UnfinishedPack(Unfinished):
    """The unfinished file of a conversion. Depending on the options, it is continued or created. Call `allocate` next.

    If `lock` is a `PartFile`, other parts may create the file and the journal at the same time. `distributed` says
    whether other machines write rows, too. The attribute `overwrite` says whether this run may replace an existing
    output: if this run or the interrupted one has the option `overwrite`.
    """

    plan: ConvertPlan

    def __init__(self, plan: ConvertPlan, output: Output, lock: OutputLock | PartFile, distributed: bool) -> None:
        self.plan = plan
        self.output = output
        self.lock = lock
        if isinstance(lock, OutputLock):
            self.own_lock = lock
        self.distributed = distributed
        self.journal = Journal(output.journal)
        before = self.journal.plan() if plan.options.continues else None
        self.overwrite = plan.options.overwrite or (before is not None and bool(before["overwrite"]))
        if output.final.exists() and not self.overwrite:
            problem = "exists; add overwrite=True to replace it"
            raise OutputExistsError.at(output.final, problem, "overwrite=True")
        if before is None and plan.options.finish:
            problem = "no part wrote any rows; run all parts, or write all rows with resume=True instead of finish=True"
            raise IncompletePackError.at(output.partial, problem, "resume=True", "finish=True")
        self._resumes, self._encodes = before is not None, bool(plan.to_encode.any())
        if before is not None:
            require_same(plan, self.journal, before)
            output.survey.unlink(missing_ok=True)
            if isinstance(lock, OutputLock):
                drop_pages(lock.descriptor)
        elif isinstance(lock, OutputLock):
            output.require_not_begun(lock, plan.options)
            output.remove_leftovers(keep_survey=True)
            lock.renew()
        if self._encodes and isinstance(lock, OutputLock) and not os.fstat(lock.descriptor).st_size:
            # The journal begins before the file has its structure. Give the file a size, because `OutputLock.close`
            # would remove an empty file.
            os.ftruncate(lock.descriptor, schema.ALIGNMENT_BYTES)
        if self._encodes and before is None:
            self._start_journal()

    def _start_journal(self) -> None:
        plan = {**identity(self.plan), "overwrite": self.overwrite}
        if isinstance(self.lock, OutputLock):
            self.journal.start(plan, self.plan.fingerprints)
            # From now on, a resumed run surveys all images again, and compares fingerprints with those in the journal.
            self.output.survey.unlink(missing_ok=True)
            return
        temporary = self.output.journal.with_name(f"{self.output.journal.name}-{secrets.token_hex(6)}")
        self.journal.start_together(plan, self.plan.fingerprints, temporary)
        before = self.journal.plan()
        if before is None:
            problem = "was removed while this part started, perhaps because all parts are finished; run the part again"
            raise ResumeError.at(self.journal.folder, problem)
        require_same(self.plan, self.journal, before)

    def allocate(self, plan: ConvertPlan) -> None:
        """Write the structure, and set the byte offsets of rows; `plan` has the sizes of all encoded images."""
        self.plan, output = plan, self.output
        self.structure = plan.structure
        # Compute the addresses also when resuming, because a kill may have damaged the metadata of `partial`.
        self.addresses = write_structure(output.structure, self.structure, plan.stored_rows(plan.rows), None)
        if isinstance(self.lock, PartFile):
            self.lock.place(
                lambda new: copy_structure(output.structure, new, self.addresses, self.structure), self.overwrite
            )
            output.structure.unlink(missing_ok=True)
        elif self._resumes and not self._encodes:
            output.structure.unlink()
        else:
            # If the earlier run was interrupted while it encoded images, the file has no structure yet. If the file has
            # one, copying it again does not change the chunks.
            copy_structure(output.structure, self.lock.descriptor, self.addresses, self.structure)
        if not self._resumes and not self._encodes:
            self._start_journal()
        if self.distributed:
            # Flush now. Otherwise, this machine could later send pages that overwrite rows from other machines.
            os.fsync(self.lock.descriptor)
        self.all_offsets = self.structure.row_offsets(self.addresses, plan.offsets)
        self.job = WriteJob(
            path=str(output.partial),
            journal=str(output.journal),
            pixels=plan.pixels,
            io=plan.options.io,
            inode=os.fstat(self.lock.descriptor).st_ino,
            durable=self.distributed,
            keep=plan.options.keep is not None,
            fields=plan.pixel_rows,
        )

    def begin_finish(self, rows: int) -> None:
        """Prepare the file for the steps after the last row is written, which one process does alone.

        `rows` is the number of rows that are not rejected.
        """
        self.own_lock.confirm()
        # Opening a file makes NFS drop cached pages that other machines have changed since.
        os.close(os.open(self.output.partial, os.O_RDONLY | os.O_CLOEXEC))
        if rows < self.plan.rows and (self.own_lock.took_over or self.journal.has_late_writers()):
            self.own_lock.isolate()

    def part_rows(self, number: int, count: int) -> npt.NDArray[np.int64]:
        """Return the planned rows of part `number` (from 1) of `count`; if rows are pixels, a part has whole chunks."""
        step = 1 if self.job.keep else self.plan.chunks.rows
        chunks = -(-self.plan.rows // step)
        start, stop = (part * chunks // count * step for part in (number - 1, number))
        return np.arange(start, min(stop, self.plan.rows))

    def require_all_parts(self, count: int, results: RowResults) -> None:
        """Raise IncompletePackError if one of the `count` parts has rows that are neither written nor rejected."""
        missing = [part for part in range(1, count + 1) if not results.settled[self.part_rows(part, count)].all()]
        if not missing:
            return
        rows = len(results.settled) - int(results.settled.sum())
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8:,} more" if len(missing) > 8 else "")
        again = f"part='{missing[0]}/{count}'"
        problem = (
            f"not all rows of part {shown} of {count} are written ({rows:,} are missing); "
            f"run each of these parts again ({again} first), or write the rest here with resume=True instead of "
            "finish=True"
        )
        raise IncompletePackError.at(self.output.partial, problem, again, "resume=True", "finish=True")


def require_same(plan: ConvertPlan, journal: Journal, before: dict[str, Any]) -> None:
    """Raise ResumeError if `plan` has another identity or other fingerprints than the interrupted run.

    `before` is the identity of the interrupted run (see `identity`).
    """
    now = identity(plan)
    for name, version in now["packages"].items():
        old = before.get("packages", {}).get(name, "an unknown version")
        if old != version:
            versions = f"was begun when {name} was {old}, but here it is {version}"
            raise _refused(plan, journal, versions, same="version")
    for name in {**before["options"], **now["options"]}:
        # An option that is missing from the stored options has its default.
        default = getattr(ConvertOptions, name, None)
        old, value = (options.get(name, default) for options in (before["options"], now["options"]))
        if old != value:
            (begun, *first), (resumed, *second) = stored_option_text(name, old), stored_option_text(name, value)
            raise _refused(plan, journal, f"was begun {begun}, but resumed {resumed}", *first, *second)
    prints, old_prints = plan.fingerprints, journal.fingerprints()
    if len(prints) != len(old_prints):
        counts = counted(len(old_prints), "image")
        raise _refused(plan, journal, f"was begun with {counts}, but {plan.source} now has {len(prints):,}")
    changed = np.flatnonzero(prints != old_prints)
    if len(changed) or before["tables"] != now["tables"] or before["shape"] != now["shape"]:
        other = "a name, label, split or field, or which images are rejected"
        name = plan.catalog.shown(int(changed[0])) if len(changed) else other
        raise source_changed(plan, journal, name)


def source_changed(plan: ConvertPlan, journal: Journal, name: str) -> ResumeError:
    """Return the error for a source that has changed; `name` is its first changed image, or says what else changed."""
    return _refused(plan, journal, f"{plan.source} has changed since the conversion began (first change: {name})")


def _refused(
    plan: ConvertPlan, journal: Journal, difference: str, *parameters: str, same: str = "options and source"
) -> ResumeError:
    partial = journal.folder.with_suffix("")
    if not plan.options.in_array_job:
        advice = f"resume with the same {same}, or start over with overwrite=True and without resume=True"
        parameters = (*parameters, "overwrite=True", "resume=True")
    else:
        advice = f"use the same {same}, or delete all of {partial}* to start over"
    return ResumeError.at(partial, f"{difference}; {advice}", *parameters)


def verify_existing(path: Path, shards: Iterable[Path], catalog: Catalog, options: ConvertOptions) -> tuple[int, int]:
    """Check that a complete output was made with these options from this source; return the counts (rows, rejects).

    Compare the images' names, splits, labels and fields, but not the images: a complete pack has no fingerprints of
    the images in its source. `shards` are the packs to which the output refers. Raises OutputExistsError.
    """
    with open_file(path) as file:
        if not is_pack(file):
            raise _different(path, "is not an h5pack file", options)
        require_complete(file)
        if text(file.attrs.get(schema.OPTIONS, b"")) != options_text(options.content()):
            raise _different(path, "was not made with these options", options)
        if not _same_source(file, catalog, options.val):
            raise _different(path, "was not made from this source", options)
        if missing := sorted(shard.name for shard in shards if not shard.exists()):
            raise _different(path, f"lacks its shard {missing[0]}", options)
        rejects = len(file[f"{schema.REJECTS}/filenames"]) if schema.REJECTS in file else 0
        return len(file[schema.FILENAMES]), rejects


def _same_source(file: h5py.File, catalog: Catalog, val: float | None) -> bool:
    """Return whether the packed and rejected names are those of the source, with the same splits, labels and fields."""
    packed = file[schema.FILENAMES][()].tolist()
    rejected = file[f"{schema.REJECTS}/filenames"][()].tolist() if schema.REJECTS in file else []
    names = [encode_text(name) for name in catalog.names]
    listed = [encode_text(reject.name) for reject in catalog.rejects]
    if sorted(packed + rejected) != sorted(names + listed):
        return False
    splits = [text(name) for name in file[schema.SPLIT_NAMES][()]]
    stored_splits = np.repeat(np.arange(len(splits)), np.diff(file[schema.SPLIT_ROWS][()], axis=1)[:, 0])
    names_of_splits = catalog.split_names
    if val is not None:
        # Do not compare which images `val` moved: that follows from the options, names, labels and fields.
        training = training_split(str(file.filename), catalog, val)
        names_of_splits = divided_names(names_of_splits, training)
        stored_splits = stored_splits - (stored_splits > training)
    if splits != list(names_of_splits):
        return False
    if any(f"{schema.FIELDS}/{one.name}" not in file for one in catalog.pixel_fields):
        return False
    labels = None
    if catalog.labels is not None:
        stored, kind = file.get(schema.LABELS), schema.CLASSES if catalog.labels.ndim == 1 else schema.COLUMNS
        if stored is None or not same_names(attribute_names(stored, kind), catalog.label_names):
            return False
        labels = stored[()]
    elif schema.LABELS in file and catalog.kind != "dataset":
        return False
    index = {name: number for number, name in enumerate(names)}
    if any(name not in index for name in packed):
        return False
    rows = np.arange(len(packed))
    if len(index) < len(names):
        images = Counter(_row_keys(names, catalog.split_ids, catalog.labels))
        if not Counter(_row_keys(packed, stored_splits, labels)) <= images:
            return False
        # If several images have the same name, it is unknown which row holds which image. Do not compare their fields.
        counts = Counter(names)
        rows = rows[[counts[name] == 1 for name in packed]]
    origins = np.array([index[packed[row]] for row in rows.tolist()], np.int64)
    if not np.array_equal(catalog.split_ids[origins], stored_splits[rows]):
        return False
    if labels is not None and catalog.labels is not None and not np.array_equal(catalog.labels[origins], labels[rows]):
        return False
    return all(_same_field(file, name, values[origins], rows) for name, values in catalog.fields.items())


def _row_keys(names: list[bytes], split_ids: npt.NDArray[Any], labels: npt.NDArray[Any] | None) -> Iterator[Any]:
    """Yield the name, split and labels of each row."""
    columns = [] if labels is None else labels.reshape(len(names), -1).T.tolist()
    return zip(names, split_ids.tolist(), *columns, strict=True)


def _same_field(file: h5py.File, name: str, values: FieldValues, rows: npt.NDArray[np.int64]) -> bool:
    """Return whether `rows` of a pack have these values. The coordinates of boxes and keypoints are not compared."""
    path = schema.field_path(name)
    if not isinstance(file.get(path), h5py.Group if isinstance(values, RaggedRows) else h5py.Dataset):
        return False
    if not isinstance(values, RaggedRows):
        return np.array_equal(row_checksums(file[path][()][rows]), row_checksums(values))
    index = index_ragged(file, path)
    found = RaggedRows(index.kind, file[index.data.name][()], index.offsets, index.classes)[rows]
    same = found.kind == values.kind and same_names(found.classes, values.classes)
    same = same and np.array_equal(found.offsets, values.offsets) and found.data.shape == values.data.shape
    if values.kind in schema.COORDINATE_KINDS:
        return same  # The coordinates in the pack are those in the resized images.
    return same and np.array_equal(found.data, values.data, equal_nan=values.data.dtype.kind == "f")


def _different(path: Path, difference: str, options: ConvertOptions) -> OutputExistsError:
    job = options.in_array_job
    how = "write all parts with overwrite=True" if job else "overwrite=True without resume=True"
    problem = f"exists, and {difference}; give another name, or {how} to replace it"
    return OutputExistsError.at(path, problem, "overwrite=True", *(() if job else ("resume=True",)))
