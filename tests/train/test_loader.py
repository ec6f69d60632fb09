"""From what users have to windows: every kind of data, order and worker; settings obeyed or refused."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run


class Items(Dataset):
    """Item i is the number i."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)


def windows(make: Any, epochs: int = 1, directory: Any = None, stop: int | None = None) -> list[list[list[int]]]:
    """Per window: the micro-batches of this rank. `make(run)` gives the loader."""
    seen = []
    with quiet_run(directory, timeout_s=20) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        loader = make(run)
        for _ in run.epochs(epochs):
            for window in loader:
                rows = []
                for batch in window:
                    values = batch[0] if isinstance(batch[0], torch.Tensor) and batch[0].ndim else batch
                    rows.append(values.flatten().tolist() if isinstance(values, torch.Tensor) else list(values))
                    window.backward(model(torch.ones(1)).mean())
                window.step()
                seen.append(rows)
                if len(seen) == stop:
                    run.save()
                    return seen
    return seen


def flat(value: Any) -> list[int]:
    return [x for item in value for x in (flat(item) if isinstance(item, list) else [item])]


def together(ranks: list[Any]) -> list[list[int]]:
    """The windows of all ranks: each one's micro-batches in the order of the ranks."""
    return [flat([list(part) for part in parts]) for parts in zip(*ranks, strict=True)]


# Adoption of DataLoaders ----------------------------------------------------------------------------------------------


class Evens(Sampler):
    """An order of one's own, that draws, and knows the epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        offset = int(torch.randint(self.length, ())) * 2
        return iter([(offset + 2 * i) % self.length for i in range(self.length // 2)])

    def __len__(self) -> int:
        return self.length // 2


def strings(samples: list[int]) -> list[str]:
    return [f"s{value}" for value in samples]


def adopted(kind: str, workers: int, epochs: int = 2) -> Any:
    data, how = Items(10), {"num_workers": workers}
    makers = {
        "sequential": lambda: DataLoader(data, 4, **how),
        "drop_last": lambda: DataLoader(data, 4, drop_last=True, **how),
        "shuffle": lambda: DataLoader(data, 4, shuffle=True, **how),
        "sampler": lambda: DataLoader(data, 4, sampler=Evens(10), **how),
        "some": lambda: DataLoader(data, 4, sampler=RandomSampler(data, num_samples=6), **how),
        "replacement": lambda: DataLoader(data, 4, sampler=RandomSampler(data, replacement=True), **how),
        "weighted": lambda: DataLoader(data, 4, sampler=WeightedRandomSampler([0.0] * 8 + [1.0] * 2, 10), **how),
        "weighted once": lambda: DataLoader(
            data, 4, sampler=WeightedRandomSampler([1.0] * 10, 6, replacement=False), **how
        ),
        "distributed": lambda: DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=True), **how),
        "distributed in order": lambda: DataLoader(
            data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=False), **how
        ),
        "batch sampler": lambda: DataLoader(data, batch_sampler=Buckets(), **how),
        "collate": lambda: DataLoader(data, 4, collate_fn=strings, **how),
        "tensors": lambda: DataLoader(TensorDataset(torch.arange(10)), 4, shuffle=True, **how),
        "subset": lambda: DataLoader(Subset(data, [9, 1, 2, 3, 4]), 4, **how),
    }
    options = {"micro_batches": 2} if kind == "batch sampler" else {"micro_batch_size": 2}
    return windows(lambda run: run.loader(makers[kind](), **options), epochs)


class Buckets(Sampler):
    """Batches of uneven sizes, in an order that is drawn."""

    def __iter__(self) -> Any:
        batches = [[0], [1, 2, 3], [4, 5], [6], [7, 8, 9]]
        return iter([batches[i] for i in torch.randperm(5).tolist()])

    def __len__(self) -> int:
        return 5


KINDS = [
    "sequential",
    "drop_last",
    "shuffle",
    "sampler",
    "some",
    "replacement",
    "weighted",
    "weighted once",
    "distributed",
]
KINDS += ["distributed in order", "batch sampler", "collate", "tensors", "subset"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_existing_dataloader_gives_the_same_windows_on_any_ranks_and_workers(kind: str) -> None:
    (alone,) = run_ranks(adopted, 1, kind, 0)
    whole = together([alone])
    assert together(run_ranks(adopted, 2, kind, 0)) == whole
    assert together(run_ranks(adopted, 2, kind, 1)) == whole
    per_epoch = {"drop_last": 2, "sampler": 2, "some": 2, "weighted once": 2, "subset": 2}.get(kind, 3)
    assert len(whole) == 2 * per_epoch
    epochs = [flat(whole[:per_epoch]), flat(whole[per_epoch:])]
    everything = list(range(10))
    for epoch in epochs:
        if kind in ("sequential", "distributed in order"):
            assert epoch == everything
        elif kind in ("shuffle", "distributed", "batch sampler", "tensors"):
            assert sorted(epoch) == everything
            assert epochs[0] != epochs[1]
        elif kind == "weighted":
            assert set(epoch) == {8, 9}
        elif kind == "collate":
            assert epoch == strings(everything)
        elif kind == "drop_last":
            assert epoch == everything[:8]
        elif kind == "subset":
            assert epoch == [9, 1, 2, 3, 4]
        elif kind == "sampler":
            assert sorted(epoch) == [0, 2, 4, 6, 8]
        elif kind in ("some", "weighted once"):
            assert len(set(epoch)) == 6


def sized() -> float:
    with quiet_run() as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        data = torch.tensor([1.0, 10.0, 10.0, 10.0])
        for window in run.loader(data, batch_sampler=[[0], [1, 2, 3]], micro_batches=2):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        return net.w.item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_of_a_batch_sampler_are_weighted_by_their_size(ranks: int) -> None:
    assert run_ranks(sized, ranks) == [pytest.approx(1 - 0.1 * 31 / 4)] * ranks


@pytest.mark.parametrize("batches", [[[0], []], [[0, 10]], [[-1]], [], [3, 4]])
def test_a_batch_sampler_that_gives_no_batches_of_indices_is_refused(batches: Any) -> None:
    with quiet_run() as run, pytest.raises(samestep.DataError, match="batch"):
        run.loader(Items(), batch_sampler=batches)


# Other kinds of data --------------------------------------------------------------------------------------------------


class Fetching(Items):
    """Is asked for whole batches."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert len(indices) > 1
        return [100 + index for index in indices]


