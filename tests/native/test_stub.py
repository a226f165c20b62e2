"""The stub of the native module says what the module has. `make docs` writes it again."""

from pathlib import Path

from nanobind.stubgen import StubGen

from ringfold import _native


def test_the_stub_is_current() -> None:
    stub = StubGen(_native)
    stub.put(_native)
    written = Path(__file__).parents[2] / "src" / "ringfold" / "_native.pyi"
    assert stub.get() == written.read_text()
