"""`ChunkSampler` and `ChunkBatchSampler` under torch's DataLoader: exact epochs, and exact resumes from every batch."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import pickle
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

import h5pack
from h5pack.errors import OptionsError, StateError
from h5pack.order.row_ranges import RowRange
from h5pack.order.window import OrderPlan
from tests.makers import class_folders, quick, split_folders

BATCH, CHUNK = 8, 7
KINDS = pytest.mark.parametrize("kind", ["batches", "rows"])
# Batch samplers by kind, made for an H5Dataset. A new one is tested wherever a test takes ALL_KINDS or "mixture".
BATCH_SAMPLERS: dict[str, Any] = {
    "batches": h5pack.ChunkBatchSampler,
    "mixture": lambda data, *args, **settings: h5pack.MixtureSampler(h5pack.ConcatPack([data]), *args, **settings),
}
ALL_KINDS = pytest.mark.parametrize("kind", ["rows", *BATCH_SAMPLERS])
ROWS_OF_SPLIT = list(range(10, 67))


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 5, "y": 5}, "test": {"x": 31, "y": 26}}, (6, 5))
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=CHUNK))
    return folder / "o.h5"


@pytest.fixture(scope="module")
def dataset(pack: Path) -> h5pack.H5Dataset:
    """57 rows, whose first and last chunk are cut by other splits' rows and the file's end."""
    return h5pack.H5Dataset(pack, split="test", with_rows=True)


class Fed:
    """A sampler of any kind under a loader, and how far its consumer is."""

    def __init__(self, kind: str, data: Any, workers: int = 0, size: int = BATCH, **settings: Any) -> None:
        self.kind = kind
        loader_class = settings.pop("loader_class", DataLoader)
        more = {"num_workers": workers, "collate_fn": settings.pop("collate", rows_of)}
        if kind in BATCH_SAMPLERS:
            self.sampler: Any = BATCH_SAMPLERS[kind](data, size, **settings)
            more["batch_sampler"] = self.sampler
        else:
            self.sampler = h5pack.ChunkSampler(data, **settings)
            more |= {"sampler": self.sampler, "batch_size": size, "drop_last": settings.get("drop_last", False)}
        self.loader = loader_class(data, **more)

    def epoch(self) -> list[list[int]]:
        return list(self.loader)

    def rows(self) -> list[int]:
        return list(itertools.chain(*self.loader))

    def state(self, batches: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """As a training loop saves it, which has received these batches."""
        return dict(self.sampler.state_dict(sum(map(len, batches)) if self.kind == "rows" else len(batches)))

    def resumed(self, state: Any) -> Fed:
        self.sampler.load_state_dict(json.loads(json.dumps(state)))
        return self


def rows_of(samples: Any) -> list[int]:
    """Row numbers of the file, the last part of each sample."""
    return [int(sample[-1]) for sample in samples]


@pytest.mark.parametrize(
    ("shuffle", "kind", "workers"),
    [("window", "batches", 2), ("window", "rows", 0), ("full", "rows", 0), ("chunk", "batches", 0), (False, "rows", 2)],
)
def test_every_row_once_an_epoch_with_its_pixels_and_label(
    pack: Path, dataset: h5pack.H5Dataset, kind: str, workers: int, shuffle: str | bool
) -> None:
    with h5py.File(pack) as file:
        images, labels = file["images"][()], file["labels"][()]
    fed = Fed(kind, dataset, workers, shuffle=shuffle, window=3, collate=dataset.collate)
    assert (len(fed.loader), len(fed.sampler)) == (8, 8 if kind == "batches" else 57)
    epochs: list[list[int]] = [[], []]
    for found in epochs:
        for pixels, classes, rows in fed.loader:
            assert np.array_equal(pixels.numpy(), images[rows.numpy()])
            assert np.array_equal(classes.numpy(), labels[rows.numpy()])
            found += rows.tolist()
        assert sorted(found) == ROWS_OF_SPLIT
    assert (epochs[0] == epochs[1]) == (shuffle is False)


@KINDS
def test_samplers_follow_their_plan(dataset: h5pack.H5Dataset, kind: str) -> None:
    """A sampler yields the order of its `OrderPlan`, which is pinned."""
    fed = Fed(kind, dataset, seed=7, window=3)
    plan = OrderPlan(RowRange(dataset.rows.start, dataset.rows.stop, CHUNK), 57, seed=7, window=3)
    for epoch in range(3):
        expected = np.empty(57, np.int64)
        for group in plan.chunk_groups(epoch):
            expected[group.spans[0][1] + group.positions] = group.rows
        assert fed.rows() == expected.tolist()


@pytest.mark.parametrize(("block", "streams"), [(1, 4), (3, 1), (8, 4), (57, 1)])
def test_the_order_of_rows_does_not_depend_on_how_many_are_planned_at_once(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch, block: int, streams: int
) -> None:
    whole = list(h5pack.ChunkSampler(dataset, streams=streams, window=3))
    monkeypatch.setattr("h5pack.data.samplers._PLANNED_ROWS", block)
    for row in range(len(whole) + 1):
        again = h5pack.ChunkSampler(dataset, streams=streams, window=3)
        again.load_state_dict({**again.state_dict(), "rows": row})
        assert list(again) == whole[row:]


@KINDS
def test_the_last_rows_can_be_left_out(dataset: h5pack.H5Dataset, kind: str) -> None:
    fed = Fed(kind, dataset, drop_last=True)
    assert len(fed.loader) == 7
    assert [len(batch) for batch in fed.epoch()] == [8] * 7
    found = [Fed(kind, dataset, 0, 2, rank=r, num_replicas=5, drop_last=True).rows() for r in range(5)]
    assert [len(rows) for rows in found] == [10] * 5
    assert len(set(itertools.chain(*found))) == 50


@pytest.mark.parametrize("make", [h5pack.ChunkSampler, lambda *a, **k: h5pack.ChunkBatchSampler(*a, 5, **k)])
def test_shuffle_true_is_window_and_errors_name_parameters(dataset: h5pack.H5Dataset, make: Any) -> None:
    assert list(make(dataset, shuffle=True)) == list(make(dataset, shuffle="window"))
    for shuffle in (True, False):
        same = make(dataset, shuffle=np.bool_(shuffle), drop_last=np.bool_(shuffle))
        assert list(same) == list(make(dataset, shuffle=shuffle, drop_last=shuffle))
        json.dumps(same.state_dict())
    uneven = {"streams": 3, "rank": 0, "num_replicas": 2}
    for settings in ({"shuffle": "rows"}, {"rank": 2, "num_replicas": 2}, {"streams": 0}, uneven):
        with pytest.raises(OptionsError) as caught:
            make(dataset, **settings)
        assert next(iter(settings)) in {name.partition("=")[0] for name in caught.value.parameters}


@pytest.mark.parametrize("size", [None, 0, 2.0])
def test_batch_samplers_refuse_a_batch_size_that_is_no_number_of_rows(dataset: h5pack.H5Dataset, size: Any) -> None:
    both = h5pack.ConcatPack([dataset, dataset])
    for make in (lambda: h5pack.ChunkBatchSampler(dataset, size), lambda: h5pack.MixtureSampler(both, size)):
        with pytest.raises(OptionsError) as caught:
            make()
        assert caught.value.parameters == (f"batch_size={size}",)


def elastic(kind: str, dataset: h5pack.H5Dataset, count: int, **more: Any) -> list[Fed]:
    """All ranks of an order that any divisor of 4 ranks can share."""
    more = {"streams": 4, "window": 3, "seed": 9, "num_replicas": count, **more}
    return [Fed(kind, dataset, 0, BATCH // count, rank=rank, **more) for rank in range(count)]


def steps_of(ranks: list[Fed]) -> list[list[int]]:
    """Rows of each step over all ranks."""
    return [sorted(itertools.chain(*step)) for step in zip(*[rank.epoch() for rank in ranks], strict=True)]


class Watched(Dataset[tuple[int, int]]):
    """Which worker was asked for which row."""

    def __len__(self) -> int:
        return 57

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return ROWS_OF_SPLIT[index], info.id


@pytest.mark.parametrize("lanes", [1, 4])
def test_with_lanes_a_chunk_is_read_by_one_worker(dataset: h5pack.H5Dataset, lanes: int) -> None:
    sampler = h5pack.ChunkBatchSampler(dataset, 4, shuffle="window", window=2, lanes=lanes)
    loader = DataLoader(Watched(), batch_sampler=sampler, num_workers=2)
    workers = defaultdict(set)
    for rows, readers in loader:
        for row, reader in zip(rows.tolist(), readers.tolist(), strict=True):
            workers[row // CHUNK].add(reader)
    assert set(itertools.chain(*workers.values())) == {0, 1}
    shared = sum(len(readers) > 1 for readers in workers.values())
    # A stream's end may cut a chunk, and padding repeats one.
    assert shared <= lanes if lanes > 1 else shared > len(workers) // 2


@ALL_KINDS
def test_each_iteration_is_the_next_epoch_unless_another_is_named(dataset: h5pack.H5Dataset, kind: str) -> None:
    fed = Fed(kind, dataset, seed=3)
    epochs = []
    for number in range(7):
        fed.sampler.set_epoch(number)
        epochs.append(fed.epoch())
    assert all(one != other for one, other in itertools.combinations(epochs, 2))
    fed = Fed(kind, dataset, seed=3)
    assert fed.sampler.epoch == 0
    for named, expected in ((None, 0), (None, 1), (None, 2), (5, 5), (None, 6), (1, 1), (1, 1)):
        if named is not None:
            fed.sampler.set_epoch(named)
        assert (fed.epoch(), fed.sampler.epoch) == (epochs[expected], expected)
    # An epoch that was broken off is over.
    assert next(iter(fed.loader)) == epochs[2][0]
    assert fed.epoch() == epochs[3]
    # An iteration that was made and not begun is none.
    iter(fed.sampler)
    assert fed.epoch() == epochs[4]


@ALL_KINDS
def test_two_iterations_at_once_do_not_disturb_each_other(dataset: h5pack.H5Dataset, kind: str) -> None:
    reference, sampler = Fed(kind, dataset).sampler, Fed(kind, dataset).sampler
    expected = list(zip(list(reference), list(reference), strict=True))
    assert list(zip(iter(sampler), iter(sampler), strict=True)) == expected


@pytest.mark.parametrize(
    ("kind", "workers", "drop_last"),
    [*(("batches", 0, False), ("rows", 0, True), ("batches", 2, True), ("rows", 2, False)), ("mixture", 2, False)],
)
def test_a_state_of_any_batch_resumes(dataset: h5pack.H5Dataset, kind: str, workers: int, drop_last: bool) -> None:
    make = partial(Fed, kind, dataset, workers, window=3, drop_last=drop_last)
    saving, states = make(), []
    epochs: list[list[list[int]]] = [[], []]
    for number, epoch in enumerate(epochs):
        for batch in saving.loader:
            states.append((number, len(epoch), saving.state(epoch)))
            epoch.append(batch)
        states.append((number, len(epoch), saving.state(epoch)))
    epochs.append(saving.epoch())
    # Workers are started for some of the states only.
    for number, done, state in states[:: 5 if workers else 1]:
        again = make().resumed(state)
        assert again.epoch() == epochs[number][done:]
        assert again.sampler.epoch == number
        assert again.epoch() == epochs[number + 1]


@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader).parameters, reason="torch is older than 2.6")
@pytest.mark.parametrize("workers", [1, 2])
@ALL_KINDS
def test_batches_in_any_order_have_no_state_before_the_last(dataset: h5pack.H5Dataset, kind: str, workers: int) -> None:
    fed = Fed(kind, dataset, workers, loader_class=partial(DataLoader, in_order=False))
    begun = fed.sampler.state_dict()
    iterator = iter(fed.loader)
    received = [next(iterator)]
    for save in (fed.sampler.state_dict, partial(fed.state, received), partial(pickle.dumps, fed.sampler)):
        if workers == 1:
            save()
            continue
        with pytest.raises(StateError):
            save()
    assert fed.sampler.state_dict(0) == begun
    assert len(list(iterator)) == 7
    assert fed.sampler.state_dict() == {**begun, "epoch": 1}


@ALL_KINDS
def test_a_sampler_that_workers_have_used_can_be_pickled(dataset: h5pack.H5Dataset, kind: str) -> None:
    sampler = (fed := Fed(kind, dataset, 2)).sampler
    iterator = iter(fed.loader)
    received = [next(iterator), next(iterator)]
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.state_dict() == sampler.state_dict() == fed.state(received)
    assert len(list(iterator)) == 6
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.state_dict() == sampler.state_dict() == {**fed.state(), "epoch": 1}
    assert list(copy) == list(sampler)


@KINDS
def test_a_state_after_a_loop_that_was_left_early_warns(
    dataset: h5pack.H5Dataset, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    fed = Fed(kind, dataset, 2)
    received = list(itertools.islice(fed.loader, 2))
    gc.collect()  # The DataLoader's iterator.
    assert fed.state(received)[kind] == 2 * {"batches": 1, "rows": BATCH}[kind]
    assert caplog.records == []
    fed.sampler.state_dict()
    assert [record.name for record in caplog.records] == ["h5pack"]
    fed.epoch()  # The next one, to its end.
    after = fed.sampler.state_dict()
    assert (after["epoch"], after[kind]) == (2, 0)
    assert len(caplog.records) == 1


@KINDS
def test_where_a_state_points_to(dataset: h5pack.H5Dataset, kind: str) -> None:
    fed = Fed(kind, dataset)

    def place(count: int | None = None) -> tuple[int, int]:
        state = fed.sampler.state_dict(count)
        return state["epoch"], state[kind]

    assert place() == place(0) == (0, 0)
    whole = len(list(fed.sampler))
    assert place() == (1, 0), "after a loop: the next epoch"
    assert place(whole) == (0, whole), "behind the last: that epoch has nothing left"
    assert place(3) == (0, 3)
    iterator = iter(fed.sampler)
    assert place() == place(0) == (1, 0), "made, not begun"
    next(iterator)
    assert place() == (1, 1)
    fed.sampler.set_epoch(5)
    assert place() == (5, 0)
    fed.sampler.load_state_dict({**fed.sampler.state_dict(), "epoch": 4, kind: 2})
    assert place() == (4, 2)
    next(iter(fed.sampler))
    assert place() == (4, 3)
    assert place(2) == (4, 4), "counted from where this iteration began"
    assert json.loads(json.dumps(fed.sampler.state_dict(np.int64(2)))) == fed.sampler.state_dict(2)
    for count in (-1, 1.0, "2", whole - 1):
        with pytest.raises(OptionsError) as caught:
            fed.sampler.state_dict(count)
        assert caught.value.parameters[0].startswith(f"{kind}_consumed")
    assert place(whole - 2) == (4, whole)


@pytest.mark.parametrize("workers", [0, 1])
@KINDS
def test_a_state_after_a_complete_loop_is_the_next_epoch(dataset: h5pack.H5Dataset, kind: str, workers: int) -> None:
    fed = Fed(kind, dataset, workers)
    epochs = [fed.epoch()]
    state = fed.sampler.state_dict()
    epochs.append(fed.epoch())
    assert (state["epoch"], state[kind]) == (1, 0)
    again = Fed(kind, dataset, workers).resumed(state)
    assert again.epoch() == epochs[1]
    # Also after the rest of an epoch, even if nothing is left of it.
    for rest in (1, 0):
        resumed = Fed(kind, dataset, workers).resumed(fed.sampler.state_dict())
        resumed.sampler.load_state_dict({**state, "epoch": 3, kind: len(fed.sampler) - rest})
        resumed.epoch()
        after = resumed.sampler.state_dict()
        assert (after["epoch"], after[kind]) == (4, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@KINDS
def test_a_state_after_the_last_batch_from_workers_is_the_next_epoch(
    dataset: h5pack.H5Dataset, kind: str, drop_last: bool
) -> None:
    """Also if the DataLoader leaves out the last rows, which the loop never receives."""
    fed = Fed(kind, dataset, 1, drop_last=drop_last)
    states = [fed.sampler.state_dict() for _ in fed.loader]
    assert [(state["epoch"], state[kind] > 0) for state in states] == [(0, True)] * (len(states) - 1) + [(1, False)]


class Wrapped:
    """A batch sampler around another one, with its batch size, as those of Accelerate have."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, BATCH, False

    def __iter__(self) -> Any:
        return iter(self.sampler)


