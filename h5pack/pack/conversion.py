"""The whole conversion: survey (one pass over all image headers before writing), plan, write and finish.

A conversion that was interrupted can be continued from where it stopped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.cluster.dask_client import count_threads, open_workers
from h5pack.cluster.parts import PartsFolder
from h5pack.errors import OptionsError
from h5pack.images.decode import MAX_PIXELS
from h5pack.pack import finish, writer
from h5pack.pack.compression import require_filter
from h5pack.pack.encode import encode_images
from h5pack.pack.estimate import estimate_seconds, table_seconds
from h5pack.pack.journal import RowRecord, RowResults, SurveyJournal
from h5pack.pack.kept import KeptPlan, copy_seconds, make_kept_plan
from h5pack.pack.options import ConvertOptions, require_suitable
from h5pack.pack.output import ConvertReport as ConvertReport
from h5pack.pack.output import Output, OutputLock, PartFile, Stages
from h5pack.pack.plan import ConvertPlan, close_holes, make_plan, refuse_reject
from h5pack.pack.resume import UnfinishedPack, verify_existing
from h5pack.pack.survey import survey, survey_identity, with_placed_fields
from h5pack.sources.catalog import Catalog
from h5pack.sources.detect import open_source
from h5pack.sources.map_style import MapStyleDataset
from h5pack.system.files import reporting_full_disk
from h5pack.system.machine import available_cpus, release_free_memory
from h5pack.system.parameters import require_local
from h5pack.system.processes import run


def convert(
    source: str | os.PathLike[str] | MapStyleDataset,
    out: str | os.PathLike[str],
    *,
    source_kind: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    limit: int | None = None,
    root: str | os.PathLike[str] | None = None,
    path_column: str | None = None,
    label_columns: str | Sequence[str] = (),
    split_column: str | None = None,
    field_columns: str | Sequence[str] = (),
    mask_columns: str | Sequence[str] = (),
    text_columns: str | Sequence[str] = (),
    box_columns: str | Sequence[str] = (),
    keypoint_columns: str | Sequence[str] = (),
    box_format: str = "xyxy",
    image_columns: str | Sequence[str] = (),
    images: str | None = None,
    labels: str | None = None,
    fields: str | Sequence[str] = (),
    channel_axis: str | None = None,
    value_range: str | tuple[float, float] | None = None,
    size: int | str | tuple[int, int] | None = None,
    fit: str = "crop",
    resample: str = "bicubic",
    draft: bool = False,
    mode: str = "rgb",
    layout: str = "nhwc",
    keep: str | None = None,
    max_side: int | None = None,
    quality: int = 90,
    order: str = "shuffled",
    seed: int = 0,
    val: float | None = None,
    chunk_rows: int | None = None,
    chunk_bytes: int | str | None = None,
    max_pixels: int = MAX_PIXELS,
    compression: str = "none",
    compat: bool = False,
    strict: bool = False,
    num_workers: int | None = None,
    start_method: str | None = None,
    io: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    part: str | tuple[int, int] | None = None,
    finish: bool = False,
    client: Any = None,
    progress: bool = False,
) -> ConvertReport:
    """Pack a folder or archive of images, the images of another HDF5 file, or a map-style dataset, into an HDF5 file.

    The file gets the name `out` only once it is complete. If a call is interrupted, even by SIGKILL, another call with
    ``resume=True`` continues it and produces the same bytes as an uninterrupted one.

    Parameters
    ----------
    source : path or map-style dataset
        A folder (of images, of class folders, of split folders, or CelebA), a tar or zip file of images or such
        folders, WebDataset shards or Parquet files (one, a folder of them, or a pattern like "shard-{000..010}.tar"), a
        CSV, TSV or JSONL manifest, any HDF5 file with a dataset of images, or a map-style dataset of uint8
        images, or of (image, label), as tuples or dicts.
    out : path
        The file to create.
    source_kind : str, optional
        flat, classes, splits, pairs (folders of images and of their masks), celeba, manifest, coco, hdf5, webdataset,
        parquet or mds. Default: detected from the source's content, except for pairs.
    include, exclude : str or sequence of str
        Shell patterns for paths relative to the source. Only images that match `include` and do not match `exclude`
        are packed.
    limit : int, optional
        Pack at most this many images, evenly spaced in source order.
    root : path, optional
        Folder that a manifest's relative paths start from, or those of COCO's images. Default: the folder that contains
        the manifest; the one that has COCO's first image.
    path_column, split_column : str, optional
        The manifest's columns of image paths and of split names. Default: detected from the column names.
    label_columns : str or sequence of str
        The manifest's column that holds the labels, or several columns of 0 and 1 for multi-label data.
    field_columns : str or sequence of str
        The manifest's columns that hold numbers to store as fields, or lists of numbers (in CSV as JSON), whose lengths
        may differ. Columns can also be those of Parquet files, where `path_column` is the column of images, or keys of
        the .json members of WebDataset shards.
    text_columns : str or sequence of str
        Columns that hold a text, or a list of texts, to store as fields; "txt" for the .txt members of WebDataset
        shards.
    mask_columns : str or sequence of str
        The manifest's columns of paths of masks. Each becomes a field: a number for each pixel of the image, which is
        cropped, padded, resized and turned with it.
    box_columns, keypoint_columns : str or sequence of str
        Columns, or keys of a map-style dataset's samples, that hold a list of boxes, or of points (x, y) or (x, y,
        visibility), in pixels of the upright image. They move with the image if it is resized.
    box_format : str
        What the numbers of a box are: xyxy (left, top, right, bottom), xywh (left, top, width, height) or cxcywh
        (centre, width, height). They are stored as xyxy.
    image_columns : str or sequence of str
        The manifest's columns of paths of further images of a sample. Each becomes a field of images of the same size.
    images, labels : str, optional
        An HDF5 file's datasets of images and of labels. Default: detected. ``labels=""`` packs no labels.
    fields : str or sequence of str
        Further datasets of an HDF5 file with one row per image, to be stored as fields; or keys of the samples of a
        map-style dataset, whose values are numbers, arrays or texts.
    channel_axis : str, optional
        The position of the channel axis in an HDF5 file's images: last, first or none. Default: detected from the
        shape.
    value_range : (float, float) or str, optional
        The two pixel values of an HDF5 file that become 0 and 255, as a pair or as text such as "0:1". Default: 0 to 1
        for floats; integers keep their values.
    size : int, (int, int) or str, optional
        Height and width in pixels of every row: a number for a square, a pair, or "218x178". Default: the images keep
        their size, which must then be the same for all.
    fit : str
        How an image is brought to `size`: crop (scale to cover, cut around the centre), pad (scale to fit, black
        borders) or stretch.
    resample : str
        Pillow's filter: nearest, box, bilinear, hamming, bicubic or lanczos.
    draft : bool
        Decode JPEGs at a half, a quarter or an eighth of their size if `size` is small enough. This is faster, but the
        pixels differ.
    mode : str
        rgb (3 channels) or gray (1).
    layout : str
        Axes of a row: nhwc (H, W, C) or nchw (C, H, W).
    keep : str, optional
        "jpeg": store the bytes of JPEG files instead of pixels, whatever their sizes. Images of other formats are
        encoded as JPEG once.
    max_side : int, optional
        With `keep`, shrink images whose longer side has more pixels, which encodes them again.
    quality : int
        With `keep`, the quality of images that are encoded, 1 to 100.
    order : str
        shuffled (each split is shuffled with `seed`) or sorted (source order).
    seed : int
        Seed of the shuffled order and of `val`, 0 to 2**63 - 1.
    val : float, optional
        Make a split "val" of this fraction of each class (of all images, if they have no classes). It is taken from
        the split for training, or from all images of a source without splits, whose others become the split "train".
    chunk_rows : int, optional
        Rows per chunk.
    chunk_bytes : int or str, optional
        Bytes per chunk, instead of `chunk_rows`: a number, or text such as "4MiB". Default: see
        `h5pack.format.plans.plan_chunks`.
    max_pixels : int
        Reject images with more pixels, which may be decompression bombs.
    compression : str
        Compression of the images' chunks: none, gzip (or gzip:1 to gzip:9), zstd (or zstd:1 to zstd:22) or
        bitshuffle-lz4.
    compat : bool
        Write a file that readers of HDF5 1.8 (pyfive, jsfive) can open, instead of requiring 1.10.
    strict : bool
        Raise at the first image that cannot be packed, instead of listing it in ``OUT.rejects.csv``.
    num_workers : int, optional
        Worker processes; with 1, this process does the work. Default: the number of CPUs this process may use.
    start_method : str, optional
        fork, forkserver or spawn. Default: fork where that is safe, else forkserver.
    io : str
        How rows are written: direct (bypasses the page cache, which takes less CPU and evicts nothing from the cache),
        buffered, or auto (direct on ext4 and XFS, else buffered).
    overwrite : bool
        Replace an existing output once the new one is complete, and discard an unfinished one.
    resume : bool
        Continue an interrupted conversion with the same options. If the output is already complete, only check that
        it was made with these options from this source.
    part : (int, int) or str, optional
        Write only this part of the rows, such as (3, 16) or "3/16": one process of an array job. All parts need the
        same options; they may run in any order, at the same time, and again. Then call once with `finish`.
    finish : bool
        Complete the output after all parts. Raises IncompletePackError that names parts with missing rows.
    client : distributed.Client, optional
        Survey, decode and write on the workers of this Dask cluster, which must see the source and the output's folder
        at the same paths. `num_workers` and `start_method` are not used.
    progress : bool
        Show progress bars on standard error if it is a terminal.

    Returns
    -------
    ConvertReport

    Raises
    ------
    H5PackError
        See `h5pack.errors`.

    Examples
    --------
    >>> h5pack.convert("photos", "photos.h5", size=224, chunk_bytes="4MiB", overwrite=True)  # doctest: +SKIP
    """
    conversion = Conversion(
        source, out, source_kind=source_kind, include=include, exclude=exclude, limit=limit, root=root,
        path_column=path_column, label_columns=label_columns, split_column=split_column, field_columns=field_columns,
        mask_columns=mask_columns, image_columns=image_columns, text_columns=text_columns, box_columns=box_columns,
        keypoint_columns=keypoint_columns, box_format=box_format, images=images, labels=labels, fields=fields,
        channel_axis=channel_axis, value_range=value_range, size=size, fit=fit, resample=resample, draft=draft,
        mode=mode, layout=layout, keep=keep, max_side=max_side, quality=quality, order=order, seed=seed, val=val,
        chunk_rows=chunk_rows, chunk_bytes=chunk_bytes, max_pixels=max_pixels, compression=compression, compat=compat,
        strict=strict, num_workers=num_workers, start_method=start_method, io=io, overwrite=overwrite, resume=resume,
        part=part, finish=finish, client=client, progress=progress,
    )  # fmt: skip
    with conversion:
        return conversion.run()


class Conversion:
    """A conversion whose plan can be inspected before it runs. A context manager with the parameters of `convert`."""

    def __init__(
        self,
        source: str | os.PathLike[str] | MapStyleDataset,
        out: str | os.PathLike[str],
        *,
        client: Any = None,
        progress: bool = False,
        **keywords: Any,
    ) -> None:
        self.options = ConvertOptions.from_keywords(keywords)
        if client is not None and self.options.part is not None:
            raise OptionsError("client and part cannot be combined; give one of them", parameters=("client", "part"))
        if self.options.filter is not None:
            require_filter(self.options.filter)
        for given in (source, out):
            if isinstance(given, (str, os.PathLike)):
                require_local(given)
        if os.fspath(out).endswith(os.sep):
            raise OptionsError(f"{os.fspath(out)}: names a folder; give the name of the file to create", path=out)
        self.output = Output(Path(os.path.abspath(out)), f"-{secrets.token_hex(6)}" if self.options.part else "")
        path = source if isinstance(source, (str, os.PathLike)) else ""
        if os.path.isfile(path) and os.path.exists(out) and os.path.samefile(path, out):
            raise OptionsError(f"{os.fspath(out)}: is the source itself; give the output another name", path=out)
        self._parts = PartsFolder(self.output.parts)
        self.output.check(self.options, lambda: self._parts.count)
        self.num_workers = self.options.num_workers or available_cpus()
        if client is not None:
            self.num_workers = max(1, count_threads(client))
        self._client = client
        self._source = source
        self._stage = Stages(progress)
        self._plan: ConvertPlan | None = None
        self._stack = contextlib.ExitStack()
        self._executor: Executor
        self._seconds = self._stage.seconds

    def __repr__(self) -> str:
        return f"Conversion({_source_name(self._source)!r}, {str(self.output.final)!r})"

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        writer.release()

    def existing_report(self) -> ConvertReport | None:
        """Return the report of an output that is already complete; None without `resume` or if work remains.

        Raises OutputExistsError if the existing output is not a pack, or has other options or another source.
        """
        output = self.output
        if not self.options.continues or not output.final.exists() or output.partial.exists():
            return None
        if self.options.overwrite and output.journal_identity() is None:
            return None
        rows, rejects = verify_existing(output.final, self.catalog, self.options)
        if not output.partial.exists():
            output.remove_leftovers()
            output.owner.unlink(missing_ok=True)
        size = output.final.stat().st_size
        return ConvertReport(str(output.final), rows, rejects, size, self.num_workers, already_complete=True)

    @functools.cached_property
    def catalog(self) -> Catalog:
        """The images that the source lists."""
        found = open_source(self._source, self.options.source_options, self.output.final.parent)
        release_free_memory()
        require_suitable(_source_name(self._source), found, self.options)
        return found

    def plan(self, *, resumable: bool = False) -> ConvertPlan:
        """List the source, survey its image headers and return the plan.

        Nothing is written, unless `resumable`, because `run` follows, and the survey takes long: see `SurveyJournal`.
        """
        if self._plan is None:
            begin = time.perf_counter()
            options, catalog = self.options, self.catalog
            if options.part is not None or options.finish:
                count = self._parts.count if options.part is None else options.part[1]
                self._parts.agree(count, options.content(), catalog)
            executor = open_workers(
                self._client, catalog.reader, self._source, self.output.partial, self.num_workers, options.start_method
            )
            self._executor = self._stack.enter_context(executor)
            journal = None
            if resumable and self._client is None and options.part is None and not options.finish:
                identity = survey_identity(self._source, catalog, options)
                journal = SurveyJournal(self.output.survey, identity, resume=options.resume)
                self._stack.enter_context(journal)
            with self._stage("survey", len(catalog)) as advance:
                surveyed = survey(
                    catalog, self._sharing("survey"), 2 * self.num_workers, options.max_pixels, advance,
                    keep=options.keep is not None, resize=options.size is not None, journal=journal,
                )  # fmt: skip
            catalog = with_placed_fields(catalog, surveyed, options)
            plan = make_plan if options.keep is None else make_kept_plan
            self._plan = plan(_source_name(self._source), catalog, surveyed, options)
            self._seconds["survey"] = time.perf_counter() - begin
        return self._plan

    def _sharing(self, stage: str) -> Executor:
        """Return the executor of a stage whose results all parts of an array job need."""
        if self.options.part is None and not self.options.finish:
            return self._executor
        return self._parts.shared_results(stage, self._executor, self.num_workers)

    def estimate_seconds(self) -> float:
        """Return an estimate of the seconds that `run` will take after the survey; see `h5pack.pack.estimate`."""
        plan = self.plan()
        if isinstance(plan, KeptPlan):
            return copy_seconds(plan, self.num_workers) + table_seconds(plan.rows)
        return estimate_seconds(plan, self._executor, self.num_workers)

    def run(self) -> ConvertReport:
        """Run the conversion and return its report."""
        existing = self.existing_report()
        if existing is not None:
            return existing
        plan = self.plan(resumable=True)
        output = self.output
        output.require_space(plan.needed_bytes)
        in_parts, distributed = self.options.part is not None, self._client is not None or self.options.finish
        lock = PartFile(output) if in_parts else OutputLock(output, distributed)
        advice = "make room, then run again" + ("" if in_parts else " with resume=True")
        try:
            with reporting_full_disk(output.partial, advice, "resume=True"):
                pack = UnfinishedPack(plan, output, lock, in_parts or distributed)
                if plan.to_encode.any():
                    with self._stage("encode", int(plan.to_encode.sum())) as advance:
                        self._plan = encode_images(pack, self._sharing("encode"), self.num_workers, advance)
                pack.allocate(self.plan())
                return self._write_part(pack) if in_parts else self._write_and_finish(pack)
        except BaseException:
            # Stop the workers before the lock is released, so that none of them writes afterwards.
            self._stack.__exit__(*sys.exc_info())
            raise
        finally:
            lock.release()

    def _write_and_finish(self, pack: UnfinishedPack) -> ConvertReport:
        plan = pack.plan
        written = pack.journal.written()
        rows_moved_before = written is not None
        if written is None:
            results = pack.earlier_results(
                self._executor, 2 * self.num_workers, self._stage, check=not self.options.finish
            )
            if self.options.finish:
                pack.require_all_parts(self._parts.count, results)
            resumed = int(results.settled.sum())
            written = self._write(pack, results)
        else:
            resumed = len(written.packed)
        begin, earlier = time.perf_counter(), sum(self._seconds.values())
        if self.options.strict:
            _refuse_rejects(plan, written)
        final = close_holes(plan.row_order.split_starts, written.packed, plan.options.order == "sorted")
        pack.begin_finish(len(final.origins))
        if not (rows_moved_before and self.options.filter is not None and finish.is_compressed(self.output.partial)):
            if rows_moved_before:
                expected = [some[final.origins] for some in written.all_checksums]
                rows = np.arange(len(final.origins))
                wrong = pack.wrong_rows(self._executor, 2 * self.num_workers, self._stage, rows, expected)
                finish.repair_rows(pack, written, final.origins, wrong)
            else:
                finish.move_rows(pack, final.origins)
            tables = finish.make_tables(pack, written, final)
            if self.options.filter is None:
                finish.complete(pack, tables)
            else:
                with self._stage("compress", len(final.origins) * len(pack.all_offsets)) as advance:
                    finish.compress(pack, tables, self._executor, 2 * self.num_workers, advance)
        rejects = plan.all_rejects(written.reasons)
        finish.publish(self.output, pack.own_lock, pack.overwrite, rejects)
        self._seconds["finish"] = time.perf_counter() - begin - (sum(self._seconds.values()) - earlier)
        return ConvertReport(
            path=str(self.output.final),
            images=len(final.origins),
            rejects=len(rejects),
            bytes=os.fstat(pack.lock.descriptor).st_size,
            num_workers=self.num_workers,
            resumed_rows=resumed,
            moved_rows=int((final.origins != np.arange(len(final.origins))).sum()),
            seconds=self._seconds,
        )

    def _write(self, pack: UnfinishedPack, results: RowResults) -> RowRecord:
        """Write the rows without a result, then record durably that every row is written or rejected."""
        self._write_rows(pack, np.flatnonzero(~results.settled), results)
        written = results.record()
        finish.require_images(pack, written)
        # Flush the rows before saving the record, so that a power cut cannot leave a record of rows that are missing.
        os.fsync(pack.lock.descriptor)
        pack.journal.save_written(written)
        return written

    def _write_rows(self, pack: UnfinishedPack, missing: npt.NDArray[np.int64], results: RowResults) -> None:
        tasks = writer.write_tasks(pack.plan, pack.job, pack.all_offsets, missing, self.num_workers)
        with self._stage("write", len(missing)) as advance:
            for records in run(self._executor, writer.write_rows, tasks, 2 * self.num_workers, writer.describe):
                for record in records:
                    results.add(record)
                    advance(len(record.packed))
                    if self.options.strict:
                        _refuse_rejects(pack.plan, record)

    def _write_part(self, pack: UnfinishedPack) -> ConvertReport:
        """Write the rows of this part that are not written yet."""
        assert self.options.part is not None
        assert isinstance(pack.lock, PartFile)
        number, count = self.options.part
        rows = pack.part_rows(number, count)
        results = pack.earlier_results(self._executor, 2 * self.num_workers, self._stage, check=True, rows=rows)
        missing = rows[~results.settled[rows]]
        try:
            self._write_rows(pack, missing, results)
        finally:
            pack.lock.require_current()
        return ConvertReport(
            path=str(self.output.final),
            images=len(rows),
            rejects=len(rows) - int(results.packed[rows].sum()),
            bytes=os.fstat(pack.lock.descriptor).st_size,
            num_workers=self.num_workers,
            resumed_rows=len(rows) - len(missing),
            seconds=self._seconds,
            part=f"{number}/{count}",
        )


def _refuse_rejects(plan: ConvertPlan, record: RowRecord) -> None:
    for row, reason in record.reasons.items():
        refuse_reject(plan.source, plan.reject(row, reason), begun=True)


def _source_name(source: str | os.PathLike[str] | MapStyleDataset) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else "dataset"