DATA: dict[str, Any] = {
    "tensor": torch.arange(8),
    "array": np.arange(8),
    "pair": (torch.arange(8), np.arange(8)),
    "list": list(range(8)),
    "tensor dataset": TensorDataset(torch.arange(8)),
}


@pytest.mark.parametrize("kind", DATA)
def test_tensors_arrays_lists_and_datasets_are_data(kind: str) -> None:
    assert flat(windows(lambda run: run.loader(DATA[kind], batch_size=4, micro_batch_size=2))) == list(range(8))


def test_a_dataset_that_fetches_batches_is_asked_once_a_micro_batch_also_through_a_subset() -> None:
    assert flat(windows(lambda run: run.loader(Fetching(), batch_size=4, micro_batch_size=2))) == list(range(100, 110))
    part = Subset(Fetching(), [3, 2, 1, 0])
    assert flat(windows(lambda run: run.loader(part, batch_size=4, micro_batch_size=2))) == [103, 102, 101, 100]


@pytest.mark.parametrize("data", [{}, {"x": torch.ones(2)}, "text", None, 3, (torch.ones(2), torch.ones(3)), iter([1])])
def test_what_is_no_dataset_is_refused(data: Any) -> None:
    with quiet_run() as run, pytest.raises(samestep.DataError):
        run.loader(data, batch_size=1)


@pytest.mark.parametrize("data", [Items(0), torch.empty(0), []])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_empty_dataset_is_refused(data: Any, shuffle: bool) -> None:
    with quiet_run() as run, pytest.raises(samestep.DataError, match="empty dataset"):
        run.loader(data, batch_size=1, shuffle=shuffle)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, "8", True, 2.5, None])
def test_a_batch_size_is_a_whole_number_of_samples(value: Any) -> None:
    for data in (Items(), Numbers(8)):
        with quiet_run() as run, pytest.raises(samestep.ConfigError, match="batch_size"):
            run.loader(data, batch_size=value)


@pytest.mark.parametrize("value", [0, -1, "8", True, 2.5])
def test_a_batch_size_of_a_dataloader_is_not_silently_kept(value: Any) -> None:
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match="batch_size"):
        run.loader(DataLoader(Items(), 4), batch_size=value)


