"""The loader for PyTorch: the batch is always that of the share, whatever was predicted."""

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import pytest

import ringfold as rf
from ringfold.data.queue import Queue
from ringfold.data.sampler import Plan, Sampler, Share

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from ringfold.torch import Loader  # noqa: E402

SIZE, ME = 60, 1


class Squares:
    """A map-style data set."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(index * index)


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[tuple[int, float]]:
        return ((index, float(index * index)) for index in range(SIZE))


def read(start: int, stop: int) -> Iterable[tuple[int, float]]:
    return [(index, float(index * index)) for index in range(start, stop)]


class FakeStep:
    """A step of a run in which members come and go, and do not always contribute."""

    def __init__(self, sampler: Sampler, members: tuple[int, ...]) -> None:
        self.sampler, self.members = sampler, members
        plan = sampler.plan(members)
        assert plan is not None
        self.plan: Plan = plan

    def shard(self) -> Share:
        return self.sampler.share(self.plan, ME)

    def predicted_shards(self, steps: int) -> list[Share]:
        plan, found = self.plan, []
        for _ in range(steps):
            plan = self.sampler.plan_after(plan, self.members)
            found.append(self.sampler.share(plan, ME))
        return found

    def end(self, contributors: set[int]) -> None:
        self.sampler.settle(self.plan.settle(contributors), self.members, 1, None)


def all_samples(loader: Loader, sampler: Sampler, draw: Random, passes: int = 2) -> list[int]:
    """What this peer uses until so many passes are over; the other members use the rest."""
    used: list[int] = []
    while sampler.passes_done < passes:
        step = FakeStep(sampler, draw.choice(((1, 2), (1, 2), (1, 2), (1, 2, 3), (1,), (1, 4))))
        batch, share = loader.next(step), step.shard()
        contributors = {member for member in step.members if draw.random() < 0.8}
        if batch is None:
            assert not share
        else:
            indices, squares = batch
            assert indices.tolist() == share.indices.tolist()
            assert squares.tolist() == [float(index * index) for index in indices.tolist()]
        for member in contributors:
            used += sampler.share(step.plan, member).indices.tolist()
        step.end(contributors)
    return used


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable", "read", "stateful"])
def test_batches_are_those_of_the_shares(kind: str, num_workers: int) -> None:
    loader_type: Callable[..., Iterable[Any]] = DataLoader
    if kind == "stateful":
        loader_type = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    sources: dict[str, Any] = {"map": Squares(), "stateful": Squares(), "iterable": Stream(), "read": None}
    loader = Loader(
        sources[kind],
        read=read if kind == "read" else None,
        num_workers=num_workers,
        loader_type=loader_type,
    )
    sampler = Sampler(SIZE, 3, shuffle=kind in ("map", "stateful"))
    used = all_samples(loader, sampler, Random(kind))
    assert sorted(used) == sorted([*range(SIZE)] * 2)
    assert bool(loader.dropped) == (num_workers > 0), "with workers some predictions were wrong"
    loader.close()


def test_nothing_is_dropped_while_nothing_changes() -> None:
    loader = Loader(Squares(), num_workers=2)
    sampler = Sampler(SIZE, 4)
    while sampler.passes_done < 3:
        step = FakeStep(sampler, (1, 2, 3))
        loader.next(step)
        step.end({1, 2, 3})
    assert loader.dropped == 0
    loader.close()


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(rf.UsageError, match="batch_size, shuffle: the sampler"):
        Loader(Squares(), batch_size=4, shuffle=True)
    with pytest.raises(rf.UsageError, match="cannot be shuffled"):
        Loader(Stream()).next(FakeStep(Sampler(SIZE, 3), (1,)))
    with pytest.raises(rf.UsageError, match="the sampler has 59 samples, and the data set has 60"):
        Loader(Squares()).next(FakeStep(Sampler(SIZE - 1, 3), (1,)))


def test_a_data_set_that_ends_early_is_an_error() -> None:
    sampler = Sampler(100, 3, shuffle=False)
    sampler.settle(Queue(100, cursor=60), (1,), 1, None)
    with pytest.raises(rf.UsageError, match="positions 60 to 62 of the data set hold 0 samples"):
        Loader(Stream()).next(FakeStep(sampler, (1,)))