def test_a_state_inside_the_loop_over_a_wrapped_batch_sampler(dataset: h5pack.H5Dataset) -> None:
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH)
    loader = DataLoader(dataset, batch_sampler=Wrapped(sampler), num_workers=1, collate_fn=rows_of)  # type: ignore[arg-type]
    states = [sampler.state_dict()["batches"] for _ in loader]
    assert states == [*range(1, 8), 0]


@KINDS
def test_naming_the_epoch_that_was_loaded_keeps_its_place(dataset: h5pack.H5Dataset, kind: str) -> None:
    expected = Fed(kind, dataset)
    epochs = [expected.epoch() for _ in range(4)]
    state = {**expected.sampler.state_dict(), "epoch": 2, kind: 2 * {"batches": 1, "rows": BATCH}[kind]}
    for named, rows in (([2], epochs[2][2:]), ([3], epochs[3]), ([3, 2], epochs[2])):
        fed = Fed(kind, dataset).resumed(state)
        for epoch in named:
            fed.sampler.set_epoch(epoch)
        assert fed.epoch() == rows
        fed.sampler.set_epoch(3)
        assert fed.epoch() == epochs[3]


def test_states_are_pinned(pack: Path, dataset: h5pack.H5Dataset) -> None:
    """A state that this release saved must load in every later one."""
    batches = h5pack.ChunkBatchSampler(dataset, 8, seed=3, window=5)
    rows = h5pack.ChunkSampler(dataset, rank=1, num_replicas=2, streams=4)
    order = {"order": 1, "start": 10, "rows": 57, "chunk_rows": 7, "shuffle": "window", "seed": 3, "window": 5}
    order |= {"trim": False, "drop_last": False, "streams": 1, "lanes": 1, "global_batch": 8}
    with h5py.File(pack) as file:
        order["pack_digest"] = zlib.crc32(file["checksums/images"][:64].astype("<u4").tobytes())
    assert batches.state_dict() == {"order": order, "epoch": 0, "batches": 0}
    order |= {"seed": 0, "window": 16, "streams": 4, "global_batch": None}
    assert rows.state_dict() == {"order": order, "epoch": 0, "rows": 0, "world_size": 2}


