"""The stubs of the native modules are current. `make docs` writes them again."""

from importlib import import_module
from pathlib import Path

import pytest
from nanobind.stubgen import StubGen, load_pattern_file

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["_native", "_native_testing"])
def test_the_stub_is_current(name: str) -> None:
    module = import_module(f"ringfold.{name}")
    stub = StubGen(module, patterns=load_pattern_file(str(ROOT / "native/bindings/stub.pat")))
    stub.put(module)
    written = ROOT / "src" / "ringfold" / f"{name}.pyi"
    assert stub.get() == written.read_text()


def test_the_release_module_has_nothing_that_only_tests_need() -> None:
    """Planted bugs, hammers and the relay are in the test module, which wheels do not contain."""
    release = import_module("ringfold._native")
    names = {name.lower() for name in dir(release)} | {name.lower() for name in dir(release.HintWriter)}
    assert not [name for name in names if "planted" in name or "hammer" in name or "relay" in name]
    with pytest.raises(TypeError):
        release.Core("no_restore")
