"""Several packs as one dataset, and batches of them in proportions that hold everywhere."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate

import h5pack
from h5pack.data.concat import ConcatPack
from h5pack.data.decoding import DrawnIndex
from h5pack.data.mixture import MixtureSampler
from h5pack.data.samplers import draw_key
from h5pack.errors import DamagedRowsError, OptionsError, SizesDifferError, StateError
from h5pack.format.checksums import row_checksums
from tests.combine.packs import FIELD_NAMES, KINDS, pack
from tests.data import packs
from tests.data.packs import same
from tests.makers import pixels
from tests.order.plans import require_groups
from tests.read.encoded_files import encode, jpegs, write_encoded, write_kept

SIZES = (103, 40, 7)


def three_packs(folder: Path, dtypes: list[str], **settings: Any) -> ConcatPack:
    """Packs whose labels, of these dtypes, are 1,000 times the pack's number, plus the row."""
    datasets = []
    for number, (size, dtype) in enumerate(zip(SIZES, dtypes, strict=True)):
        labels = (np.arange(size) + 1_000 * number).astype(dtype)
        parts = {"images": packs.values(size), "labels": labels, "depth": packs.values(size, (3, 300))}
        path = packs.write(folder / f"{number}.h5", **parts, chunks=5 + number)
        datasets.append(h5pack.H5Dataset(path, **settings))
    return ConcatPack(datasets)


@pytest.fixture
def mixed(tmp_path: Path) -> ConcatPack:
    return three_packs(tmp_path, ["i8", ">i4", "u2"], with_rows=True)


@pytest.fixture
def alike(tmp_path: Path) -> ConcatPack:
    """Packs with labels of one dtype and a field."""
    return three_packs(tmp_path, ["i8"] * 3, fields=["depth"])


def owners(indices: list[int]) -> list[int]:
    return (np.searchsorted(np.cumsum(SIZES), indices, "right")).tolist()


def flat(sampler: Any) -> list[int]:
    return list(itertools.chain(*sampler))


def test_indices_run_over_all_datasets(mixed: ConcatPack) -> None:
    expected = [sample for dataset in mixed.datasets for sample in dataset]
    assert len(mixed) == len(expected) == 150
    for index in (0, 102, 103, 142, 143, 149, -1, -150, np.int64(5)):
        image, *numbers = mixed[index]
        assert torch.equal(image, expected[index][0])
        assert numbers == [*expected[index][1:]]
    for wrong in (150, -151):
        with pytest.raises(IndexError, match="150"):
            mixed[wrong]
    with mixed:
        assert len(mixed[0]) == len(mixed[149])
    assert len(mixed[0]) > 0, "a closed one opens its files again"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_in_the_order_asked_for(mixed: ConcatPack, workers: int) -> None:
    order = np.random.default_rng(0).permutation(150).tolist()
    asked = [order[:40], [149, -150, 103, 103], [3], [140, 141], *(order[at : at + 9] for at in range(0, 90, 9))]
    for collate in (None, mixed.collate, default_collate):
        loader = DataLoader(mixed, batch_sampler=asked, num_workers=workers, collate_fn=collate)  # type: ignore[arg-type]
        for indices, batch in zip(asked, loader, strict=True):
            assert same(batch, default_collate([mixed[index] for index in indices]))


def test_samples_with_transforms_and_pickles(mixed: ConcatPack) -> None:
    again = pickle.loads(pickle.dumps(mixed))
    assert same(again.collate(again.__getitems__([5, 149, 110])), mixed.collate(mixed.__getitems__([5, 149, 110])))
    changed = ConcatPack([h5pack.H5Dataset(one.path, target_transform=lambda label: -label) for one in mixed.datasets])
    assert [label for _, label in changed.__getitems__([120, 3, 144])] == [-1017, -3, -2001]
    assert mixed.collate(mixed.__getitems__([]))[0].shape == (0, *packs.SHAPE)