@pytest.mark.parametrize("value", [0, -1, "2", True, 2.5])
@pytest.mark.parametrize("name", ["micro_batch_size", "micro_batches"])
def test_a_micro_batch_setting_is_a_whole_number(name: str, value: Any) -> None:
    for data in (Items(), Numbers(8), DataLoader(Items(), 4)):
        with quiet_run() as run, pytest.raises(samestep.ConfigError, match=name.replace("_", ".")):
            run.loader(data, **{name: value}, **({} if isinstance(data, DataLoader) else {"batch_size": 4}))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 4, "micro_batch_size": 5}, "micro_batch_size=5 with batch_size=4"),
        ({"batch_size": 4, "micro_batches": 5}, "micro_batches=5"),
        ({"batch_size": 8, "micro_batches": 5}, "micro_batches=5"),
        ({"batch_size": 8, "micro_batches": 2, "micro_batch_size": 2}, "micro_batches"),
        ({"batch_size": 4, "num_wrokers": 2}, "unknown loader setting 'num_wrokers'"),
        ({"batch_size": 4, "sampler": [1, 2], "shuffle": True}, "sampler and shuffle"),
        ({"batch_size": 4, "weights": [1.0] * 10, "shuffle": True}, "weights and shuffle"),
        ({"batch_size": 4, "weights": [1.0] * 9}, "9 weights for 10 samples"),
        ({"batch_size": 4, "num_draws": 5}, "num_draws"),
        ({"batch_size": 4, "batch_sampler": [[1]]}, "batch sampler"),
        ({"micro_batch_size": 4, "batch_sampler": [[1]]}, "batch sampler"),
        ({"weights": [1.0] * 10, "batch_sampler": [[1]]}, "batch sampler"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "batch sampler"),
        ({"batch_size": 4, "pin_memory": True}, "pin_memory=True on a CPU"),
        ({"batch_size": 4, "num_workers": -1}, "num_workers=-1"),
        ({"batch_size": 4, "num_workers": 1.0}, "num_workers=1.0"),
        ({"batch_size": 4, "prefetch_factor": 2}, "prefetch_factor"),
        ({"batch_size": 4, "persistent_workers": True}, "persistent_workers"),
        ({"batch_size": 4, "drop_last": 1}, "drop_last=1"),
    ],
)
def test_a_setting_that_cannot_be_obeyed_is_refused(settings: dict[str, Any], match: str) -> None:
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match=match):
        run.loader(Items(), **settings)


def test_workers_of_a_dataloader_can_be_switched_off() -> None:
    given = DataLoader(Items(), 5, num_workers=1, prefetch_factor=3)
    assert flat(windows(lambda run: run.loader(given, num_workers=0))) == list(range(10))


def test_the_runs_micro_batches_hold_for_loaders_that_do_not_say() -> None:
    with quiet_run(micro_batches=4) as run:
        assert run.loader(Items(), batch_size=8).source.micro_batches == 4
        assert run.loader(Items(), batch_size=8, micro_batch_size=8).source.micro_batches == 1
        assert run.loader(Items(), batch_size=8, micro_batches=2).source.micro_batches == 2


def more_ranks_than_micro_batches() -> None:
    windows(lambda run: run.loader(Items(), batch_size=4, micro_batch_size=2))


def test_more_ranks_than_micro_batches_are_refused_when_training_begins() -> None:
    with pytest.raises(RanksFailed, match=r"3 ranks for 2 micro-batch\(es\) a window"):
        run_ranks(more_ranks_than_micro_batches, 3)


def test_a_name_is_used_once() -> None:
    with quiet_run() as run:
        run.loader(Items(), batch_size=2, name="train")
        with pytest.raises(samestep.ConfigError, match="second loader named 'train'"):
            run.loader(Items(), batch_size=2, name="train")


# Streams --------------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    """0, 1, 2, ...: read whole by each reader."""

    def __init__(self, length: int, epoch: int = 0) -> None:
        self.length, self.epoch = length, epoch

    def __iter__(self) -> Any:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.length))


class Sharded(Numbers):
    """Can be read in parts of uneven lengths."""

    def shard(self, num_shards: int, index: int) -> Any:
        return iter(
            range(1000 * self.epoch + index * 100, 1000 * self.epoch + index * 100 + self.length // (1 + index))
        )


def stream(kind: type, workers: int, length: int, directory: Any = None, stop: int | None = None) -> Any:
    def make(run: samestep.Run) -> Any:
        return run.loader(kind(length), batch_size=6, micro_batch_size=2, num_workers=workers)

    return windows(make, 2, directory, stop)


@pytest.mark.parametrize("kind", [Numbers, Sharded])
@pytest.mark.parametrize("length", [23, 24, 1])
def test_a_stream_gives_the_same_windows_on_any_ranks_and_workers(kind: type, length: int) -> None:
    (alone,) = run_ranks(stream, 1, kind, 0, length)
    whole = together([alone])
    expected = length if kind is Numbers else length + length // 2 + length // 3
    assert len(flat(whole)) == len(set(flat(whole))) == 2 * expected, "each sample once an epoch"
    for ranks, workers in ((2, 0), (3, 0), (1, 2), (2, 2)):
        assert together(run_ranks(stream, ranks, kind, workers, length)) == whole, (ranks, workers)


@pytest.mark.parametrize("kind", [Numbers, Sharded])
def test_a_stream_continues_in_the_middle_on_another_number_of_ranks(tmp_path: Any, kind: type) -> None:
    (alone,) = run_ranks(stream, 1, kind, 0, 23)
    first = together(run_ranks(stream, 2, kind, 0, 23, str(tmp_path), 5))
    second = together(run_ranks(stream, 3, kind, 2, 23, str(tmp_path)))
    assert first + second == together([alone])


@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": True},
        {"weights": [1.0]},
        {"sampler": [1]},
        {"drop_last": True},
        {"batch_sampler": [[1]]},
        {"num_draws": 2},
    ],
)
def test_what_a_stream_cannot_obey_is_refused(settings: dict[str, Any]) -> None:
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match=f"got {next(iter(settings))}"):
        run.loader(Numbers(8), batch_size=4, **settings)


