"""`h5pack.convert`: pack the images of a source into one file, or into shards and a virtual file over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from h5pack.combine.shards import open_conversion
from h5pack.images.decode import MAX_PIXELS
from h5pack.pack.output import ConvertReport as ConvertReport
from h5pack.sources.map_style import MapStyleDataset


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
        parquet or mds. Default: detected from the source's content, except for pairs.
    include, exclude : str or sequence of str
        Shell patterns for paths relative to the source. Only images that match `include` and do not match `exclude`
        are packed.
    limit : int, optional
        Pack at most this many images, evenly spaced in source order.
    root : path, optional
        Folder to which the paths in a manifest, or the image paths of COCO, are relative. Default: the folder that
        contains the manifest; for COCO, the folder in which the first image is found.
    path_column, split_column : str, optional
        The manifest's columns of image paths and of split names. Default: detected from the column names.
    label_columns : str or sequence of str
        The manifest's column that holds the labels, or several columns of integers from 0 to 255 (0 and 1 for
        multi-label data). In a column of -1, 0 and 1, as in CelebA, -1 becomes 0.
    field_columns : str or sequence of str
        The manifest's columns of numbers, or of lists of numbers (in CSV as JSON), to store as fields. The lists may
        differ in length. For Parquet files, these are columns of the files, and `path_column` is the column of images.
        For WebDataset shards, these are keys of the .json members.
    text_columns : str or sequence of str
        Columns that hold a text, or a list of texts, to store as fields. For WebDataset shards, "txt" stands for the
        .txt members.
    mask_columns : str or sequence of str
        The manifest's columns of mask paths. Each becomes a field of masks, with a number for each pixel of the image.
        Masks are cropped, padded, resized and turned upright together with their images.
    box_columns, keypoint_columns : str or sequence of str
        Columns, or keys of a map-style dataset's samples, that hold lists of boxes, or of keypoints, (x, y) or (x, y,
        visibility). Coordinates are in pixels of the upright image. They are adapted if the image is resized.
    box_format : str
        The numbers of a box in the source: xyxy (left, top, right, bottom), xywh (left, top, width, height) or cxcywh
        (centre, width, height). Boxes are always stored as xyxy.
    image_columns : str or sequence of str
        The manifest's columns of paths of further images of a sample. Each becomes a field of images, which are
        decoded to the same size as the sample's main image.
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
        for floats; integers keep their values.
    size : int, (int, int) or str, optional
        Height and width in pixels of every row: a number for a square, a pair, or "218x178". Default: the images keep
        their size, which must then be the same for all.
    fit : str
        How an image is resized to `size`: crop (scale to cover, cut around the centre), pad (scale to fit, black
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
        in this field stay in one split. The hash of `seed` chooses groups that make up about the fraction `val` of the
        images, regardless of classes. Missing values (empty texts, NaN) are equal.
    chunk_rows : int, optional
        Rows per chunk.
    chunk_bytes : int or str, optional
        Maximum bytes per chunk, instead of `chunk_rows`: a number, or text such as "4MiB". Default: see
        `h5pack.format.plans.plan_chunks`.
    max_pixels : int
        Reject images with more pixels, which may be decompression bombs. The samples of a map-style dataset are not
        checked: it has decoded them already.
    compression : str
        Compression of the images' chunks: none, gzip (or gzip:1 to gzip:9), zstd (or zstd:1 to zstd:22) or
        bitshuffle-lz4.
    compat : bool
        Write a file that readers of HDF5 1.8 (pyfive, jsfive) can open. By default, the file requires HDF5 1.10.
    strict : bool
        Raise at the first image that cannot be packed, instead of listing it in ``OUT.rejects.csv``.
    shard_bytes : int or str, optional
        Write several packs of at most this many bytes, a number or text such as "50GiB", and a virtual file over them,
        which gets the name `out`. The packs get the names ``OUT-00000.h5`` and so on. All but the last are planned to
        consist of whole chunks.
    num_workers : int, optional
        Worker processes; with 1, this process does the work. Default: the number of CPUs this process may use.
    start_method : str, optional
        fork, forkserver or spawn. Default: fork where that is safe, else forkserver.
    io : str
        How rows are written: direct (bypasses the page cache, so takes less CPU time and evicts nothing from the
        cache), buffered, or auto (direct on ext4 and XFS, else buffered).
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
    with open_conversion(**locals()) as conversion:
        return conversion.run()
