"""A sweep's measurements, sorted: which belong to the comparison of chunks, and which vary something else."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from h5pack.bench.cell import Cell, Measurement, Stored
from h5pack.bench.report import BenchReport
from h5pack.bench.settings import CACHES, ENGINES, ORDERS

VARIED = ("batch", "window", "threads", "workers")


@dataclass(frozen=True)
class Base:
    """What the cells of one order, engine and page cache have in common, but those that vary it.

    Attributes
    ----------
    batch, window, threads : int
    workers : int or None
    """

    batch: int
    window: int
    threads: int
    workers: int | None


@dataclass(frozen=True)
class Variation:
    """One setting of a cell at several values, the sweep's own among them.

    Attributes
    ----------
    name : str
        Of `VARIED`.
    cell : Cell
        With the sweep's own value.
    values : dict of int or None to Measurement
        By the setting's value, ascending; None: without a DataLoader.
    """

    name: str
    cell: Cell
    values: dict[int | None, Measurement]


class Swept:
    """The measurements of a report's sweep, those that its run-off settled as it did.

    Cells differ in chunks, order, engine and page cache; some also in batch, window, threads or workers. Of an order,
    engine and page cache the commonest of these settings is what chunks are compared with; the first, of equals.

    Parameters
    ----------
    report : BenchReport

    Attributes
    ----------
    forms : list of Stored
        The file asked about, chunks ascending, contiguous; those that a bench compressed behind.
    caches, orders, engines : list of str
        That were measured, or should have been.
    compression : str
        Of the chunks that are compared: "none", unless all that were made are compressed.
    others : list of Measurement
        That differ from the comparison in several settings.
    """

    def __init__(self, report: BenchReport) -> None:
        cells = [one.cell for one in report.measurements]
        self.forms = sorted(report.files, key=_form_key)
        self.caches = _known((cell.cache for cell in cells), CACHES)
        self.orders = _known((cell.order for cell in cells), ORDERS)
        self.engines = _known((cell.engine for cell in cells), ENGINES)
        made = [stored.compression for stored in self.forms if not stored.own and stored.chunk_rows is not None]
        self.compression = "none" if "none" in made or not made else made[0]
        self._bases = _bases(cells)
        self._found: dict[tuple[str, str, str, str], Measurement] = {}
        self._varied: dict[tuple[str, Cell], dict[int | None, Measurement]] = {}
        self.others: list[Measurement] = []
        trials = {one.cell: one for one in report.trials}
        for one in report.measurements:
            self._sort(one.settled_by(trials.get(one.cell)))

    def _sort(self, one: Measurement) -> None:
        cell = one.cell
        base = self._bases[cell.order, cell.engine, cell.cache]
        differing = _differing(cell, base)
        if not differing:
            key = (cell.stored, cell.order, cell.engine, cell.cache)
            if key not in self._found or not self._found[key].speeds:
                self._found[key] = one
        elif len(differing) == 1:
            name = differing[0]
            common = dataclasses.replace(cell, **dataclasses.asdict(base))
            self._varied.setdefault((name, common), {})[getattr(cell, name)] = one
        else:
            self.others.append(one)

    def base(self, order: str, engine: str, cache: str) -> Base | None:
        """Settings of the comparison; None where there is nothing."""
        return self._bases.get((order, engine, cache))

    def found(self, stored: str, order: str, engine: str, cache: str) -> Measurement | None:
        """What is known of a cell of the comparison; None where nothing was planned."""
        return self._found.get((stored, order, engine, cache))

    def median(self, stored: str, order: str, engine: str, cache: str) -> float | None:
        """Images/s; None where that was not measured."""
        one = self.found(stored, order, engine, cache)
        return one.median if one is not None and one.speeds else None

    def compared(self) -> list[Stored]:
        """Forms whose chunks are compared."""
        plain = ("none", self.compression)
        return [stored for stored in self.forms if stored.own or stored.compression in plain]

    def compressed(self) -> list[Stored]:
        """Forms of other compression, each behind its equal that is compared."""
        packed = [stored for stored in self.forms if not stored.own and stored.chunk_rows is not None]
        chunks = {stored.chunk_rows for stored in packed if stored.compression not in ("none", self.compression)}
        return sorted(
            (stored for stored in packed if stored.chunk_rows in chunks),
            key=lambda stored: (stored.chunk_rows or 0, stored.compression != self.compression),
        )

    def variations(self) -> list[Variation]:
        """Settings that were varied one at a time."""
        found = []
        for (name, cell), values in self._varied.items():
            own = self.found(cell.stored, cell.order, cell.engine, cell.cache)
            everything = {**values, **({} if own is None else {getattr(cell, name): own})}
            ordered = sorted(everything, key=lambda value: -1 if value is None else value)
            found.append(Variation(name, cell, {value: everything[value] for value in ordered}))
        return sorted(found, key=lambda variation: VARIED.index(variation.name))


def _bases(cells: Sequence[Cell]) -> dict[tuple[str, str, str], Base]:
    counts: dict[tuple[str, str, str], Counter[Base]] = {}
    for cell in cells:
        base = Base(cell.batch, cell.window, cell.threads, cell.workers)
        counts.setdefault((cell.order, cell.engine, cell.cache), Counter())[base] += 1
    return {key: counted.most_common(1)[0][0] for key, counted in counts.items()}


def _differing(cell: Cell, base: Base) -> list[str]:
    names = [name for name in VARIED if getattr(cell, name) != getattr(base, name)]
    # Who has workers has no reading threads to speak of.
    return [name for name in names if name != "threads" or "workers" not in names]


def _known(found: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names that occur, those that are known first, in their order."""
    names = dict.fromkeys(found)
    return [name for name in order if name in names] + [name for name in names if name not in order]


def _form_key(stored: Stored) -> tuple[bool, bool, bool, int, str]:
    return (
        not stored.own,
        stored.compression != "none" and not stored.own,
        stored.chunk_bytes is None,
        stored.chunk_bytes or 0,
        stored.label,
    )
