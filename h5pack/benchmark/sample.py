"""The input of a benchmark, and its sample: some of the images, packed with each chunk size and compression."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py

from h5pack.benchmark.cases import DEFAULT_CHUNK_BYTES, BenchSettings, FileVariant, is_small
from h5pack.benchmark.synthetic import MAX_SIDE, make_folder
from h5pack.combine.convert import convert
from h5pack.data.dataset import H5Dataset
from h5pack.errors import (
    H5PackError,
    NoImagesError,
    NoSpaceError,
    OptionsError,
    SizesDifferError,
    SourceError,
    WorkerError,
)
from h5pack.format import schema
from h5pack.format.plans import plan_chunks
from h5pack.inspect.info import describe_dataset
from h5pack.pack.conversion import Conversion
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import ConvertReport
from h5pack.read.encoded import EncodedIndex
from h5pack.read.hdf5 import find_item, open_file, reporting_damage, require_dataset
from h5pack.sources.catalog import Catalog
from h5pack.sources.detect import open_source
from h5pack.sources.folders import split_rank
from h5pack.sources.hdf5_catalog import is_hdf5, packing_options
from h5pack.sources.hdf5_rows import HDF5RowReader
from h5pack.sources.hdf5_tables import is_text
from h5pack.system.files import absolute_path, lock, open_locked, reporting_disk_errors
from h5pack.system.machine import available_cpus, available_memory, free_bytes
from h5pack.system.parameters import require_local
from h5pack.system.processes import ONE_WORKER
from h5pack.system.text import counted, listed

MIN_IMAGES = 8
MANY_IMAGES = 1_000_000
MAX_SAMPLE_BYTES = 512 * 1024 * 1024
# If images are small, generate more of them, so that an epoch takes many milliseconds.
_GENERATED_IMAGES, _GENERATED_BYTES, _GENERATED_SIZE = 4_000, 96 * 1024 * 1024, (218, 178)
_FILES = 2_000
"""Maximum number of generated files. Larger samples repeat them, because writing a file takes as long as packing it."""
_FALLBACK_SIZE = (224, 224)
_PROBE_IMAGES, _PROBE_BYTES, _PROBE_SECONDS = (64, 512), 64 * 1024 * 1024, 0.1
_PACKING_SHARE = 0.2
"""Fraction of the remaining time for packing the sample. After twice this time, no more file variants are made."""
_PREFIX, _LOCK = ".h5pack-bench-", "lock"
_LESS_SPACE = "give another scratch=FOLDER, fewer rows or fewer chunk sizes"


@contextlib.contextmanager
def scratch_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Make a temporary folder in `parent`, yield its path, and remove it at the end of the `with` block.

    If `parent` is None, use the working directory if it is writable, else the system's temporary folder. First, remove
    the folders of killed runs from it: those whose lock no process holds.
    """
    folder = Path.cwd() if parent is None else Path(absolute_path(parent))
    try:
        if parent is None and not os.access(folder, os.W_OK | os.X_OK):
            folder = Path(tempfile.gettempdir())
        for abandoned in folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), (abandoned / _LOCK).open("rb+") as stream:
                if lock(stream.fileno()):
                    shutil.rmtree(abandoned)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    except OSError as error:
        raise OptionsError.at(
            folder, f"cannot create temporary files ({error.strerror}); give another scratch=FOLDER", "scratch=FOLDER"
        ) from error
    descriptor = open_locked(path / _LOCK, f"{path}: in use by another process")
    try:
        with reporting_disk_errors(path, _LESS_SPACE):
            yield path
    except H5PackError as error:
        # Replace errors of `convert` that recommend parameters such as `resume`, which `bench` does not have.
        is_full = isinstance(error, NoSpaceError)
        is_inside = error.path is not None and Path(error.path).is_relative_to(path)
        if not is_inside or not (is_full or "resume=True" in error.parameters):
            given = {fragment.partition("=")[0] for fragment in error.parameters}
            missing = sorted(given - {one.name for one in fields(BenchSettings)})
            if not missing or not isinstance(error, SourceError):
                raise
            raise _advising_convert(error, missing) from error
        if is_full:
            problem = f"temporary files do not fit; make room, raise 'ulimit -f', or {_LESS_SPACE}"
            raise NoSpaceError.at(folder, problem, "scratch=FOLDER") from error
        problem = "temporary files cannot be written or read; check the disk, or give another scratch=FOLDER"
        raise H5PackError.at(folder, problem, "scratch=FOLDER") from error
    finally:
        # Close the lock file first: on NFS and FUSE, an open file cannot be removed completely, nor can its folder.
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