@pytest.mark.parametrize(
    ("saved", "loaded", "parameters"),
    [
        *(({}, {"seed": 1}, {"seed"}), ({}, {"window": 2}, {"window"}), ({}, {"shuffle": "full"}, {"shuffle"})),
        *(({}, {"shuffle": False}, {"shuffle"}), ({}, {"drop_last": True}, {"drop_last"})),
        *(({}, {"split": "train"}, {"start"}), ({}, {"rank": 0, "num_replicas": 2, "size": 4}, {"streams"})),
        *(({}, {"size": 4}, {"global_batch"}), ({"streams": 2}, {"lanes": 2}, {"lanes"})),
        # A subset has other keys in its identity than a range.
        ({}, {"indices": range(57)}, {"rows_digest", "start"}),
        ({"indices": [5, 2, 9]}, {"indices": [5, 2, 8]}, {"rows_digest"}),
        # Orders that a later release may bring.
        *(({"order": 2}, {}, {"order"}), ({"weights": "w"}, {}, {"weights"})),
    ],
)
def test_states_of_other_orders_are_refused(
    pack: Path, dataset: h5pack.H5Dataset, saved: dict[str, Any], loaded: dict[str, Any], parameters: set[str]
) -> None:
    settings = {name: saved[name] for name in saved.keys() - {"order", "weights"}}
    other = {**settings, **loaded}
    data = h5pack.H5Dataset(pack, split=other.pop("split"), with_rows=True) if "split" in other else dataset
    # The order of a ChunkSampler has neither batches nor lanes.
    for kind in ("batches",) if parameters <= {"global_batch", "lanes"} else ("batches", "rows"):
        state = Fed(kind, dataset, **settings).state()
        Fed(kind, dataset, **settings).resumed(state)
        refusing = Fed(kind, data, **other)
        before = refusing.sampler.state_dict()
        with pytest.raises(StateError) as caught:
            refusing.resumed({**state, "order": {**state["order"], **saved}} if saved != settings else state)
        assert refusing.sampler.state_dict() == before
        assert set() < set(caught.value.parameters) <= parameters