def test_a_transform_may_be_set_later(mixed: ConcatPack) -> None:
    mixed.datasets[0].transform = lambda image: image.size
    (batch,) = DataLoader(mixed, batch_sampler=[[0, 1]], collate_fn=list)
    assert [sample.image for sample in batch] == [mixed[index].image for index in (0, 1)] == [(12, 16)] * 2
    with pytest.raises(OptionsError):
        mixed.joined()


def test_encoded_images_of_several_sizes_are_samples_of_a_batch(tmp_path: Path) -> None:
    images = [pixels(number, size) for number, size in enumerate([(20, 14), (9, 31), (20, 14), (12, 25)])]
    rows = [encode(image, "PNG") for image in images]
    paths = [write_encoded(tmp_path / f"{number}.h5", rows[number : number + 3]) for number in (0, 2)]
    both = ConcatPack([h5pack.H5Dataset(path) for path in paths])
    order = [4, 1, 0, 2, 3]
    (found,) = DataLoader(both, batch_sampler=[order], collate_fn=list)
    assert [sample.image.tolist() for sample in found] == [images[[0, 1, 2, 2, 3][index]].tolist() for index in order]
    with pytest.raises(SizesDifferError):
        both.collate(both.__getitems__(order))


def test_a_batch_reads_each_dataset_once(mixed: ConcatPack) -> None:
    mixed.collate(mixed.__getitems__([0, 104, 1, 105, 2, 106]))
    assert [(stats.rows, stats.chunk_misses) for stats in mixed.stats()] == [(3, 1), (3, 1), (0, 0)]


@pytest.mark.parametrize(
    ("other", "field"),
    [
        *(({"images": packs.values(9, (5, 4, 3))}, "images"), ({"images": packs.values(9, dtype="f4")}, "images")),
        *(({"labels": None}, "labels"), ({"labels": np.zeros((9, 4), "u1")}, "labels")),
        *(({"labels": np.zeros(9)}, "labels"), ({}, "row numbers")),
    ],
    ids=["shape", "dtype", "no labels", "a table", "floats", "row numbers"],
)
def test_datasets_with_different_fields_are_refused(tmp_path: Path, other: dict[str, Any], field: str) -> None:
    parts = {"images": packs.values(9), "labels": np.arange(9)}
    one = h5pack.H5Dataset(packs.write(tmp_path / "a.h5", 4, **parts))
    parts = {name: part for name, part in {**parts, **other}.items() if part is not None}
    two = h5pack.H5Dataset(packs.write(tmp_path / "b.h5", 4, **parts), with_rows=not other)
    with pytest.raises(OptionsError, match=f"in {field}:") as caught:
        ConcatPack([one, two])
    assert caught.value.path == two.path


@pytest.mark.parametrize("others", [["depth", "weight"], ["depth"]], ids=["another order", "another field"])
def test_datasets_whose_fields_have_other_names_are_refused(tmp_path: Path, others: list[str]) -> None:
    # Otherwise, the fields of one dataset would be collated with different fields of the other.
    parts = {"images": packs.values(9), "weight": np.arange(9.0), "depth": -np.arange(9.0)}
    path = packs.write(tmp_path / "a.h5", 4, **parts)
    one, two = (h5pack.H5Dataset(path, fields=names) for names in (["weight", "depth"][: len(others)], others))
    with pytest.raises(OptionsError, match="in fields:"):
        ConcatPack([one, two])


@pytest.mark.parametrize(
    ("weights", "bound"), [([1, 1, 2], 2), ([0.5, 0.3, 0.2], 2.1), ([1, 0.003, 0.2], 2.1), (None, 2.0)], ids=str
)
def test_proportions_hold_in_every_thousand_rows(mixed: ConcatPack, weights: Any, bound: float) -> None:
    sampler = MixtureSampler(mixed, 64, weights=weights, num_samples=8_000, seed=1)
    found = np.array(owners(flat(sampler) + flat(sampler)))
    shares = np.array(SIZES if weights is None else weights, float)
    shares /= shares.sum()
    for number, share in enumerate(shares):
        counts = np.convolve(found == number, np.ones(1_000, np.int64), "valid")
        assert len(counts) > 14_000
        assert np.abs(counts - 1_000 * share).max() < bound


