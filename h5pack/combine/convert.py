"""`h5pack.convert`: pack the images of a source into one file, or into shards and a virtual file over them.

The shards are packs of limited size. All shards have one plan, so the images, the splits and the order of rows are as
in one large pack. The shards are written one after the other into the folder ``OUT.partial.shards``. Each shard is
complete before the next one begins. When all shards are complete, the virtual file is written as ``OUT.partial``.
Finally, the shards get their final names, and then the virtual file gets its final name. A resumed run sees from these
files how far the interrupted run had come. Once renaming has begun, even a run that starts over completes the renaming
first. Otherwise, the renamed shards would remain without the virtual file that refers to them.

If no image of a shard can be packed, the shard is left out. A file ``SHARD.rejects.json`` then lists the rejected
images of the shard.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from h5pack.combine.combination import Combination
from h5pack.combine.parts import added_statistics, merge, open_part, rejects_of
from h5pack.combine.write import make_virtual, virtual_name
from h5pack.errors import OutputExistsError
from h5pack.format import schema
from h5pack.images.decode import MAX_PIXELS
from h5pack.pack import finish
from h5pack.pack.conversion import Conversion
from h5pack.pack.journal import Journal
from h5pack.pack.output import ConvertReport, Output, OutputLock
from h5pack.pack.plan import ConvertPlan, NoRowsError
from h5pack.pack.resume import identity, require_same
from h5pack.sources.catalog import Reject
from h5pack.sources.map_style import MapStyleDataset
from h5pack.system.files import reporting_disk_errors, require_other_files, sync_path, write_atomically


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
    val_groups: str | None = None,
    chunk_rows: int | None = None,
    chunk_bytes: int | str | None = None,
    max_pixels: int = MAX_PIXELS,
    compression: str = "none",
    compat: bool = False,
    strict: bool = False,
    shard_bytes: int | str | None = None,
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
        A folder (of images, of class folders, of split folders, CelebA or COCO); a tar or zip file of images or such
        folders; WebDataset shards or Parquet files (one file, a folder, or a pattern like "shard-{000..010}.tar"); a
        folder of MDS shards; a CSV, TSV or JSONL manifest; a JSON file of COCO annotations; any HDF5 file with a
        dataset of images; or a map-style dataset, whose samples are uint8 images, (image, label) tuples, or dicts with
        the keys "image" and "label".
    out : path
        The file to create. If it is a symbolic link, the file that it leads to is written, and all other files are
        created beside that file.
    source_kind : str, optional
        flat, classes, splits, pairs (folders of images and of their masks), celeba, manifest, coco, hdf5, webdataset,
        parquet or mds. Default: detected from the content of the source. Pairs are never detected.
    include, exclude : str or sequence of str
        Shell patterns, each of which may match the name of a file or its path relative to the source. Only images that
        match `include` (if given) and do not match `exclude` are packed. Hidden files that no
        table names must match a pattern whose last component begins with a dot, such as "cat/.*".
    limit : int, optional
        Pack at most this many images, evenly spaced in source order.
    root : path, optional
        For a manifest, the folder to which its paths are relative. Default: the folder that contains the manifest. For
        COCO, the folder that contains the images, directly or in one of the usual subfolders. Default: the source; if
        the source is a file, the folder that contains it or the parent of that folder.
    path_column, split_column : str, optional
        The manifest's columns of image paths and of split names. Default: detected from the column names.
    label_columns : str or sequence of str
        The manifest's column that holds the labels, or several columns of integers from 0 to 255 (0 and 1 for
        multi-label data). In a column of only -1 and 1, as in CelebA, -1 becomes 0.
    field_columns : str or sequence of str
        The manifest's columns of numbers (NaN for an empty cell), or of lists of numbers (in CSV as JSON), to store as
        fields. The lists may differ in length. For Parquet files, these are columns of the files, and `path_column` is
        the column of images. For WebDataset shards, these are keys of the .json members.
    text_columns : str or sequence of str
        Columns that hold a text, or a list of texts, to store as fields. For WebDataset shards, "txt" stands for the
        .txt members.
    mask_columns : str or sequence of str
        The manifest's columns of mask paths. Each becomes a field of masks, with a number for each pixel of the image.
        Masks are cropped, padded, resized and turned upright together with their images.
    box_columns, keypoint_columns : str or sequence of str
        Columns, or keys of a map-style dataset's samples, that hold a list of boxes, or a list of keypoints: (x, y) or
        (x, y, visibility). Coordinates are in pixels of the upright image. They are adapted if the image is resized.
    box_format : str
        The numbers of a box in the source: xyxy (left, top, right, bottom), xywh (left, top, width, height) or cxcywh
        (center, width, height). Boxes are always stored as xyxy.
    image_columns : str or sequence of str
        The manifest's columns that hold paths of further images for each sample. Each column becomes a field of images,
        which are decoded to the same size as the sample's main image.
    images, labels : str, optional
        Names of an HDF5 file's datasets of images and of labels. Default: detected. ``labels=""`` packs no labels.
    fields : str or sequence of str
        Names of an HDF5 file's further datasets with one row per image, or keys of a map-style dataset's samples whose
        values are numbers, arrays or texts. They are stored as fields.
    channel_axis : str, optional
        The position of the channel axis in an HDF5 file's images: last, first or none. Default: detected from the
        shape.
    value_range : (float, float) or str, optional
        The two pixel values of an HDF5 file that become 0 and 255, as a pair or as text such as "0:1". Default: 0 and 1
        for floats and bools, 0 and 255 for integers except uint16. By default, uint16 values are replaced by their high
        bytes.
    size : int, (int, int) or str, optional
        Height and width in pixels of every row: a number for a square, a pair, or "218x178". Default: the images keep
        their size. All images must then have the same size, except with `keep`.
    fit : str
        How an image is resized to `size`: crop (scale to cover, cut around the center), pad (scale to fit, black
        borders) or stretch.
    resample : str
        Pillow's filter for resizing: nearest, box, bilinear, hamming, bicubic or lanczos.
    draft : bool
        Decode JPEGs at a half, a quarter or an eighth of their size if `size` is small enough. This is faster, but the
        pixels differ.
    mode : str
        rgb (3 channels) or gray (1).
    layout : str
        Axes of a row: nhwc (H, W, C) or nchw (C, H, W).
    keep : str, optional
        "jpeg": store the bytes of JPEG files instead of pixels. The images may differ in size. Images of other formats
        are encoded as JPEG.
    max_side : int, optional
        With `keep`, shrink images whose longer side has more than this many pixels, and encode them again.
    quality : int
        With `keep`, the quality of images that are encoded, 1 to 100.
    order : str
        shuffled (each split is shuffled with `seed`) or sorted (source order).
    seed : int
        Seed of the shuffled order and of `val`, 0 to 2**63 - 1.
    val : float, optional
        Move this fraction of each class (of all images, if there are no classes) from the training split to a split
        "val". A source without splits is divided into "train" and "val".
    val_groups : str, optional
        Name of a field, such as the person in an image, or the path of a dataset in `fields`. Images with equal values
        in this field form a group, which is not divided between splits. Missing values (empty texts, NaN) count as
        equal. Groups with about the fraction `val` of the images become the split "val". The choice depends on `seed`
        but not on the classes.
    chunk_rows : int, optional
        Rows per chunk.
    chunk_bytes : int or str, optional
        Maximum bytes per chunk, instead of `chunk_rows`: a number, or text such as "4MiB". Default: about 4 MiB, but
        at least one row. Small packs get smaller chunks, so that there are enough chunks to shuffle. See
        `h5pack.format.plans.plan_chunks` for details.
    max_pixels : int
        Reject images with more pixels, which may be decompression bombs. The samples of a map-style dataset are not
        checked, because the dataset has already decoded them.
    compression : str
        Compression of the images' chunks: none, gzip (or gzip:1 to gzip:9), zstd (or zstd:1 to zstd:22) or
        bitshuffle-lz4.
    compat : bool
        Write a file that readers of HDF5 1.8 can open, such as pyfive and jsfive (which does not read splits and
        statistics). By default, the file requires HDF5 1.10.
    strict : bool
        Raise at the first image that cannot be packed, instead of listing it in ``OUT.rejects.csv``.
    shard_bytes : int or str, optional
        Write several packs of at most this many bytes: a number, or text such as "50GiB". For `out` "train.h5", they
        are "train-00000.h5" and so on. The file `out` then has virtual datasets that refer to these packs. All packs
        but the last are planned to consist of whole chunks (with `keep`, of whole images). With `keep`, packs may be
        larger if they have masks, or images that h5pack encodes, because the sizes of these are estimated.
    num_workers : int, optional
        Worker processes; with 1, this process does the work. Default: the number of CPUs this process may use.
    start_method : str, optional
        fork, forkserver or spawn. Default: fork where that is safe, else forkserver.
    io : str
        How rows are written: direct, buffered, or auto (direct on ext4 and XFS, else buffered). Direct writes bypass
        the page cache. They take less CPU time and evict nothing from the page cache.
    overwrite : bool
        Replace an existing output once the new one is complete, and discard an unfinished one.
    resume : bool
        Continue an interrupted conversion with the same options. If the output is already complete, only check that
        it was made with these options from this source.
    part : (int, int) or str, optional
        Write only one part of the rows, in one process of an array job: (3, 16) or "3/16" is the third of 16 parts. All
        parts need the same options. They may run in any order, at the same time, and repeatedly. When all are written,
        call once with `finish`.
    finish : bool
        Complete the output after all parts are written. If rows are missing, the IncompletePackError names their parts.
    client : distributed.Client, optional
        Survey, decode and write on the workers of this Dask cluster, which must see the source and the output's folder
        at the same paths. `num_workers` and `start_method` are ignored.
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
    # `locals` has only the parameters, because this is the first statement.
    with ShardedConversion(**locals()) as conversion:
        return conversion.run()


def shard_path(out: Path, number: int) -> Path:
    """Return the path of a shard of the virtual file `out`, such as "train-00000.h5" for "train.h5"."""
    return out.with_name(f"{out.stem}-{number:05d}{out.suffix}")


def _rejects_path(shard: Path) -> Path:
    """Return the path of the list of rejected images that is written instead of a shard without images."""
    return shard.with_name(f"{shard.name}.rejects.json")


class ShardedConversion(Conversion):
    """Conversion with the parameters of `h5pack.convert`: into shards if `shard_bytes` is given, else into one file."""

    def _write_all(self, plan: ConvertPlan) -> ConvertReport:
        """Write all shards and the virtual file; return a report with their totals."""
        output, plans = self.output, plan.shards()
        if self.options.overwrite and not self.options.continues and output.shards.exists():
            self._finish_renames()
        if self.options.shard_bytes is None:
            return super()._write_all(plan)
        output.require_space(plan.needed_bytes)
        shards = [output.shards / shard_path(output.final, number).name for number in range(len(plans))]
        # The shards have similar names. Raise now if the names are not valid UTF-8, which a virtual file cannot store.
        virtual_name(str(output.final), output.final.parent)
        finals = {*map(self._final, shards), *finish.shards_of(output.final, output.final)}
        require_other_files(finals, plan.catalog.reader.paths())
        advice = "make room, then run again with resume=True"
        with (
            reporting_disk_errors(output.partial, advice, "resume=True"),
            contextlib.closing(OutputLock(output, self._client is not None)) as lock,
        ):
            before = Journal(output.journal).plan() if self.options.continues else None
            overwrite = self.options.overwrite or (before is not None and bool(before["overwrite"]))
            self._require_free(shards, overwrite)
            self._begin(plan, lock, before)
            reports = []
            if not finish.is_complete(output.partial):
                reports = [self._write_shard(one, path) for one, path in zip(plans, shards, strict=True)]
            return self._publish(lock, shards, reports, overwrite)

    def _finish_renames(self) -> None:
        """Complete the renaming if an interrupted run has begun it, so that no shard remains without a virtual file."""
        output = self.output
        with contextlib.closing(OutputLock(output, self._client is not None)) as lock:
            if finish.is_complete(output.partial):
                held = [output.shards / path.name for path in finish.shards_of(output.partial, output.final)]
                if self._replaced.exists() or not all(path.exists() for path in held):
                    self._rename(lock, overwrite=True)

    def _begin(self, plan: ConvertPlan, lock: OutputLock, before: dict[str, Any] | None) -> None:
        """Start the journal. If `before`, the plan of an interrupted run, is given, require `plan` to be the same."""
        output, journal = self.output, Journal(self.output.journal)
        if before is not None:
            require_same(plan, journal, before)
        else:
            output.require_not_begun(lock, self.options)
            output.remove_leftovers(keep_survey=True)
            lock.renew()
            # Give the file a size, because `OutputLock.close` would remove an empty one.
            os.ftruncate(lock.descriptor, schema.ALIGNMENT_BYTES)
        # A new run must create the folder itself, so that the folder has no old shards. When resuming, the folder may
        # exist.
        output.shards.mkdir(exist_ok=before is not None)
        if before is None:
            journal.start({**identity(plan), "overwrite": self.options.overwrite}, plan.fingerprints)
        output.survey.unlink(missing_ok=True)

    def _require_free(self, shards: list[Path], overwrite: bool) -> None:
        """Raise OutputExistsError if the output exists, or the final path of a shard that is still to be renamed.

        Do nothing if `overwrite` is true.
        """
        moved = finish.is_complete(self.output.partial)
        finals = (self._final(shard) for shard in shards if shard.exists() or not moved)
        for path in () if overwrite else (self.output.final, *finals):
            if path.exists():
                problem = "exists; give the output another name, or overwrite=True to replace the output and its shards"
                raise OutputExistsError.at(path, problem, "overwrite=True")

    @property
    def _replaced(self) -> Path:
        return self.output.shards / "replaced"

    def _final(self, shard: Path) -> Path:
        return self.output.final.with_name(shard.name)

    def _write_shard(self, plan: ConvertPlan, path: Path) -> ConvertReport:
        output = Output(path, permissions_of=self.output.permissions_of)
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
        """Make the virtual file unless it is complete, then give the shards and the output their final names."""
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
                # As in one pack, an image that several lines of a table name is listed for each of them.
                listed = [reject for part in parts for reject in part.rejects]
                merged = replace(merge(parts), rejects=(*listed, *left_out))
                order = np.argsort(merged.split_ids, kind="stable")
                virtual = Combination.of(None, parts, merged, order, added_statistics(parts, merged.split_names))
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
        output, shards = self.output, finish.shards_of(self.output.partial, self.output.final)
        with finish.open_unlocked(output.partial) as file:
            images, rejects = len(file[schema.FILENAMES]), rejects_of(file)
        # Move an old virtual file away first. Otherwise, it would refer to a mixture of old and new shards meanwhile.
        if output.final.exists() and overwrite:
            os.replace(output.final, self._replaced)
        if self._replaced.exists():
            for path in finish.shards_of(self._replaced, output.final) - shards:
                path.unlink(missing_ok=True)
        for path in sorted(shards):
            if (output.shards / path.name).exists():
                os.replace(output.shards / path.name, path)
        sync_path(output.final.parent)
        finish.publish(Output(output.final, permissions_of=self._replaced), lock, overwrite, rejects)
        return images, len(rejects)