@KINDS
@pytest.mark.parametrize("settings", [{}, {"indices": [5, 2, 9]}, {"weights": range(20)}], ids=["all", "some", "draws"])
def test_a_state_belongs_to_the_rows_of_its_pack(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    source = class_folders(tmp_path / "in", {"x": 11, "y": 9})
    made = []
    for number, (seed, chunk_rows) in enumerate(((0, CHUNK), (0, CHUNK), (1, CHUNK), (0, CHUNK + 1))):
        h5pack.convert(source, tmp_path / f"{number}.h5", **quick(chunk_rows=chunk_rows, seed=seed))
        made.append(Fed(kind, h5pack.H5Dataset(tmp_path / f"{number}.h5", with_rows=True), **settings))
    first, same, other, chunks = made
    state = first.state()
    assert same.resumed(state).epoch() == first.epoch()
    for refusing in (other, chunks):
        with pytest.raises(StateError) as caught:
            refusing.resumed(state)
        assert caught.value.parameters == ("dataset",)
    # States of the releases before did not have it.
    other.resumed({**state, "order": {name: one for name, one in state["order"].items() if name != "pack_digest"}})


def test_states_of_empty_splits_are_refused_without_impossible_ranges(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"] = np.zeros((8, 12, 12, 3), np.uint8)
        file["splits/name"], file["splits/rows"] = ["none", "other"], [[0, 0], [5, 5]]
    splits = (None, "none", "other")
    samplers = [h5pack.ChunkSampler(h5pack.H5Dataset(tmp_path / "f.h5", split=split)) for split in splits]
    for saved, loaded in itertools.permutations(samplers, 2):
        with pytest.raises(StateError) as caught:
            loaded.load_state_dict(saved.state_dict())
        ranges = re.findall(r"rows (\d+) to (-?\d+)", str(caught.value))
        assert all(int(first) <= int(last) for first, last in ranges)


@KINDS
def test_what_is_not_a_state_is_refused(dataset: h5pack.H5Dataset, kind: str) -> None:
    other = Fed({"batches": "rows", "rows": "batches"}[kind], dataset).state()
    malformed = {"order": 3, "epoch": 0, "batches": 0, "rows": 0, "world_size": 1}
    valid = Fed(kind, dataset).state()
    fractions = [{**valid, name: 1.5} for name in valid if name != "order"]
    for wrong in ({}, None, 3, malformed, {"epoch": 0, "batches": 1}, other, {**valid, kind: -1}, *fractions):
        with pytest.raises(StateError):
            Fed(kind, dataset).resumed(wrong)


@pytest.mark.parametrize("ranks", [-1, 0, 3, 8])
def test_a_state_of_impossible_ranks_is_refused(dataset: h5pack.H5Dataset, ranks: int) -> None:
    state = elastic("rows", dataset, 2)[0].state([[0]] * 12)
    with pytest.raises(StateError, match="damaged"):
        elastic("rows", dataset, 2)[0].resumed({**state, "world_size": ranks})


@KINDS
@pytest.mark.parametrize("before", [1, 2, 4])
def test_saved_by_some_ranks_and_resumed_by_others(dataset: h5pack.H5Dataset, kind: str, before: int) -> None:
    whole = elastic(kind, dataset, before)
    steps = steps_of(whole), steps_of(whole)
    saving = elastic(kind, dataset, before)
    iterators = [iter(rank.loader) for rank in saving]
    received: list[list[list[int]]] = [[] for _ in saving]
    for step in range(len(steps[0]) + 1):
        states = [rank.state(batches) for rank, batches in zip(saving, received, strict=True)]
        assert all(state == states[0] for state in states), "any rank's state is that of all"
        resumed = [rank.resumed(states[0]) for rank in elastic(kind, dataset, [1, 2, 4][step % 3])]
        assert steps_of(resumed) == steps[0][step:]
        assert steps_of(resumed) == steps[1]
        for batches, iterator in zip(received, iterators, strict=True):
            batches += itertools.islice(iterator, 1)


def test_state_between_multiples_of_the_streams_resumes_on_the_same_ranks_only(dataset: h5pack.H5Dataset) -> None:
    def make(count: int) -> h5pack.ChunkSampler:
        return h5pack.ChunkSampler(dataset, streams=4, rank=1, num_replicas=count)

    sampler = make(2)
    whole = list(sampler)
    same, other = make(2), make(4)
    same.load_state_dict(sampler.state_dict(7))
    assert list(same) == whole[7:]
    with pytest.raises(StateError, match="multiple of 2 rows"):
        other.load_state_dict(sampler.state_dict(7))
    other.load_state_dict(sampler.state_dict(6))
    assert other.state_dict()["rows"] == 3


# torchdata's StatefulDataLoader.


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.parametrize(
    ("kind", "workers", "size"),
    [("batches", 0, BATCH), ("rows", 0, 19), ("batches", 2, 19), ("rows", 2, BATCH), ("mixture", 2, BATCH)],
)
def test_stateful_from_every_step(dataset: h5pack.H5Dataset, stateful: Any, kind: str, workers: int, size: int) -> None:
    make = partial(Fed, kind, dataset, size=size, window=3)
    reference = make()
    expected = [batch for _ in range(4) for batch in reference.epoch()]
    length = len(expected) // 4
    fed = make(workers=workers, loader_class=stateful)
    # States, and which batches the next epoch must have.
    places: list[tuple[bytes, int, int]] = []

    def save(low: int, high: int) -> None:
        places.append((pickle.dumps(fed.loader.state_dict()), low, high))

    save(0, length)
    for low in (0, length):
        iterator = iter(fed.loader)
        save(low, low + length)
        for number in range(low, low + length):
            assert next(iterator) == expected[number]
            save(number + 1, low + length)
        assert next(iterator, None) is None
        # That iteration is over, and the next one is a whole epoch.
        save(low + length, low + 2 * length)
    # Workers are started for some of the states only, among them those at the end of the last epoch.
    for state, low, high in places[:: -5 if workers else -1] + places[-2:-1]:
        fed = make(workers=workers, loader_class=stateful)
        fed.loader.load_state_dict(pickle.loads(state))
        assert [fed.epoch(), fed.epoch()] == [expected[low:high], expected[high : high + length]]


@ALL_KINDS
def test_stateful_after_an_epoch_that_was_broken_off(dataset: h5pack.H5Dataset, stateful: Any, kind: str) -> None:
    reference = Fed(kind, dataset)
    reference.epoch()
    fed, again, other = (Fed(kind, dataset, seed=seed, loader_class=stateful) for seed in (0, 0, 1))
    next(iter(fed.loader))
    iter(fed.loader)
    again.loader.load_state_dict(fed.loader.state_dict())
    assert again.epoch() == reference.epoch()
    other.loader.load_state_dict(fed.loader.state_dict())
    with pytest.raises(StateError, match="seed"):
        iter(other.loader)


@pytest.mark.parametrize(("kind", "workers"), [("batches", 2), ("rows", 0)])
def test_stateful_with_every_third_state(dataset: h5pack.H5Dataset, stateful: Any, kind: str, workers: int) -> None:
    make = partial(Fed, kind, dataset, workers, loader_class=partial(stateful, snapshot_every_n_steps=3))
    fed, expected = make(), Fed(kind, dataset).epoch()
    states = [pickle.dumps(fed.loader.state_dict()) for _ in itertools.islice(fed.loader, 5)]
    for number in (0, 2, 4):
        again = make()
        again.loader.load_state_dict(pickle.loads(states[number]))
        assert again.epoch() == expected[number + 1 :]


@KINDS
def test_a_sampler_of_no_rows_has_empty_epochs(dataset: h5pack.H5Dataset, kind: str) -> None:
    none = Fed(kind, dataset, indices=[])
    assert (len(none.sampler), none.epoch(), none.epoch(), none.sampler.epoch) == (0, [], [], 1)


def test_frameworks_know_that_a_sampler_of_rows_has_a_rank(dataset: h5pack.H5Dataset) -> None:
    sampler = h5pack.ChunkSampler(dataset, rank=1, num_replicas=3)
    for one in (sampler, pickle.loads(pickle.dumps(sampler))):
        assert isinstance(one, DistributedSampler)
        assert (one.rank, one.num_replicas) == (1, 3)
    assert list(one) == list(sampler)
    # Lightning divides the rows of a sampler that was created before the ranks were connected.
    assert not isinstance(h5pack.ChunkSampler(dataset), DistributedSampler)


@KINDS
def test_accelerate_does_not_divide_the_rows_of_a_rank(dataset: h5pack.H5Dataset, kind: str) -> None:
    loaders = pytest.importorskip("accelerate.data_loader", reason="pip install accelerate")

    def shares(ranks: int) -> list[int]:
        batches = [Fed(kind, dataset, rank=0, num_replicas=ranks).loader.batch_sampler for _ in range(2)]
        shards = [loaders.BatchSamplerShard(one, 2, rank, even_batches=False) for rank, one in enumerate(batches)]
        return sorted(index for shard in shards for batch in shard for index in batch)

    assert shares(1) == list(range(len(dataset)))
    with pytest.raises(OptionsError) as refused:
        shares(2)
    assert set(refused.value.parameters) >= {"rank", "num_replicas"}


@pytest.mark.parametrize("shuffle", ["window", "full", "chunk", False])
def test_steps_are_the_same_for_every_number_of_ranks(dataset: h5pack.H5Dataset, shuffle: str | bool) -> None:
    epochs = []
    for kind, count in itertools.product(("batches", "rows"), (1, 2, 4)):
        ranks = elastic(kind, dataset, count, shuffle=shuffle)
        epochs.append([steps_of(ranks), steps_of(ranks)])
    assert all(found == epochs[0] for found in epochs)
    assert [len(step) for step in epochs[0][1]] == [8] * 7 + [4]
    assert len(set(itertools.chain(*epochs[0][1]))) == 57
