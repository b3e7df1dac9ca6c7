"""A conversion into several packs of limited size, the shards, and a virtual file over them.

All shards have one plan, so images, splits and their order are as in one large pack. The shards are written one
after the other into the folder ``OUT.partial.shards``, and each is complete before the next one begins. When all
shards are complete, the virtual file is written as ``OUT.partial``. Finally the shards are renamed, and then the
virtual file. A resumed run sees from these files how far the interrupted run had come. A run that starts over completes
these renames if they have begun: the old output is gone then, and only its virtual file lists its shards.

A shard without any image that can be packed is left out; a file ``SHARD.rejects.json`` then lists its rejects.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5pack.combine.combination import Combination
from h5pack.combine.parts import added_statistics, merge, open_part, rejects_of, stored_options
from h5pack.combine.virtual_file import make_virtual
from h5pack.errors import OutputExistsError
from h5pack.format import schema
from h5pack.pack import finish
from h5pack.pack.conversion import Conversion
from h5pack.pack.journal import Journal
from h5pack.pack.output import ConvertReport, Output, OutputLock
from h5pack.pack.plan import ConvertPlan, NoRowsError
from h5pack.pack.resume import identity, require_same
from h5pack.sources.catalog import Reject
from h5pack.sources.map_style import MapStyleDataset
from h5pack.system.files import reporting_full_disk, require_other_files, sync_path, write_atomically


def open_conversion(
    source: str | os.PathLike[str] | MapStyleDataset, out: str | os.PathLike[str], **keywords: Any
) -> Conversion:
    """Return a conversion, into one file or into shards, with the parameters of `h5pack.convert`."""
    kind = Conversion if keywords.get("shard_bytes") is None else ShardedConversion
    return kind(source, out, **keywords)


def shard_path(out: Path, number: int) -> Path:
    """Return the path of a shard of the virtual file `out`, such as ``OUT-00000.h5``."""
    return out.with_name(f"{out.stem}-{number:05d}{out.suffix}")


def shards_of(file: Path, out: Path) -> set[Path]:
    """Return the paths of the shards that belong to `file`, the output of a conversion to `out`.

    `file` may have been renamed since. The set is empty if `file` is not the output of a conversion into shards.
    """
    try:
        with h5py.File(file, "r", locking=False) as opened:
            images = opened.get(schema.IMAGES, opened.get(schema.ENCODED_DATA))
            if "shard_bytes" not in stored_options(opened) or not images.is_virtual:
                return set()
            # Names are stored with %% instead of %, because HDF5 would replace %b by a number.
            names = {source.file_name.replace("%%", "%") for source in images.virtual_sources()}
    except OSError:
        return set()
    kind = re.compile(rf"{re.escape(out.stem)}-\d{{5,}}{re.escape(out.suffix)}")
    return {out.with_name(name) for name in names if kind.fullmatch(name)}


def _rejects_path(shard: Path) -> Path:
    """Return the path of the list of rejects that stands for a shard without images."""
    return shard.with_name(f"{shard.name}.rejects.json")


class ShardedConversion(Conversion):
    """A conversion with `shard_bytes`."""

    def _write_all(self, plan: ConvertPlan) -> ConvertReport:
        """Write all shards and the virtual file; the report counts all shards."""
        output, edges = self.output, plan.shard_edges()
        if self.options.overwrite and not self.options.continues and output.shards.exists():
            self._finish_renames()
        plans = [plan.between(start, stop) for start, stop in itertools.pairwise(edges)]
        needed = plan.needed_bytes
        if self.options.filter is not None:
            # Besides the compressed shards, only one shard at a time exists uncompressed.
            needed = min(needed, plan.file_bytes + max(one.needed_bytes for one in plans))
        output.require_space(needed)
        shards = [output.shards / shard_path(output.final, number).name for number in range(len(plans))]
        finals = {*map(self._final, shards), *shards_of(output.final, output.final)}
        require_other_files(finals, plan.catalog.reader.paths())
        if not self.options.continues or Journal(output.journal).plan() is None:
            self._require_free(shards, self.options.overwrite)
        lock = OutputLock(output, self._client is not None)
        try:
            with reporting_full_disk(output.partial, "make room, then run again with resume=True", "resume=True"):
                overwrite = self._begin(plan, lock)
                self._require_free(shards, overwrite)
                reports = []
                if not finish.is_complete(output.partial):
                    reports = [self._write_shard(one, path) for one, path in zip(plans, shards, strict=True)]
                return self._publish(lock, shards, reports, overwrite)
        finally:
            lock.release()

    def _finish_renames(self) -> None:
        """Complete the renames that an interrupted run has begun, so that no shard remains without its virtual file."""
        output = self.output
        lock = OutputLock(output, self._client is not None)
        try:
            if finish.is_complete(output.partial):
                held = [output.shards / path.name for path in shards_of(output.partial, output.final)]
                if self._replaced.exists() or not all(path.exists() for path in held):
                    self._rename(lock, overwrite=True)
        finally:
            lock.release()

    def _begin(self, plan: ConvertPlan, lock: OutputLock) -> bool:
        """Start the journal, or compare the plan with the interrupted run's plan.

        Returns whether an existing output may be replaced: if `overwrite` is set in this run or in the interrupted one.
        """
        output, journal = self.output, Journal(self.output.journal)
        before = journal.plan() if self.options.continues else None
        if before is not None:
            require_same(plan, journal, before)
            output.survey.unlink(missing_ok=True)
            return self.options.overwrite or bool(before["overwrite"])
        output.require_not_begun(lock, self.options)
        output.remove_leftovers(keep_survey=True)
        lock.renew()
        # `OutputLock.release` would remove an empty file as unused.
        os.ftruncate(lock.descriptor, schema.ALIGNMENT_BYTES)
        output.shards.mkdir()
        journal.start({**identity(plan), "overwrite": self.options.overwrite}, plan.fingerprints)
        output.survey.unlink(missing_ok=True)
        return self.options.overwrite

    def _require_free(self, shards: list[Path], overwrite: bool) -> None:
        """Unless `overwrite`, raise OutputExistsError if the output, or the final path of a shard to rename, exists."""
        moved = finish.is_complete(self.output.partial)
        for path in (self.output.final, *(self._final(shard) for shard in shards if shard.exists() or not moved)):
            if path.exists() and not overwrite:
                raise OutputExistsError(
                    f"{path}: exists; give the output another name, or overwrite=True to replace the output and its "
                    "shards",
                    path=path,
                    parameters=("overwrite=True",),
                )

    @property
    def _replaced(self) -> Path:
        return self.output.shards / "replaced"

    def _final(self, shard: Path) -> Path:
        return self.output.final.with_name(shard.name)

    def _write_shard(self, plan: ConvertPlan, path: Path) -> ConvertReport:
        output = Output(path)
        if _rejects_path(path).exists():
            return ConvertReport(str(path), 0, plan.rows, 0, self.num_workers, plan.rows)
        if path.exists() and not output.partial.exists():
            return ConvertReport(str(path), plan.rows, 0, path.stat().st_size, self.num_workers, plan.rows)
        try:
            return self.write(plan, output)
        except NoRowsError as error:
            rejects = [(reject.name, reject.reason) for reject in error.rejects]
            write_atomically(_rejects_path(path), json.dumps(rejects).encode())
            sync_path(path.parent)
            return ConvertReport(str(path), 0, plan.rows, 0, self.num_workers)

    def _publish(
        self, lock: OutputLock, shards: list[Path], reports: list[ConvertReport], overwrite: bool
    ) -> ConvertReport:
        """Make the virtual file, then give the shards and the output their final names."""
        output = self.output
        lists = [path for path in map(_rejects_path, shards) if path.exists()]
        left_out = [Reject(*reject) for path in lists for reject in json.loads(path.read_bytes())]
        shards = [path for path in shards if _rejects_path(path) not in lists]
        if not shards:
            output.remove_leftovers()
            output.partial.unlink()
            raise NoRowsError(self.plan(), left_out)
        with self._stage("finish", 0):
            if not finish.is_complete(output.partial):
                parts = [open_part(path) for path in shards]
                merged = merge(parts)
                # All rows of a split may have been rejected.
                names = self.plan().catalog.split_names
                split_ids = np.array([names.index(name) for name in merged.split_names], np.int32)[merged.split_ids]
                rejects = (*merged.rejects, *left_out)
                merged = replace(merged, split_names=names, split_ids=split_ids, rejects=rejects)
                order = np.argsort(merged.split_ids, kind="stable")
                virtual = Combination.of(None, parts, merged, order, added_statistics(parts, merged))
                make_virtual(virtual, output, lock, output.shards)
            images, num_rejects = self._rename(lock, overwrite)
        size = sum(path.stat().st_size for path in (output.final, *map(self._final, shards)))
        return ConvertReport(
            path=str(output.final),
            images=images,
            rejects=num_rejects,
            bytes=size,
            num_workers=self.num_workers,
            resumed_rows=sum(one.resumed_rows for one in reports) if reports else images,
            moved_rows=sum(one.moved_rows for one in reports),
            seconds=self._seconds,
            shards=len(shards),
        )

    def _rename(self, lock: OutputLock, overwrite: bool) -> tuple[int, int]:
        """Give the shards and the virtual file their final names; return the numbers of images and of rejects."""
        output, shards = self.output, shards_of(self.output.partial, self.output.final)
        with h5py.File(output.partial, "r", locking=False) as file:
            images, rejects = len(file[schema.FILENAMES]), rejects_of(file)
        # Move an old virtual file away first, because it must not refer to a mixture of old and new shards.
        if output.final.exists() and overwrite:
            os.replace(output.final, self._replaced)
        if self._replaced.exists():
            for path in shards_of(self._replaced, output.final) - shards:
                path.unlink(missing_ok=True)
        for path in sorted(shards):
            if (output.shards / path.name).exists():
                os.replace(output.shards / path.name, path)
        sync_path(output.final.parent)
        finish.publish(output, lock, overwrite, rejects)
        return images, len(rejects)
