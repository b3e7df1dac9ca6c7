"""The options of a conversion: the keywords of `h5pack.convert`, parsed and validated."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from pathlib import Path
from typing import Any

from h5pack.errors import OptionsError, RejectedImageError
from h5pack.format import schema
from h5pack.format.fields import BOX_FORMATS, field_name
from h5pack.images.decode import MAX_PIXELS
from h5pack.pack.compression import NONE, Compression, parse_compression
from h5pack.sources.catalog import Catalog, NameFilter, Reject
from h5pack.sources.detect import COLUMN_PARAMETERS, KINDS, SourceOptions
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.sources.manifest import ManifestColumns
from h5pack.sources.validation import require_field, training_split
from h5pack.system.files import absolute_path
from h5pack.system.parameters import flags, invalid, real_number, require_local, texts, whole_number
from h5pack.system.processes import MAX_WORKERS

LAYOUTS = ("nhwc", "nchw")
START_METHODS = (None, "fork", "forkserver", "spawn")
MODES = ("rgb", "gray")
ORDERS = ("shuffled", "sorted")
# The values of `fit`, and how the plan describes each.
FITS = {"crop": "cropped to the center", "pad": "padded with black", "stretch": "stretched"}
IO = ("auto", "direct", "buffered")
KEEP = ("jpeg",)
RESAMPLES = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")

# The options of version 0.1 that affect the file's contents; see `ConvertOptions.content`.
_OF_VERSION_0_1 = (
    "source_kind", "include", "exclude", "limit", "path_column", "label_columns", "split_column", "field_columns",
    "size", "fit", "resample", "draft", "mode", "layout", "order", "seed", "chunk_rows", "chunk_bytes", "max_pixels",
    "compat",
)  # fmt: skip
# Options that determine whether and how an image becomes a row. `append` takes them from the pack.
OF_ROWS = (
    "size", "fit", "resample", "draft", "mode", "layout", "keep", "max_side", "quality", "max_pixels", "compression",
)  # fmt: skip
# Options that cannot be combined with `keep`.
_OF_PIXELS = ("size", "fit", "resample", "draft", "mode", "layout", "chunk_rows", "chunk_bytes", "compression")
# Options of which only one may be given, and why.
_EXCLUSIVE = (
    (("resume", "part", "finish"), ""),
    (("chunk_rows", "chunk_bytes"), ", because both set the size of a chunk"),
    (("shard_bytes", "compat"), ", because HDF5 1.8 has no virtual datasets"),
    (("shard_bytes", "part"), ", because the parts of an array job write one file"),
    (("shard_bytes", "finish"), ", because the parts of an array job write one file"),
)
# Options that can only be given together with another option, and this other option.
_DEPENDENT = ((("draft", "fit", "resample"), "size"), (("max_side", "quality"), "keep"), (("val_groups",), "val"))


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The validated keywords of `h5pack.convert`, which documents them."""

    source_kind: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = None
    root: str | None = None
    path_column: str | None = None
    label_columns: tuple[str, ...] = ()
    split_column: str | None = None
    field_columns: tuple[str, ...] = ()
    mask_columns: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()
    box_columns: tuple[str, ...] = ()
    keypoint_columns: tuple[str, ...] = ()
    box_format: str = schema.XYXY
    image_columns: tuple[str, ...] = ()
    images: str | None = None
    labels: str | None = None
    fields: tuple[str, ...] = ()
    channel_axis: str | None = None
    value_range: tuple[float, float] | None = None
    size: tuple[int, int] | None = None
    fit: str = "crop"
    resample: str = "bicubic"
    draft: bool = False
    mode: str = "rgb"
    layout: str = "nhwc"
    keep: str | None = None
    max_side: int | None = None
    quality: int = 90
    order: str = "shuffled"
    seed: int = 0
    val: float | None = None
    val_groups: str | None = None
    chunk_rows: int | None = None
    chunk_bytes: int | None = None
    max_pixels: int = MAX_PIXELS
    compression: str = NONE
    compat: bool = False
    strict: bool = False
    shard_bytes: int | None = None
    num_workers: int | None = None
    start_method: str | None = None
    io: str = "auto"
    overwrite: bool = False
    resume: bool = False
    part: tuple[int, int] | None = None
    finish: bool = False

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> ConvertOptions:
        """Create options from keywords, and parse values given as text; raise TypeError for an unknown keyword."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in keywords:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                advice = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"unexpected keyword argument {name!r}{advice}")
        values = dict(keywords)
        for field in dataclasses.fields(cls):
            if field.default == () and field.name in values:
                values[field.name] = texts(field.name, values[field.name])
        parsers: dict[str, Callable[[Any], Any]] = {
            "size": parse_size,
            "chunk_bytes": parse_bytes,
            "shard_bytes": functools.partial(parse_bytes, name="shard_bytes"),
            "value_range": parse_range,
            "part": parse_part,
        }
        for name, parse in parsers.items():
            if values.get(name) is not None:
                values[name] = parse(values[name])
        if values.get("root") is not None:
            require_local(values["root"], "root")
            values["root"] = os.fsdecode(values["root"])
        return cls(**values)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("source_kind", (None, *KINDS)),
            ("fit", tuple(FITS)),
            ("resample", RESAMPLES),
            ("mode", MODES),
            ("layout", LAYOUTS),
            ("keep", (None, *KEEP)),
            ("order", ORDERS),
            ("box_format", BOX_FORMATS),
            ("io", IO),
            ("start_method", START_METHODS),
        ):
            check_choice(name, getattr(self, name), allowed)
        for field in dataclasses.fields(self):
            if isinstance(field.default, bool):
                object.__setattr__(self, field.name, *flags(**{field.name: getattr(self, field.name)}))
        for name in ("limit", "num_workers", "max_side", "chunk_rows", "chunk_bytes", "shard_bytes"):
            if getattr(self, name) is not None:
                self._make_int(name, 1, {"num_workers": MAX_WORKERS, "shard_bytes": 2**63 - 1}.get(name))
        self._make_int("max_pixels", 1)
        self._make_int("seed", 0, 2**63 - 1)
        self._make_int("quality", 1, 100)
        if self.val is not None:
            if not 0 < real_number(self.val) < 1:
                raise invalid("val", self.val, "it must be a fraction above 0 and below 1, such as 0.1")
            object.__setattr__(self, "val", real_number(self.val))
        for name, kind in (("val_groups", "field"), ("path_column", "column"), ("split_column", "column")):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise invalid(name, value, f"give the name of a {kind}")
        parse_compression(self.compression)
        # Creating the source options validates their values.
        _ = self.source_options
        self._check_combinations()

    def _make_int(self, name: str, minimum: int, maximum: int | None = None) -> None:
        # Convert NumPy's integers, because the pack stores the options as JSON.
        object.__setattr__(self, name, whole_number(name, getattr(self, name), minimum, maximum))

    def _check_combinations(self) -> None:
        """Raise OptionsError if options exclude each other, or if one requires another that is not given."""
        for names, reason in _EXCLUSIVE:
            both = [f"{name}=True" if getattr(self, name) is True else name for name in self._given(names)]
            if len(both) > 1:
                problem = f"{' and '.join(both)} cannot be combined{reason}; give only one of them"
                raise OptionsError(problem, parameters=both)
        given = self._given(_OF_PIXELS) if self.keep is not None else []
        if given:
            advice = "leave out keep='jpeg' or these options"
            advice += ", or shrink images with max_side" if "size" in given else ""
            problem = f"{', '.join(given)} cannot be used with keep='jpeg', which stores image files; {advice}"
            raise OptionsError(problem, parameters=(*given, "keep='jpeg'", "max_side"))
        for dependent, required in _DEPENDENT:
            given = self._given(dependent)
            if given and getattr(self, required) is None:
                other = "keep='jpeg'" if required == "keep" else required
                problem = f"{', '.join(given)} cannot be used without {other}; give {other}, too"
                raise OptionsError(problem, parameters=(*given, other))

    def _given(self, names: Sequence[str]) -> list[str]:
        """Return those of the options `names` that differ from their defaults."""
        return [name for name in names if getattr(self, name) != getattr(ConvertOptions, name)]

    @property
    def in_array_job(self) -> bool:
        """Whether this run writes a part of an array job or finishes the job. Neither needs or allows `resume`."""
        return self.finish or self.part is not None

    @property
    def start_over_advice(self) -> str:
        """The end of messages that advise changing the source; "" if this run is not in an array job.

        An array job must start over after such a change, because it has saved what it found in the source.
        """
        return ", then delete all of OUT.partial* and run all parts again" if self.in_array_job else ""

    @property
    def continues(self) -> bool:
        """Whether this run may continue the work of an earlier run."""
        return self.resume or self.in_array_job

    @property
    def channels(self) -> int:
        """Number of channels of a row."""
        return 1 if self.mode == "gray" else 3

    @property
    def filter(self) -> Compression | None:
        """The HDF5 filter of the chunks of pixels; None if they are stored uncompressed."""
        return parse_compression(self.compression)

    @property
    def group_field(self) -> str | None:
        """Name in the pack of the field `val_groups`. The option itself may be the path of a dataset in `fields`."""
        paths = [name.strip("/") for name in self.fields]
        name = self.val_groups
        return field_name(name.strip("/")) if name is not None and name.strip("/") in paths else name

    @property
    def source_options(self) -> SourceOptions:
        """The options that specify how to read the source."""
        return SourceOptions(
            kind=self.source_kind,
            wanted=NameFilter(self.include, self.exclude),
            columns=ManifestColumns(**{name: getattr(self, one) for name, one in COLUMN_PARAMETERS.items()}),
            datasets=HDF5Datasets(self.images, self.labels, self.fields, self.channel_axis, self.value_range),
            limit=self.limit,
        )

    def content(self) -> dict[str, Any]:
        """Return the options that affect the file's contents; the pack stores them, and resuming compares them."""
        values = dataclasses.asdict(self)
        for name in ("root", "strict", "num_workers", "start_method", "io", "overwrite", "resume", "part", "finish"):
            del values[name]
        values["compression"] = NONE if self.filter is None else self.filter.name
        # Leave out options of later versions if they have their defaults. So the text stored in packs without these
        # options remains the same.
        content = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if name in _OF_VERSION_0_1 or value != getattr(ConvertOptions, name)
        }
        # Store `source_kind` as "source", as packs and journals of version 0.1 do.
        return {"source": content.pop("source_kind"), **content}


