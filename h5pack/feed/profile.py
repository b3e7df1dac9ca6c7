"""`LoaderProfile`: settings that a bench found, kept in a TOML file for `H5Loader`."""

from __future__ import annotations

import difflib
import importlib
import math
import os
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h5pack.errors import OptionsError
from h5pack.feed.order import DEFAULT_WINDOW
from h5pack.machine import available_cpus


@dataclass(frozen=True)
class _Key:
    """Where in the file a setting stands, and what it may be.

    Attributes
    ----------
    table, name : str
    kind : type
        int, float, str or bool.
    least, most : float
        Of numbers.
    choices : tuple of str
        Of texts; empty: any.
    """

    table: str
    name: str
    kind: type
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, beginning with its place; None: nothing."""
        place = f"[{self.table}] {self.name} is {value!r}"
        if self.kind is str:
            if not isinstance(value, str):
                return f"{place}; it must be a text"
            if self.choices and value not in self.choices:
                return f"{place}; it must be one of {', '.join(map(repr, self.choices))}"
            return None
        if self.kind is bool:
            return None if isinstance(value, bool) else f"{place}; it must be true or false"
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and not (self.kind is float and isinstance(value, float)):
            return f"{place}; it must be a {'whole number' if self.kind is int else 'number'}"
        if not self.least <= value <= self.most or (isinstance(value, float) and not math.isfinite(value)):
            bound = f"of at least {self.least:g}" if self.most >= _MOST else f"from {self.least:g} to {self.most:g}"
            return f"{place}; it must be a number {bound}"
        return None


_MOST = 2**63 - 1
"""What every reader of TOML knows."""

_KEYS = {
    "batch_size": _Key("loader", "batch_size", int, 1, _MOST),
    "window": _Key("loader", "window", int, 1, _MOST),
    "threads": _Key("loader", "threads", int, 1, _MOST),
    "chunk_rows": _Key("file", "chunk_rows", int, 1, _MOST),
    "compression": _Key("file", "compression", str),
    "workers": _Key("dataloader", "num_workers", int, 0, _MOST),
    "rdcc_nbytes": _Key("h5py", "rdcc_nbytes", int, 0, _MOST),
    "rdcc_nslots": _Key("h5py", "rdcc_nslots", int, 1, _MOST),
    "rdcc_w0": _Key("h5py", "rdcc_w0", float, 0, 1),
    "images_per_s": _Key("measured", "images_per_s", float, 0),
    "judged_by": _Key("measured", "judged_by", str, choices=("hot", "cold")),
    "sure": _Key("measured", "sure", bool),
    "date": _Key("measured", "date", str),
    "processor": _Key("measured", "processor", str),
    "cpus": _Key("measured", "cpus", int, 1, _MOST),
    "h5pack": _Key("measured", "h5pack", str),
}
_ABOUT = {
    "loader": "What H5Loader takes from here. Batch size and window are part of the order of rows.",
    "file": "The file that this was measured with. Windows count chunks, so chunks of another size are another window.",
    "dataloader": "For a torch DataLoader instead of H5Loader.",
    "h5py": "For reading the file through the HDF5 library: h5py.File(..., rdcc_nbytes=..., and so on).",
    "measured": "Where these settings come from.",
}


@dataclass(frozen=True)
class LoaderProfile:
    """Settings of a loader, and what was measured with them. None: not known.

    Attributes
    ----------
    batch_size, window, threads : int or None
        Of `H5Loader`: rows, chunks, reading threads.
    chunk_rows : int or None
        Rows a chunk of the file that it was measured with; None also where that has no chunks.
    compression : str or None
        Of that file.
    workers : int or None
        Of a DataLoader, where that is used instead.
    rdcc_nbytes, rdcc_nslots, rdcc_w0 : int, int, float or None
        Of HDF5's chunk cache, for reading the file through the library.
    images_per_s : float or None
    judged_by : {"hot", "cold"} or None
        Page cache warm, or dropped.
    sure : bool or None
        Whether enough was measured to be sure.
    date : str or None
        ISO 8601.
    processor : str or None
    cpus : int or None
        That the measuring process might use.
    h5pack : str or None
        Version that measured.

    Raises
    ------
    OptionsError
        If a value is of another type, or out of its range.
    """

    batch_size: int | None = None
    window: int | None = None
    threads: int | None = None
    chunk_rows: int | None = None
    compression: str | None = None
    workers: int | None = None
    rdcc_nbytes: int | None = None
    rdcc_nslots: int | None = None
    rdcc_w0: float | None = None
    images_per_s: float | None = None
    judged_by: str | None = None
    sure: bool | None = None
    date: str | None = None
    processor: str | None = None
    cpus: int | None = None
    h5pack: str | None = None

    def __post_init__(self) -> None:
        for name, key in _KEYS.items():
            value = getattr(self, name)
            problem = None if value is None else key.problem(value)
            if problem is not None:
                raise OptionsError(f"profile: {problem}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LoaderProfile:
        """Read a profile from a TOML file.

        Tables and keys that are not known are passed over, as a newer h5pack may write more; but not in ``[loader]``,
        where they would be misspelt settings.

        Raises
        ------
        OptionsError
            If the file cannot be read, is no profile, or a value makes no sense; or if there is no reader of TOML,
            which Python has from 3.11 on.
        """
        shown = os.fspath(path)
        document = _read_toml(shown)
        if not isinstance(document.get("loader"), dict):
            raise OptionsError(f"{shown}: it has no table [loader]; give a file that 'h5pack bench --save' wrote")
        settings = [key.name for key in _KEYS.values() if key.table == "loader"]
        for name in document["loader"]:
            if name not in settings:
                alike = difflib.get_close_matches(name, settings, 1)
                hint = f"did you mean {alike[0]}?" if alike else f"give some of {', '.join(settings)}"
                raise OptionsError(f"{shown}: [loader] has no setting {name!r}; {hint}")
        found = {}
        for field, key in _KEYS.items():
            table = document.get(key.table, {})
            if not isinstance(table, dict):
                raise OptionsError(f"{shown}: {key.table!r} is {table!r}; it must be a table [{key.table}]")
            if key.name in table:
                found[field] = table[key.name]
                problem = key.problem(found[field])
                if problem is not None:
                    raise OptionsError(f"{shown}: {problem}")
        return cls(**found)

    def dumps(self, notes: Sequence[str] = ()) -> str:
        """The profile as TOML.

        Parameters
        ----------
        notes : sequence of str
            Lines of comment at its beginning.
        """
        lines = [
            "# Settings that `h5pack bench` found. To use them:",
            "#     loader = h5pack.H5Loader(dataset, profile=\"profile.toml\")",
            "# What is given to H5Loader itself comes before what stands here.",
            *(f"# {line}" for note in notes for line in _comment_lines(note)),
        ]  # fmt: skip
        for table, about in _ABOUT.items():
            values = {
                key.name: getattr(self, field)
                for field, key in _KEYS.items()
                if key.table == table and getattr(self, field) is not None
            }
            # Without it, it would be no profile.
            if values or table == "loader":
                lines += ["", f"# {about}", f"[{table}]"]
                lines += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ChosenSettings:
    """What a loader uses: what it was given, else what its profile has, else the defaults.

    Attributes
    ----------
    batch_size, window : int
    threads : int or None
        None: nobody said.
    """

    batch_size: int
    window: int
    threads: int | None


def choose_settings(
    profile: str | os.PathLike[str] | LoaderProfile | None,
    unit_rows: int,
    batch_size: int | None,
    window: int | None,
    threads: int | None,
) -> ChosenSettings:
    """Fill in what was not given from a profile.

    A profile's threads are no more than this process's CPUs. A warning tells when it was measured with chunks of
    another size.

    Parameters
    ----------
    profile : path, LoaderProfile or None
    unit_rows : int
        Rows a chunk of the dataset.
    batch_size, window, threads : int or None
        As they were given; None: not given.

    Raises
    ------
    OptionsError
        If the profile cannot be read, or nobody says the batch size.
    """
    if profile is None:
        found = LoaderProfile()
    elif isinstance(profile, LoaderProfile):
        found = profile
    elif isinstance(profile, (str, os.PathLike)):
        found = LoaderProfile.load(profile)
    else:
        raise OptionsError(f"profile is a {type(profile).__name__}; give a path, or a LoaderProfile")
    batch_size = found.batch_size if batch_size is None else batch_size
    if batch_size is None:
        raise OptionsError(
            "batch_size is not given" + ("" if profile is None else ", nor in the profile") + "; give rows a batch"
        )
    if found.chunk_rows is not None and found.chunk_rows != unit_rows:
        warnings.warn(
            f"the profile was measured with chunks of {found.chunk_rows:,} rows, and this dataset has chunks of "
            f"{unit_rows:,}: its settings may be slow, and its window mixes other amounts; run 'h5pack bench' on it",
            stacklevel=3,
        )
    if threads is None and found.threads is not None:
        threads = min(found.threads, available_cpus())
    window = (found.window or DEFAULT_WINDOW) if window is None else window
    return ChosenSettings(batch_size, window, threads)


def _read_toml(path: str) -> dict[str, Any]:
    reader = _toml_reader(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OptionsError(f"{path}: {error.strerror or error}; give a profile that can be read") from error
    except ValueError as error:
        raise OptionsError(f"{path}: it is no text in UTF-8; give a file that 'h5pack bench --save' wrote") from error
    try:
        document: dict[str, Any] = reader.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionsError(
            f"{path}: it is no TOML ({error}); mend it, or write it with 'h5pack bench --save'"
        ) from error
    return document


def _toml_reader(path: str) -> Any:
    """The standard library's, or before Python 3.11 tomli, which is the same."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise OptionsError(
        f"{path}: before Python 3.11 a profile is read with tomli, which is not there: pip install tomli"
    )


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(map(_toml_sign, value))}"'
    # A whole number for a setting that may be broken is read as one, and is equal.
    return repr(value)


def _toml_sign(sign: str) -> str:
    """A sign within a basic string: quotes, backslashes and what is no text are escaped."""
    if sign in ('"', "\\"):
        return f"\\{sign}"
    code = ord(sign)
    if code < 0x20 or code == 0x7F:
        return f"\\u{code:04x}"
    # Half a pair of UTF-16 is no sign of Unicode, and has no escape in TOML.
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else sign


def _comment_lines(text: str) -> list[str]:
    """A text for comments, where control characters may not stand; commands stay whole."""
    lines = "".join(sign if sign.isprintable() else " " for sign in text)
    return textwrap.wrap(lines, 118, break_long_words=False, break_on_hyphens=False)