@pytest.mark.parametrize("shuffle", ["window", "full", "chunk", False])
def test_each_pack_goes_through_its_own_epochs(mixed: ConcatPack, shuffle: str | bool) -> None:
    sampler = MixtureSampler(mixed, 10, weights=[1, 1, 1], num_samples=500, seed=3, window=2, shuffle=shuffle)
    indices = np.array(flat(sampler) + flat(sampler))
    assert len(indices) == 1_000
    for number, (size, first) in enumerate(zip(SIZES, (0, 103, 143), strict=True)):
        mine = indices[(indices >= first) & (indices < first + size)].tolist()
        epochs = [mine[low : low + size] for low in range(0, len(mine), size)]
        assert len(epochs) > 3
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs[:-1])
        # The last dataset is a single chunk.
        assert number == 2 or (epochs[0] == epochs[1]) is (shuffle is False)


def test_steps_have_the_same_rows_for_every_number_of_ranks(mixed: ConcatPack) -> None:
    order: dict[str, Any] = {"num_samples": 300, "seed": 2}
    alone = list(MixtureSampler(mixed, 24, **order))
    assert len(alone) == 13
    for count in (2, 3, 4, 8):
        parts = [MixtureSampler(mixed, 24 // count, **order, rank=rank, num_replicas=count) for rank in range(count)]
        assert [list(itertools.chain(*step)) for step in zip(*parts, strict=True)] == alone


@pytest.mark.parametrize(("drop", "batches"), [(False, 13), (True, 12)])
def test_an_epoch_is_whole_batches_and_the_next_goes_on(mixed: ConcatPack, drop: bool, batches: int) -> None:
    sampler = MixtureSampler(mixed, 24, num_samples=300, seed=2, drop_last=drop)
    epochs = [list(sampler) for _ in range(3)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[24] * len(sampler)] * 3
    assert len(sampler) == batches
    assert list(itertools.chain(*epochs)) == list(MixtureSampler(mixed, 24, num_samples=24 * batches * 3, seed=2))
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    assert sampler.epoch == 1
    assert flat(MixtureSampler(mixed, 24, seed=2)) != flat(MixtureSampler(mixed, 24, seed=3))


def test_resuming_at_every_batch(mixed: ConcatPack) -> None:
    def make(batch_size: int = 12, **settings: Any) -> MixtureSampler:
        order = {"weights": [3, 1, 0.5], "num_samples": 400, "seed": 5, "window": 2}
        return MixtureSampler(mixed, batch_size, **{**order, **settings})

    never_stopped, running = make(), make()
    whole = [list(never_stopped), list(never_stopped)]
    next(iter(running))
    for done in range(len(whole[0]) + 1):
        state = json.loads(json.dumps(running.state_dict(batches_consumed=done)))
        again, *halves = make(), *(make(6, rank=rank, num_replicas=2) for rank in range(2))
        for sampler in (again, *halves):
            sampler.load_state_dict(state)
        assert [list(again), list(again)] == [whole[0][done:], whole[1]]
        assert [one + two for one, two in zip(*halves, strict=True)] == whole[0][done:]
    assert list(running) == whole[1]
    after = running.state_dict()
    assert (after["epoch"], after["batches"]) == (2, 0)
    changes = ({"weights": [3, 1, 0.6]}, {"seed": 6}, {"num_samples": 401}, {"window": 3}, {"drop_last": True})
    for change in (*changes, {"rank": 0, "num_replicas": 2}):
        with pytest.raises(StateError):
            make(**change).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"weights": weights} for weights in ([1, 2], [1, 0, 1], [1, 1, float("nan")], [1, 1, 1e-9], ["a", 1, 1], 3)),
        *({"num_samples": 0}, {"batch_size": 0}, {"window": 0}, {"seed": None}, {"shuffle": "rows"}),
        *({"num_samples": 2**63}, {"batch_size": 2**63}, {"rank": 2, "num_replicas": 2}),
    ],
    ids=str,
)
def test_error_names_the_parameter_at_fault(mixed: ConcatPack, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionsError) as caught:
        MixtureSampler(mixed, **{"batch_size": 8, **wrong})
    assert {name.partition("=")[0] for name in caught.value.parameters} & set(wrong)
    assert "nan" not in str(caught.value) or "nan" in str(wrong)