def require_suitable(source: str, catalog: Catalog, options: ConvertOptions) -> None:
    """Raise OptionsError for options that cannot be used with the source."""
    if options.draft and catalog.pixel_fields:
        problem = "draft=True cannot be used for images with masks or further images; leave out draft=True"
        raise OptionsError.at(source, problem, "draft=True")
    if options.keep is not None and any(one.kind == schema.IMAGE for one in catalog.pixel_fields):
        # In an HDF5 file, further images are found without `image_columns`. Then only keep='jpeg' can be left out.
        parameters = (f"keep={options.keep!r}", *(("image_columns",) if options.image_columns else ()))
        problem = f"{parameters[0]} cannot store further images of a sample; leave out {' or '.join(parameters)}"
        raise OptionsError.at(source, problem, *parameters)
    if options.val is not None:
        training_split(source, catalog, options.val)  # Raises OptionsError if no split can be divided.
    if options.group_field is not None:
        # The catalog of a map-style dataset has no fields before the survey. The options name its later fields.
        of_samples = (*options.fields, *(name for name, _ in options.source_options.columns.coordinates))
        require_field(source, catalog, options.group_field, of_samples if catalog.reader.has_labels else catalog.fields)


def output_path(out: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an output; raise OptionsError if it is a URL, names a folder or is no path."""
    require_local(out, "out")
    name = os.fsdecode(out)
    if name.endswith(os.sep):
        raise OptionsError.at(name, "names a folder; give the name of the file to create")
    return Path(absolute_path(name))


def check_choice(name: str, value: object, allowed: Sequence[str | None]) -> None:
    """Raise OptionsError unless `value` is one of `allowed`."""
    if not isinstance(value, (str, type(None))) or value not in allowed:
        names = ", ".join(item for item in allowed if item is not None)
        raise invalid(name, value, f"it must be one of {names}")


def parse_size(size: int | str | Sequence[int]) -> tuple[int, int]:
    """Return height and width in pixels, from a pair, text such as "218x178", or one number for a square."""
    pair: tuple[Any, ...]
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+)(?:[xX×](\d+))?", size.strip())
        pair = (int(match[1]), int(match[2] or match[1])) if match is not None else ()
    else:
        pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or any(isinstance(one, bool) or not isinstance(one, Integral) or one <= 0 for one in pair):
        advice = "give a positive height and width in pixels, such as 218x178, or one positive number for a square"
        raise invalid("size", size, advice)
    return int(pair[0]), int(pair[1])


def parse_range(value_range: str | Sequence[float]) -> tuple[float, float]:
    """Return (low, high) from a pair of numbers, or from text such as "0:1"."""
    try:
        low, high = map(float, value_range.split(":") if isinstance(value_range, str) else value_range)
        return low, high
    except (TypeError, ValueError, OverflowError):
        raise invalid("value_range", value_range, "give two numbers, or LOW:HIGH, such as 0:1") from None


def parse_part(part: str | Sequence[int]) -> tuple[int, int]:
    """Return (number, count) from a pair of numbers, or from text such as "3/16"; parts are numbered from 1."""
    pair = part.split("/") if isinstance(part, str) else part
    try:
        number, count = (int(value) if isinstance(value, str) else operator.index(value) for value in pair)
    except (TypeError, ValueError):
        raise invalid("part", part, "give NUMBER/COUNT, such as 3/16") from None
    if not 1 <= number <= count:
        raise invalid("part", part, "in NUMBER/COUNT, NUMBER must be from 1 to COUNT")
    return number, count


def parse_bytes(size: int | str, name: str = "chunk_bytes") -> int:
    """Return bytes, given as a number or as text such as "65536", "512KiB", "4MB" (1000**2) or "1G" (1024**3)."""
    if not isinstance(size, str):
        return size
    text = size.strip().lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmg])(i?))?b?", text)
    if match is None:
        raise invalid(name, size, "give a number of bytes, such as 4MiB")
    base = 1024 if match[3] or not text.endswith("b") else 1000
    return int(Fraction(match[1]) * base ** " kmg".index(match[2] or " "))


def refuse_reject(source: str, reject: Reject, options: ConvertOptions, *, begun: bool) -> None:
    """Raise RejectedImageError, as ``strict=True`` requires. `begun`: whether encoding or writing has begun."""
    advice = f"{options.start_over_advice}, or run again without strict=True to leave it out"
    parameters: tuple[str, ...] = ("strict=True",)
    if begun and not options.in_array_job:
        advice = ", and start over with overwrite=True, or continue with resume=True and without strict=True"
        parameters = ("overwrite=True", "resume=True", "strict=True")
    raise RejectedImageError.at(source, f"{reject.shown}: {reject.reason}; repair or remove it{advice}", *parameters)


def lacks_labels(command: Sequence[str]) -> bool:
    """Return whether `command`, which `convert_command` returned, names fields, but no labels."""
    return "--fields" in command and "--labels" not in command


def copy_name(source: str) -> str:
    """Return a name for the output of a printed command that converts `source`. It differs from the source's name."""
    return "repacked.h5" if os.path.basename(source) == "packed.h5" else "packed.h5"


def convert_command(source: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Return the arguments of the command line that converts `source` with these keywords of `convert`."""
    words = ["h5pack", "convert", source, copy_name(source)]
    for name, value in options.items():
        text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{'source' if name == 'source_kind' else name.replace('_', '-')}", text]
    return tuple(words)