def _advising_convert(error: SourceError, missing: Sequence[str]) -> SourceError:
    """Return an error that recommends `convert`, because `bench` has none of the parameters `missing`."""
    advice = f"bench has no {' or '.join(missing)}: make a pack with 'h5pack convert', and measure that"
    # Of the public classes, because subclasses may be constructed from other arguments.
    kind = next(one for one in (NoImagesError, SizesDifferError, SourceError) if isinstance(error, one))
    return kind(
        f"{error}; {advice}", path=error.path, dataset=error.dataset, rows=error.rows, parameters=error.parameters
    )


@dataclass(frozen=True, kw_only=True)
class BenchInput:
    """The images or the file to benchmark."""

    kind: str  # "folder", "file" or "generated".
    source: str  # Path of the images or of the file, as `convert` accepts it.
    num_images: int  # Number of images in the source. The dataset may have more (see `dataset_images`).
    options: dict[str, Any]  # Keywords for converting the images with `convert`.
    split: str | None = None  # The split that a training reads; None if no split has a conventional name for it.
    variant: FileVariant | None = None  # The input file as it is; None if the input is not an HDF5 file.
    # Names of further datasets of the input file: numbers, with one row per image.
    fields: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # Faults of the file's layout, as in the report of `h5pack.info`.
    fix: str | None = None  # The command that fixes the faults; None without faults.
    not_convertible: str = ""  # Why `convert` refuses the input; empty if it does not. It may still reject all images.