def test_what_cannot_be_concatenated_or_mixed(mixed: ConcatPack, tmp_path: Path) -> None:
    empty = h5pack.H5Dataset(packs.write(tmp_path / "e.h5", images=packs.values(0), chunks=None))
    for make, parameters, path in (
        (lambda: ConcatPack([]), ("datasets",), None),
        (lambda: ConcatPack([mixed]), ("datasets",), None),
        (lambda: MixtureSampler(mixed.datasets[0], 8), ("dataset",), None),
        (lambda: MixtureSampler(ConcatPack([empty]), 8), None, empty.path),
    ):
        with pytest.raises(OptionsError) as caught:
            make()
        assert parameters in (None, caught.value.parameters)
        assert path in (None, caught.value.path)


def test_a_tiny_pack_beside_a_large_one_has_a_share(tmp_path: Path) -> None:
    datasets = []
    for size in (90_000, 4):
        path = tmp_path / f"{size}.h5"
        packs.write(path, min(size, 1_000), images=np.zeros((size, 2), np.uint8), labels=np.arange(size))
        datasets.append(h5pack.H5Dataset(path))
    drawn = flat(MixtureSampler(ConcatPack(datasets), 100, num_samples=20_000))
    assert len(drawn) == 20_000
    assert sum(index >= 90_000 for index in drawn) >= 2


ORDER: dict[str, Any] = {"weights": [3, 1, 2], "num_samples": 300, "seed": 3, "window": 2}


@pytest.mark.parametrize(("way", "threads"), [("mapped", 1), ("mapped", 4), ("read", 2)])
@pytest.mark.parametrize(
    "order", [{}, {"shuffle": "full"}, {"shuffle": "chunk"}, {"shuffle": False}, {"drop_last": True}], ids=str
)
def test_a_loader_gives_the_batches_of_a_dataloader(
    alike: ConcatPack, way: str, threads: int, order: dict[str, Any]
) -> None:
    with packs.rows_by(way, *(Path(one.path) for one in alike.datasets)):
        samplers = [MixtureSampler(alike, 14, **{**ORDER, **order}) for _ in range(2)]
        expected = DataLoader(alike, batch_sampler=samplers[0])
        with h5pack.H5Loader(alike, batch_sampler=samplers[1], num_threads=threads) as loader:
            assert len(loader) == len(expected) == (21 if "drop_last" in order else 22)
            for epoch in range(2):
                batches = list(loader)
                assert packs.all_same(batches, list(expected)), "the smallest pack is repeated 14 times in an epoch"
                assert loader.epoch == samplers[1].epoch == epoch
                assert loader.state_dict() == samplers[0].state_dict()


def test_datasets_that_were_joined_twice_must_decode_alike(tmp_path: Path) -> None:
    path = pack(tmp_path, "a", 6, ["cat", "dog"], **KINDS["jpeg"])
    one, other = (h5pack.H5Dataset(path, decode=h5pack.CenterCrop(8, resize=resize)) for resize in (8, 9))
    both = ConcatPack([one, other]).joined()
    for datasets in ([one, other], [both, one], [one, both]):
        with pytest.raises(OptionsError, match="differ in decode"):
            h5pack.H5Loader(ConcatPack(datasets), 2)
        assert len(h5pack.H5Loader(ConcatPack(datasets), 2, decode=h5pack.CenterCrop(8))) >= 6