def test_a_dataloaders_drop_last_is_not_silently_lost_for_a_stream() -> None:
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match="got drop_last"):
        run.loader(DataLoader(Numbers(8), 4, drop_last=True))


def test_the_length_of_a_stream_is_unknown() -> None:
    with quiet_run() as run, pytest.raises(TypeError, match="known when it ends"):
        len(run.loader(Numbers(8), batch_size=4))


# Things that go wrong ---------------------------------------------------------------------------------------------------


class Failing(Items):
    """Raises, or kills its process, at item 6."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> int:
        if index == 6 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 6:
            raise KeyError("image_6.png")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_comes_out_as_it_is(workers: int) -> None:
    with pytest.raises(KeyError, match="image_6"):
        windows(lambda run: run.loader(Failing("raise"), batch_size=2, num_workers=workers))


def a_killed_worker() -> None:
    with quiet_run(timeout_s=30) as run:
        data = Failing("kill")  # rank 1 has the items 2, 3, 6 and 7
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        for window in run.loader(data, batch_size=4, micro_batch_size=1, num_workers=1):
            for _ in window:
                window.backward(model(torch.ones(1)).mean())
            window.step()


def test_a_killed_worker_ends_all_ranks_with_its_name() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(a_killed_worker, 2)
    # torch says "DataLoader worker (pid ...) is killed" or, now and then, that its connection was reset.
    assert isinstance(failed.value.errors[1], RuntimeError | OSError)
    assert "rank 1 failed first:" in str(failed.value.errors[0])


# Randomness -----------------------------------------------------------------------------------------------------------


class Noisy(Items):
    """Draws while fetching."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) + index


def dropout_masks(workers: int, noisy: bool) -> list[Any]:
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        masks = []
        data = Noisy() if noisy else torch.ones(10, 4)
        for window in run.loader(data, batch_size=4, micro_batch_size=1, num_workers=workers, shuffle=True):
            for batch in window:
                x = batch if noisy else batch[0]
                window.backward(model(x).sum())
                masks.append(
                    ((torch.nn.functional.dropout(torch.ones(8)) == 0).tolist(), torch.rand(1).item(), x.tolist())
                )
            window.step()
        return masks


@pytest.mark.parametrize("noisy", [True, False])
def test_fetching_in_the_main_process_does_not_disturb_dropout(noisy: bool) -> None:
    without, with_workers = dropout_masks(0, noisy), dropout_masks(2, noisy)
    assert without == with_workers
    assert len({str(mask) for mask, _, _ in without}) > 5


# Leaving early --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_was_left_early_goes_on_where_it_stopped(workers: int) -> None:
    with quiet_run() as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        train = run.loader(Items(), batch_size=2, micro_batch_size=1, num_workers=workers)
        seen = []
        for _ in range(2):
            for window in train:
                for x in window:
                    seen += x.tolist()
                    window.backward(model(torch.ones(1)).mean())
                window.step()
                if window.number == 1 and len(seen) == 4:
                    break
        assert seen == list(range(10))


def test_a_loader_is_iterated_once_in_an_epoch_of_the_run() -> None:
    with quiet_run() as run:
        net = Weight()
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        train = run.loader(Items(), batch_size=5)
        with pytest.raises(samestep.WindowError, match="iterated twice in epoch 0"):
            for _ in run.epochs(1):
                list(train)
                list(train)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluating_the_training_loader_in_mid_epoch_does_not_touch_its_pass(workers: int) -> None:
    with quiet_run() as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        train = run.loader(Items(), batch_size=2, num_workers=workers)
        seen, evaluated = [], []
        for window in train:
            for x in window:
                seen += x.tolist()
                window.backward(model(torch.ones(1)).mean())
            window.step()
            if window.number == 1:
                evaluated = [value for x in run.evaluate(train) for value in x.tolist()]
        assert evaluated == list(range(10))
        assert seen == list(range(10))


def test_sequential_samplers_are_kept_sequential() -> None:
    given = DataLoader(Items(), batch_sampler=BatchSampler(SequentialSampler(Items()), 3, False))
    assert flat(windows(lambda run: run.loader(given))) == list(range(10))