def find_input(path: str | os.PathLike[str] | None, scratch: Path, settings: BenchSettings) -> BenchInput:
    """Open the input of a benchmark. If `path` is None, generate images in `scratch`.

    A large sample repeats the generated images.
    """
    names = ("size", "images", "labels", "source_kind")
    options = {name: value for name in names if (value := getattr(settings, name)) is not None}
    if path is None:
        folder, (height, width) = scratch / "images", options.get("size") or _GENERATED_SIZE
        row_bytes = 3 * height * width
        count = min(max(_GENERATED_IMAGES, _GENERATED_BYTES // row_bytes), MAX_SAMPLE_BYTES // row_bytes)
        count = max(MIN_IMAGES, settings.rows or min(count, settings.num_images or count))
        make_folder(folder, min(count, _FILES), (min(height, MAX_SIDE), min(width, MAX_SIDE)))
        options.pop("source_kind", None)
        return BenchInput(kind="generated", source=_repeated(folder, count), num_images=count, options=options)
    require_local(path, "source")
    source = os.fsdecode(path)
    if os.path.isfile(source) and is_hdf5(Path(source)):
        found = _hdf5_input(source, options, scratch)
    else:
        catalog = open_source(source, ConvertOptions.from_keywords(options).source_options, scratch)
        split = _training_split(catalog.split_names)
        found = BenchInput(kind="folder", source=source, num_images=len(catalog), options=options, split=split)
    if found.num_images < MIN_IMAGES:
        images = counted(found.num_images, "image")
        raise OptionsError.at(source, f"{images}, too few to measure; at least {MIN_IMAGES} are needed")
    return found


def _repeated(folder: Path, count: int) -> str:
    """Write a manifest of `count` images that repeats the files in the class folders of `folder`; return its path."""
    files = itertools.islice(itertools.cycle(sorted(folder.glob("*/*"))), count)
    manifest = folder / "images.csv"
    with manifest.open("w") as stream:
        stream.write("path,label\n")
        stream.writelines(f"{one.relative_to(folder)},{one.parent.name}\n" for one in files)
    return str(manifest)


def _hdf5_input(path: str, options: dict[str, Any], scratch: Path) -> BenchInput:
    images = options.get("images") or schema.IMAGES
    refusal: SourceError | None = None
    try:
        reader = open_source(path, ConvertOptions.from_keywords(options).source_options, scratch).reader
        if isinstance(reader, HDF5RowReader):
            images = reader.images
    except SourceError as error:
        # Rows that are not images cannot be converted, but reading them can still be measured.
        refusal = error
    try:
        dataset = H5Dataset(path, images=images, labels=None)
    except H5PackError as error:
        raise refusal or error from None
    if isinstance(dataset.engine.indexes[dataset.names[0]], EncodedIndex):
        problem = (
            "keeps JPEG files, so there are no chunks of pixels to compare; convert it to a pack of pixels "
            "and measure that, or measure the folder of the original images"
        )
        raise OptionsError.at(path, problem)
    with open_file(path) as file, reporting_damage(path, SourceError):
        stored = describe_dataset(require_dataset(file, dataset.names[0]), options.get("labels"), missing={})
        options = {"images": images, **packing_options(file, dataset.names[0], options.get("labels")), **options}
        labels = options.get("labels", schema.LABELS) or None
        # `convert` also accepts labels that are texts, or that have shape (1, N) as in files of MATLAB. Batches cannot
        # have such labels.
        item = None if labels is None else find_item(file, labels)
        if is_text(item) or getattr(item, "shape", None) == (1, len(dataset)):
            labels = None
        fields = filter(None, options.get("fields", "").split(","))
        numbers = tuple(name for name in fields if not is_text(find_item(file, name)))
    dataset = H5Dataset(path, images=images, labels=labels)
    return BenchInput(
        kind="file",
        source=path,
        num_images=len(dataset),
        options=options,
        split=_training_split(dataset.splits),
        variant=_variant(dataset, "as it is"),
        fields=numbers,
        faults=stored.faults,
        fix=None if stored.fix is None else shlex.join(stored.fix),
        not_convertible=str(refusal or ""),
    )


def _training_split(names: Iterable[str]) -> str | None:
    """Return the first of `names` that is conventional for a training split, such as "train"; None if there is none."""
    return next((name for name in names if split_rank(name) == 0), None)


def _variant(dataset: H5Dataset, label: str, compression: str | None = None) -> FileVariant:
    """Return the file of a dataset as a variant. If `compression` is None, the file is the input file itself."""
    index = dataset.engine.indexes[dataset.names[0]]
    # The file may hold only a link to the dataset, possibly in another file. h5py follows such links.
    with open_file(dataset.path) as file:
        stored = describe_dataset(require_dataset(file, dataset.names[0]), missing={})  # `dataset` has its sources.
    chunks = None if index.is_encoded else stored.chunks
    filters = "encoded images" if index.is_encoded else "+".join(stored.filters) or "none"
    return FileVariant(
        label=label,
        path=dataset.path,
        images=dataset.names[0],
        labels=dataset.label_name,
        rows=len(dataset),
        chunk_rows=None if chunks is None else chunks[0],
        chunk_bytes=None if chunks is None else math.prod(chunks) * index.dtype.itemsize,
        # Images that differ in size have no common row shape, so their row_bytes may be 0.
        row_bytes=max(1, index.row_bytes),
        compression=compression or filters,
        stored_bytes=stored.stored_bytes,
        overhead=stored.overhead,
        is_input=compression is None,
    )


@dataclass
class BenchSample:
    """The packed sample of a benchmark."""

    variants: list[FileVariant]
    rows: int
    row_bytes: int
    row_shape: tuple[int, ...]
    options: dict[str, Any]  # Keywords of `convert`. The sample was packed with them, except `fields`.
    pack_images_per_s: float | None = None  # None if the input file cannot be converted.
    # Chunk size in rows that `convert` chooses by default for the whole dataset (see `dataset_images`), but at most the
    # number of images in the source. 0 if the input file cannot be converted.
    default_chunk_rows: int = 0
    notes: list[str] = field(default_factory=list)  # Remarks on what was left out, and why.
    not_packed: list[str] = field(default_factory=list)  # Labels of chunked variants that there was no time to pack.


def dataset_images(source: BenchInput, settings: BenchSettings) -> int | None:
    """Return how many images the whole dataset has; None if generated images stand for a dataset of any size."""
    return settings.num_images or (None if source.kind == "generated" else source.num_images)


def usual_sizes(default_chunk_rows: int, row_bytes: int) -> set[int]:
    """Return the chunk sizes to compare, in rows: the default, and usual sizes that differ from it by over 10 %."""
    sizes = {_chunk_rows(size, row_bytes) for size in DEFAULT_CHUNK_BYTES}
    return {default_chunk_rows, *(rows for rows in sizes if abs(rows - default_chunk_rows) > 0.1 * default_chunk_rows)}


def _chunk_rows(chunk_bytes: int, row_bytes: int) -> int:
    """Return the number of rows of each chunk that `convert` makes for `chunk_bytes` without compression."""
    return plan_chunks(MANY_IMAGES, row_bytes, chunk_bytes=chunk_bytes, whole_pages=True).rows


def make_sample(
    source: BenchInput, settings: BenchSettings, scratch: Path, clock: Callable[[], float], seconds: float
) -> BenchSample:
    """Pack a sample with each chunk size and compression. The whole benchmark has `seconds` left, including packing."""
    if source.not_convertible and source.variant is not None:
        return _input_only(source, source.variant, settings, source.not_convertible)
    begin = clock()
    packer = _Packer(source, scratch)
    try:
        row_bytes, speed = packer.probe()
    except NoImagesError as error:
        # Rows may have values that `convert` refuses, such as normalized pixels; reading them can still be measured.
        if source.variant is None:
            raise
        return _input_only(source, source.variant, settings, str(error))
    count = dataset_images(source, settings) or MANY_IMAGES
    default_chunk_rows = min(plan_chunks(count, row_bytes, whole_pages=True).rows, source.num_images)
    given = {*settings.chunk_rows, *(_chunk_rows(size, row_bytes) for size in settings.chunk_bytes)}
    wanted = sorted(given or usual_sizes(default_chunk_rows, row_bytes))
    if not given and is_small(min(settings.rows or source.num_images, source.num_images), row_bytes):
        wanted, settings = [default_chunk_rows], replace(settings, contiguous=False)
    num_files = len(wanted) * len(settings.compression) + settings.contiguous
    base, sizes = scratch / "base.h5", partial(_sizes_for, wanted, default_chunk_rows)
    row_limit = partial(_sample_rows, source, settings, scratch, row_bytes, num_files)
    packed_by, rows = begin + _PACKING_SHARE * seconds, 0
    # Pack again while there is time for at least twice as many rows. At first, `speed` is only an estimate from a few
    # images.
    while (more := row_limit(int(speed * (packed_by - clock())))) >= 2 * rows:
        rows = more
        report = packer.convert(base, limit=rows, chunk_rows=sizes(rows)[0], overwrite=True)
        speed = report.images / max(1e-3, report.seconds["write"])
    chunk_rows = sizes(rows)
    if (settings.rows or 0) > source.num_images:
        packer.notes.append(f"The sample has fewer than {settings.rows:,} rows: there are only {rows:,} images.")
    if len(chunk_rows) < len(wanted):
        left_out = listed([f"{count:,}" for count in wanted if count not in chunk_rows])
        packer.notes.append(f"Omitted chunks of {left_out} rows: the sample's {rows:,} rows do not fill two of them.")
    if report.rejects:
        packer.notes.append(f"Rejected: {counted(report.rejects, 'image')} of the sample; 'h5pack convert' says why.")
    dataset = H5Dataset(base)
    index = dataset.engine.indexes[dataset.names[0]]
    end = begin + 2 * _PACKING_SHARE * seconds
    variants, not_packed = _make_variants(packer, base, settings, chunk_rows, lambda: clock() > end)
    if source.variant is not None:
        variants.insert(0, _first_rows(source.variant, rows))
    return BenchSample(
        variants=variants,
        rows=report.images,
        row_bytes=index.row_bytes,
        row_shape=index.row_shape,
        options=packer.options,
        # `speed` counts only the time for writing, because starting workers takes negligible time for a whole folder.
        pack_images_per_s=speed,
        default_chunk_rows=default_chunk_rows,
        notes=packer.notes,
        not_packed=not_packed,
    )


class _Packer:
    """Converts images of the input. If their sizes differ and `size` is not given, it resizes them to 224x224."""

    def __init__(self, source: BenchInput, folder: Path) -> None:
        self._source, self._folder = source.source, folder
        self.options = source.options
        self.notes: list[str] = []
        self._workers: dict[str, int] = {}  # {"num_workers": 1} after workers failed to start.

    def probe(self) -> tuple[int, float]:
        """Convert a few images; return the bytes per row, and the estimated images/s when all CPUs convert."""
        row_bytes, speed = 0, 0.0
        path = self._folder / "first.h5"
        # Convert two images first to learn the size of a row, which may be hundreds of megabytes.
        for limit in (2, *_PROBE_IMAGES):
            limit = min(limit, max(2, _PROBE_BYTES // row_bytes)) if row_bytes else limit
            report = self.convert(path, limit=limit, num_workers=1, overwrite=True)
            speed = available_cpus() * report.images / max(1e-3, report.seconds["write"])
            dataset = H5Dataset(path)
            row_bytes = dataset.engine.indexes[dataset.names[0]].row_bytes
            if report.images > 2 and report.seconds["write"] > _PROBE_SECONDS:
                break
        path.unlink()
        return row_bytes, speed

    @functools.cached_property
    def _catalog(self) -> Catalog:
        options = ConvertOptions.from_keywords(self._options())
        return open_source(self._source, options.source_options, self._folder)

    def _options(self) -> dict[str, Any]:
        # Do not pack the datasets in `fields`, which would only take time.
        return {name: value for name, value in self.options.items() if name != "fields"}

    def convert(self, path: Path, *, limit: int, **changes: Any) -> ConvertReport:
        while True:
            options = {**self._options(), **changes, **self._workers}
            try:
                with Conversion(self._source, path, limit=limit, **options) as conversion:
                    conversion.catalog = self._catalog.evenly_spaced(limit)  # List the images only once.
                    return conversion.run()
            except SizesDifferError:
                if self.options.get("size") is not None:
                    raise
                self.options = {**self.options, "size": _FALLBACK_SIZE}
                self.notes.append("The images differ in size: they were resized to 224x224.")
            except WorkerError as error:
                if ONE_WORKER not in error.parameters or self._workers:
                    raise
                self._workers = {"num_workers": 1}
                note = "The sample was packed in one process, because workers cannot start from this program."
                self.notes.append(note)


def _make_variants(
    packer: _Packer, base: Path, settings: BenchSettings, chunk_rows: list[int], is_late: Callable[[], bool]
) -> tuple[list[FileVariant], list[str]]:
    """Convert `base` to all variants that time allows. Return these, and the labels of omitted chunked variants."""
    made: list[FileVariant] = []
    late: list[str] = []
    kept = {name: packer.options[name] for name in ("layout", "mode") if name in packer.options}
    for compression, count in itertools.product(settings.compression, chunk_rows):
        label = counted(count, "row") + ("" if compression == "none" else f" {compression}")
        path = base
        if (count, compression) != (chunk_rows[0], "none"):
            if made and is_late():
                late.append(label)
                continue
            path = base.parent / f"{count}-{compression}.h5".replace(":", "-")
            # Use one process, because workers would not pack these few rows faster.
            convert(base, path, num_workers=1, order="sorted", chunk_rows=count, compression=compression, **kept)
        made.append(_variant(H5Dataset(path), label, compression))
    made.sort(key=lambda one: (settings.compression.index(one.compression), one.chunk_rows or 0))
    left_out = list(late)
    if settings.contiguous and (late or is_late()):
        left_out.append("contiguous")
    elif settings.contiguous:
        path = base.parent / "contiguous.h5"
        _write_contiguous(base, path)
        made.append(_variant(H5Dataset(path), "contiguous", "none"))
    if left_out:
        packer.notes.append(f"Not packed for lack of time: {', '.join(left_out)}.")
    return made, late


def _sizes_for(wanted: Sequence[int], default_chunk_rows: int, rows: int) -> list[int]:
    """Return the chunk sizes in `wanted` that are at most half of `rows`, and in any case the smallest size.

    The sizes closest to the default come first, because the last ones are omitted if time is short.
    """
    some = [count for count in wanted if count == wanted[0] or 2 * count <= rows]
    return sorted(some, key=lambda count: abs(math.log(count / default_chunk_rows)))


def _sample_rows(
    source: BenchInput, settings: BenchSettings, scratch: Path, row_bytes: int, num_files: int, rows_in_time: int
) -> int:
    """Return how many rows to sample: `settings.rows` or as many as time, disk and memory allow.

    Raise NoSpaceError if the files of these rows do not fit on the disk.
    """
    free = free_bytes(scratch)
    max_bytes = min(MAX_SAMPLE_BYTES, available_memory() // (3 * num_files), int(0.8 * free) // num_files)
    allowed = min(max_bytes // row_bytes, max(rows_in_time, _PROBE_IMAGES[0]))
    rows = max(MIN_IMAGES, min(source.num_images, allowed if settings.rows is None else settings.rows))
    size = int(1.1 * rows * row_bytes * num_files)
    if size > free:
        raise NoSpaceError.at(
            scratch.parent,
            f"temporary files need {size:,} bytes, but only {free:,} are free; {_LESS_SPACE}",
            "scratch=FOLDER",
        )
    return rows


def _write_contiguous(base: Path, path: Path) -> None:
    """Copy the rows of a pack into a dataset without chunks, the default layout of h5py's ``create_dataset``."""
    with open_file(base) as source, h5py.File(path, "w", libver=("v110", "v110")) as file:
        images = source[schema.IMAGES]
        copied = file.create_dataset(schema.IMAGES, images.shape, images.dtype)
        for rows in images.iter_chunks():
            copied[rows] = images[rows]
        if schema.LABELS in source:
            file[schema.LABELS] = source[schema.LABELS][()]


def _first_rows(variant: FileVariant, rows: int) -> FileVariant:
    """Return the variant restricted to its first `rows` rows, rounded up to whole chunks."""
    if variant.chunk_rows is not None:
        rows = -(-rows // variant.chunk_rows) * variant.chunk_rows
    return replace(variant, rows=min(variant.rows, rows))


def _input_only(source: BenchInput, variant: FileVariant, settings: BenchSettings, reason: str) -> BenchSample:
    """Return the first rows of the input file as the sample, because the file cannot be converted."""
    rows = settings.rows or max(MIN_IMAGES, min(MAX_SAMPLE_BYTES, available_memory() // 4) // variant.row_bytes)
    first = _first_rows(variant, rows)
    dataset = H5Dataset(first.path, images=first.images, labels=first.labels)
    shape = dataset.engine.indexes[first.images].row_shape
    note = f"No other chunk sizes were measured, because the input file cannot be converted: {reason}"
    return BenchSample([first], first.rows, first.row_bytes, shape, source.options, notes=[note])