def plain(batch: Any) -> list[Any]:
    return [
        [one.tolist() if isinstance(one, torch.Tensor) else one for one in value] if isinstance(value, list) else value
        for value in (value.tolist() if isinstance(value, torch.Tensor) else value for value in batch)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_mixes_packs_of_every_kind(tmp_path: Path, kind: str) -> None:
    paths = [pack(tmp_path, name, count, ["cat", "dog"], **KINDS[kind]) for name, count in (("a", 14), ("b", 5))]
    crop = {"decode": h5pack.RandomResizedCrop(9)} if kind == "jpeg" else {}
    fields = [name for name in FIELD_NAMES if not crop or name != "sizes"]
    both = ConcatPack([h5pack.H5Dataset(path, fields=fields, with_rows=True, check=True) for path in paths])
    order: dict[str, Any] = {"weights": [1, 1], "num_samples": 40, "seed": 2, "window": 1}
    sampler, again = (MixtureSampler(both, 4, **order) for _ in range(2))
    with h5pack.H5Loader(both, batch_sampler=sampler, num_threads=2, **crop) as loader:
        found = [plain(batch) for batch in loader]
    # The loader reads all packs as one file, so row numbers, from which crops are drawn, too, are those of that file.
    joined = both.joined().with_decode(crop.get("decode"), True)
    keyed = [joined.collate(joined.__getitems__(DrawnIndex.of(batch, key))) for batch, key in keys(again)]
    assert found == [plain(batch) for batch in keyed]
    assert not crop or len({json.dumps(batch[0]) for batch in found}) == len(found)


@pytest.mark.parametrize("checks", [(False, True), (True, False)])
def test_a_loader_checks_the_rows_of_all_packs_if_one_is_checked(tmp_path: Path, checks: tuple[bool, ...]) -> None:
    paths = [tmp_path / "0.h5", tmp_path / "1.h5"]
    for path in paths:
        images = packs.values(9)
        packs.write(path, 5, images=images, **{"checksums/images": row_checksums(images)})
    packs.flip(paths[1], 5)
    both = ConcatPack([h5pack.H5Dataset(path, check=check) for path, check in zip(paths, checks, strict=True)])
    with pytest.raises(DamagedRowsError):
        list(h5pack.H5Loader(both, 6))


CENTER, RANDOM = h5pack.CenterCrop(8), h5pack.RandomResizedCrop(8)


@pytest.mark.parametrize("other", [{"decode": RANDOM}, {"decode": CENTER, "exact": False}], ids=str)
def test_a_loader_needs_one_decode_for_all_packs(tmp_path: Path, other: dict[str, Any]) -> None:
    path = write_kept(tmp_path / "f.h5", jpegs(5))
    one, two = h5pack.H5Dataset(path, decode=CENTER), h5pack.H5Dataset(path, **other)
    for both in (ConcatPack([one, two]), ConcatPack([two, one])):
        for settings in ({"batch_size": 5}, {"batch_sampler": MixtureSampler(both, 5)}):
            with pytest.raises(OptionsError):
                h5pack.H5Loader(both, **settings)
            assert len(list(h5pack.H5Loader(both, **settings, decode=CENTER))) == 2
        assert len(list(DataLoader(both, batch_size=5))) == 2
    assert len(list(h5pack.H5Loader(ConcatPack([two, two]), 5))) == 2


def keys(sampler: MixtureSampler) -> list[tuple[list[int], Any]]:
    """The batches of a sampler, and what their crops are drawn from."""
    slots = np.arange(sampler.batch_size)
    return [(batch, draw_key(sampler.plan, sampler.epoch, number, slots)) for number, batch in enumerate(sampler)]


def test_a_loader_resumes_in_mid_epoch_on_any_number_of_ranks(alike: ConcatPack) -> None:
    def make(batch_size: int = 12, **ranks: Any) -> h5pack.H5Loader:
        return h5pack.H5Loader(alike, batch_sampler=MixtureSampler(alike, batch_size, **ORDER, **ranks), num_threads=2)

    never_stopped = make()
    whole = [list(never_stopped), list(never_stopped)]
    for done in (0, 1, 7, len(whole[0]) - 1, len(whole[0])):
        with make() as running:
            iterator = iter(running)
            for _ in range(done):
                next(iterator)
            state = json.loads(json.dumps(running.state_dict()))
        assert state["batches"] == done
        again, *halves = make(), *(make(6, rank=rank, num_replicas=2) for rank in range(2))
        for loader in (again, *halves):
            loader.load_state_dict(state)
        assert [packs.all_same(list(again), rest) for rest in (whole[0][done:], whole[1])] == [True, True]
        steps = list(zip(*halves, strict=True))
        assert len(steps) == len(whole[0]) - done
        for step, batch in zip(steps, whole[0][done:], strict=True):
            assert same([torch.cat(parts) for parts in zip(*step, strict=True)], batch)
        sampler = MixtureSampler(alike, 12, **ORDER)
        sampler.load_state_dict(state)
        assert packs.all_same(list(DataLoader(alike, batch_sampler=sampler)), whole[0][done:])
    used = make()
    assert len(list(DataLoader(alike, batch_sampler=used.batch_sampler, num_workers=1))) == len(used)
    used.set_epoch(0)
    copy = pickle.loads(pickle.dumps(used))
    assert copy.batch_sampler.dataset is copy.dataset
    assert packs.all_same(list(copy), whole[0])
    copy.batch_sampler.set_epoch(0)
    assert packs.all_same(list(copy), whole[0]), "the sampler's epoch is the loader's, as with a DataLoader"


def test_a_loader_refuses_what_contradicts_its_batch_sampler(alike: ConcatPack) -> None:
    sampler = MixtureSampler(alike, 12)
    given: dict[str, Any] = {"batch_size": 12, "shuffle": False, "seed": 1, "window": 2, "drop_last": True, "rank": 0}
    given |= {"num_replicas": 1, "streams": 1, "lanes": 2, "indices": [1], "weights": [1, 2, 3], "num_samples": 9}
    for name, value in given.items():
        with pytest.raises(OptionsError) as caught:
            h5pack.H5Loader(alike, batch_sampler=sampler, **{name: value})
        assert caught.value.parameters == ("batch_sampler", name)
    # An equal value need not be the same object.
    h5pack.H5Loader(alike, batch_sampler=sampler, shuffle="".join(["win", "dow"]), seed=0).close()
    other_sampler: Any = BatchSampler(range(9), 3, drop_last=False)
    changed = type("Changed", (MixtureSampler,), {"__iter__": lambda self: iter([[0]])})(alike, 12)
    other = ConcatPack(alike.datasets)
    for make, parameters in (
        (lambda: h5pack.H5Loader(alike, batch_sampler=other_sampler), ("batch_sampler", "batch_size")),
        (lambda: h5pack.H5Loader(alike, batch_sampler=changed), ("batch_sampler", "batch_size")),
        (lambda: h5pack.H5Loader(other, batch_sampler=sampler), ("dataset", "batch_sampler")),
        (lambda: h5pack.H5Loader(alike), ("batch_size",)),
    ):
        with pytest.raises(OptionsError) as caught:
            make()
        assert caught.value.parameters == parameters


@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_are_read_before_they_are_needed(alike: ConcatPack, ranks: int) -> None:
    for rank in range(ranks):
        sampler = MixtureSampler(alike, 12, **ORDER, rank=rank, num_replicas=ranks)
        _, plan = sampler.for_loader()
        require_groups(plan, 0, 3)
        asked, needed, ahead = Counter[int](), Counter[int](), []
        for group in plan.chunk_groups(0, 3):
            for rows in group.upcoming:
                assert (np.diff(rows) > 0).all()
                asked.update(rows.tolist())
            needed.update(group.rows.tolist())
            assert needed <= asked, "rows are asked for with the batch that has them at the latest"
            ahead.append((asked - needed).total())
        # At most two windows of 2 chunks of each pack, whose chunks have 5, 6 and 7 rows, and not those of other ranks.
        assert 0 < max(ahead) <= 2 * 2 * (5 + 6 + 7)
        assert ranks == 1 or max(ahead) < 2 * (5 + 6 + 7)
