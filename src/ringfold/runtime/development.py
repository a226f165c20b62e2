"""What only a development build has: the native test module with planted bugs, hammers and the lab's relay."""

from importlib.util import find_spec

from ringfold.errors import UsageError


def require_testing_module() -> None:
    """Raise UsageError where `ringfold._native_testing` is missing. Wheels do not contain it."""
    if find_spec("ringfold._native_testing") is None:
        raise UsageError("this needs a development build, which `make` sets up in a clone: wheels have no test module")
