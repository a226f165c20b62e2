"""The stubs of the native modules say what the modules have. `make docs` writes them again."""

from importlib import import_module
from pathlib import Path

import pytest
from nanobind.stubgen import StubGen


@pytest.mark.parametrize("name", ["_native", "_native_testing"])
def test_the_stub_is_current(name: str) -> None:
    module = import_module(f"ringfold.{name}")
    stub = StubGen(module)
    stub.put(module)
    written = Path(__file__).parents[2] / "src" / "ringfold" / f"{name}.pyi"
    assert stub.get() == written.read_text()


def test_the_release_module_has_nothing_that_only_tests_need() -> None:
    """Planted bugs, hammers and the relay are in the test module, which wheels do not contain."""
    release = import_module("ringfold._native")
    names = {name.lower() for name in dir(release)} | {name.lower() for name in dir(release.HintWriter)}
    assert not [name for name in names if "planted" in name or "hammer" in name or "relay" in name]
    with pytest.raises(TypeError):
        release.Core("no_restore")
