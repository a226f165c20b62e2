"""The named arrays that all peers keep bit-identical, and the number that says how far they have come."""

from collections.abc import Iterator, Mapping

from ringfold.errors import UsageError


class SharedState:
    """Names arrays that must be the same on every peer: `SharedState(model=weights, momentum=velocity)`.

    The arrays are referred to, not copied: change them in place, because a name that is bound to another array is not
    seen here. `revision` counts how often the state has been changed by all; a run that continues from a checkpoint
    begins with the checkpoint's.
    """

    def __init__(self, arrays: Mapping[str, object] | None = None, /, *, revision: int = 0, **named: object) -> None:
        both = dict(arrays or {})
        if twice := sorted(both.keys() & named.keys()):
            raise UsageError(f"the shared state has two arrays named {twice[0]!r}")
        both.update(named)
        if not both:
            raise UsageError("a shared state needs at least one array")
        if strange := [name for name in both if not isinstance(name, str) or not name]:
            raise UsageError(f"an array's name must be a non-empty string, not {strange[0]!r}")
        if revision < 0:
            raise UsageError(f"a revision counts from 0, so {revision} is none")
        self._arrays = {name: both[name] for name in sorted(both)}
        self.revision = revision

    @property
    def arrays(self) -> Mapping[str, object]:
        """The arrays by name, sorted, so that all peers go through them in the same order."""
        return self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"SharedState({', '.join(self._arrays)}; revision {self.revision})"
