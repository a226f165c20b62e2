"""Batches for the shares of a sampler, loaded ahead by the workers of a DataLoader.

A DataLoader asks its sampler for the next request long before the batch is used. Which samples a step will take is
known only when it begins, so requests are made for *predicted* shares: those of the next steps if no member comes or
goes, and all contribute. Each batch that comes out is compared, by its share, with what the step has really taken. One
that differs is dropped, and its samples are loaded again by whichever peer gets them. So a wrong prediction costs time,
and nothing else.

The DataLoader has one iterator for as long as the loader lives. What it does for a request is in `_Batches` (data sets
with indices) and `_Ranges` (those that can only be read in order), which are copied into the workers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset, default_collate

from ringfold.data.sampler import Share
from ringfold.errors import UsageError

Request = tuple[list[int], tuple[tuple[int, int], ...]]
"""The samples of a share, and their ranges of positions. Without any, nothing is loaded."""
_NOTHING: Request = ([], ())
S = TypeVar("S", bound="StepWithShares")
Batch = Any
"""What `collate_fn` makes of samples."""
_REFUSED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")


class StepWithShares(Protocol):
    """As much of a step as the loader needs."""

    def shard(self) -> Share: ...
    def predicted_shards(self, steps: int) -> list[Share]: ...


class Indexed(Protocol):
    """A map-style data set. It may have `__getitems__(indices)`, too."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


class Loader:
    """Loads this peer's samples of each step, ahead of time.

        sampler = rf.Sampler(len(dataset), batch_size=32)
        loader = rf.torch.Loader(dataset, num_workers=2)
        for step, batch in loader.batches(run.steps(rf.SharedState(model=weights, data=sampler), passes=3)):
            ...

    A batch is None if this peer has no samples in the step: then its ops contribute nothing.

    `dataset` has `__getitem__`, or it is an `IterableDataset`: then the sampler must not shuffle, and each worker reads
    from the beginning and skips what belongs to others. With `read(start, stop)`, which returns the samples of these
    positions, nothing is skipped, and `dataset` may be None. Other arguments are those of `loader_type`, which is a
    `DataLoader` or torchdata's `StatefulDataLoader`.
    """

    def __init__(
        self,
        dataset: Indexed | Iterable[Any] | None,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Batch] = default_collate,
        read: Callable[[int, int], Iterable[Any]] | None = None,
        loader_type: Callable[..., Iterable[Any]] = DataLoader,
        **options: object,
    ) -> None:
        if refused := sorted(options.keys() & set(_REFUSED)):
            raise UsageError(f"{', '.join(refused)}: the sampler in the shared state decides that")
        source: _Batches | _Ranges
        if read is not None or isinstance(dataset, IterableDataset):
            source, self._samples = _Ranges(cast(Iterable[Any], dataset), read, collate_fn), None
        else:
            source, self._samples = _Batches(cast(Indexed, dataset), collate_fn), len(cast(Indexed, dataset))
        self._requests = _Requests()
        self._depth = num_workers * (prefetch_factor or 2)
        options |= {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        self._loader = loader_type(source, batch_size=None, sampler=self._requests, collate_fn=_as_it_is, **options)
        self._batches: Iterator[Batch] | None = None
        self.dropped = 0
        """How many batches were loaded for shares that turned out otherwise."""

    def batches(self, steps: Iterable[S]) -> Iterator[tuple[S, Batch | None]]:
        """Each step with its batch."""
        for step in steps:
            yield step, self.next(step)

    def next(self, step: StepWithShares) -> Batch | None:
        """The batch of a step; None if this peer has no samples in it."""
        share = step.shard()
        self._check(share)
        if not share:
            return None
        self._requests.expect(share, step.predicted_shards(self._depth))
        if self._batches is None:
            self._batches = iter(self._loader)
        while True:
            try:
                batch = next(self._batches)
            except BaseException:
                self.close()  # how many requests it has lost is not known
                raise
            loaded = self._requests.returned()
            if loaded == share:
                return batch
            self.dropped += loaded is not None

    def close(self) -> None:
        """End the workers. The next call of `next` starts others."""
        self._batches = None
        self._requests.forget()

    def _check(self, share: Share) -> None:
        if self._samples is None and share.shuffle:
            raise UsageError("samples that are read in order cannot be shuffled: Sampler(..., shuffle=False)")
        if self._samples not in (None, share.size):
            raise UsageError(f"the sampler has {share.size} samples, and the data set has {self._samples}")


class _Requests:
    """The sampler of the DataLoader: what it is to load next."""

    def __init__(self) -> None:
        self._next: deque[Share] = deque()
        self._loading: deque[Share | None] = deque()
        """What the DataLoader was asked for and has not returned, in order; None where it had nothing to do."""

    def expect(self, share: Share, predicted: Sequence[Share]) -> None:
        """The next batch is to be that of `share`, and then probably those of `predicted`."""
        coming = list(self._loading)
        if share in coming:
            coming = coming[coming.index(share) :]
        self._next = deque(each for each in (share, *predicted) if each and each not in coming)

    def returned(self) -> Share | None:
        """The DataLoader has returned a batch: the share that it was loaded for."""
        return self._loading.popleft()

    def forget(self) -> None:
        self._next.clear()
        self._loading.clear()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        share = self._next.popleft() if self._next else None
        self._loading.append(share)
        return _NOTHING if share is None else (share.indices.tolist(), share.pieces)


class _Batches:
    """A data set with indices."""

    def __init__(self, dataset: Indexed, collate: Callable[[list[Any]], object]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, request: Request) -> object:
        indices, _ = request
        if not indices:
            return None
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])


class _Ranges:
    """A data set that is read in order. Its iterator stays where it is; for what lies before that, it begins again."""

    def __init__(
        self,
        dataset: Iterable[Any],
        read: Callable[[int, int], Iterable[Any]] | None,
        collate: Callable[[list[Any]], object],
    ) -> None:
        self._dataset, self._read, self._collate = dataset, read or self._skip_to, collate
        self._iterator: Iterator[Any] | None = None
        self._position = 0

    def __getitem__(self, request: Request) -> object:
        _, pieces = request
        samples: list[Any] = []
        for first, last in pieces:
            found = list(self._read(first, last))
            if len(found) != last - first:
                raise UsageError(f"positions {first} to {last - 1} of the data set hold {len(found)} samples")
            samples += found
        return self._collate(samples) if samples else None

    def _skip_to(self, first: int, last: int) -> list[Any]:
        if self._iterator is None or first < self._position:
            self._iterator, self._position = iter(self._dataset), 0
        found = list(islice(self._iterator, first - self._position, last - self._position))
        self._position = last
        return found


def _as_it_is(batch: object) -> object:
    return batch
