"""Checkpoints as files of torch and safetensors, and back: names, dtypes, tied weights, damage and full disks."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ringfold as rf
from ringfold.cli import build
from ringfold.errors import StateError

torch = pytest.importorskip("torch", reason="needs PyTorch (ringfold[torch])")
safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors (ringfold[torch])")


class Model(torch.nn.Module):  # type: ignore[name-defined,misc]  # torch's types are not there
    """Tied weights, bfloat16, a number without dimensions, channels_last and statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
        self.conv = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm1d(3)


def saved(folder: Path, seed: int = 0) -> tuple[Any, Path]:
    """A model, and a checkpoint of it with an optimizer that has begun."""
    model = Model(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, rf.Checkpoints(folder).save(rf.torch.shared_state(model, optimizer, revision=7))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def read(path: Path) -> dict[str, Any]:
    found = safetensors.load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("ending", ["safetensors", "pt", "pth"])
def test_a_file_has_what_the_state_dict_has(ending: str, tmp_path: Path) -> None:
    model, checkpoint = saved(tmp_path / "run")
    done = rf.torch.export_checkpoint(checkpoint, tmp_path / f"model.{ending}")
    assert (done.checkpoint, done.revision, done.tensors) == (checkpoint, 7, len(model.state_dict()))
    assert same(read(done.path), dict(model.state_dict()))
    other = Model(1)
    other.load_state_dict(read(done.path))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert [each.name for each in tmp_path.iterdir() if "saving" in each.name] == []


def test_a_directory_means_its_newest_checkpoint_and_no_prefix_means_all(tmp_path: Path) -> None:
    model, _ = saved(tmp_path)
    assert same(rf.torch.read_checkpoint(tmp_path), dict(model.state_dict()))
    everything = rf.torch.read_checkpoint(tmp_path, prefix="")
    assert {"model.head.weight", "optimizer.exp_avg.model.embed.weight", "optimizer.groups"} <= everything.keys()
    assert "exp_avg.model.conv.weight" in rf.torch.read_checkpoint(tmp_path, prefix="optimizer.")


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_an_import_into_a_checkpoint_replaces_the_model_and_keeps_the_rest(ending: str, tmp_path: Path) -> None:
    model, checkpoint = saved(tmp_path / "run")
    file = tmp_path / f"model.{ending}"
    rf.torch.export_checkpoint(saved(tmp_path / "other", seed=1)[1], file)
    rf.torch.import_checkpoint(file, tmp_path / "new", like=checkpoint)
    target = Model(2)
    optimizer = torch.optim.AdamW(target.parameters())
    assert rf.Checkpoints(tmp_path / "new").load_newest(rf.torch.shared_state(target, optimizer)) == 7
    assert same(dict(target.state_dict()), read(file))
    assert not same(dict(target.state_dict()), dict(model.state_dict()))
    assert all(optimizer.state[param]["step"].item() == 1 for param in target.parameters())


def test_an_import_alone_is_a_state_of_one_module(tmp_path: Path) -> None:
    model = Model(0)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    rf.torch.import_checkpoint(tmp_path / "model.pt", tmp_path / "new", revision=3)
    target = Model(1)
    state = rf.torch.shared_state(target, statistics="shared")
    assert rf.Checkpoints(tmp_path / "new").load_newest(state) == 3
    assert same(dict(target.state_dict()), dict(model.state_dict()))


def test_a_file_that_does_not_fit_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    _, checkpoint = saved(tmp_path / "run")
    tensors = dict(Model(0).state_dict())
    for change, text in (
        ({"half.bias": torch.zeros(3)}, r"'model\.half\.bias' is torch\.float32 \[3\] in the file"),
        ({"more": torch.zeros(3)}, r"does not hold 'model\.more'"),
    ):
        torch.save({**tensors, **change}, tmp_path / "model.pt")
        with pytest.raises(rf.UsageError, match=text):
            rf.torch.import_checkpoint(tmp_path / "model.pt", tmp_path / "new", like=checkpoint)
    torch.save({name: each for name, each in tensors.items() if name != "half.bias"}, tmp_path / "model.pt")
    with pytest.raises(rf.UsageError, match=r"the file does not have 'half\.bias'"):
        rf.torch.import_checkpoint(tmp_path / "model.pt", tmp_path / "new", like=checkpoint)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_file_that_is_none_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"this is no file of tensors")
    with pytest.raises(StateError, match="cannot be read"):
        rf.torch.import_checkpoint(tmp_path / name, tmp_path / "new")
    with pytest.raises(StateError, match="no checkpoint of Ringfold"):
        rf.torch.read_checkpoint(tmp_path / name)
    with pytest.raises(StateError, match="cannot be read"):
        rf.torch.read_checkpoint(tmp_path / "not-there")


def test_a_file_of_something_else_or_of_another_ending_is_an_error(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "model.pt")
    with pytest.raises(rf.UsageError, match="no file of tensors by name"):
        rf.torch.import_checkpoint(tmp_path / "model.pt", tmp_path / "new")
    _, checkpoint = saved(tmp_path / "run")
    with pytest.raises(rf.UsageError, match="it says the format"):
        rf.torch.export_checkpoint(checkpoint, tmp_path / "model.onnx")
    with pytest.raises(rf.UsageError, match=r"no array whose name begins with 'ema\.'.*model\., optimizer\."):
        rf.torch.export_checkpoint(checkpoint, tmp_path / "model.pt", prefix="ema.")


def test_damage_is_found(tmp_path: Path) -> None:
    model, checkpoint = saved(tmp_path)
    content = bytearray(checkpoint.read_bytes())
    content[content.index(model.embed.weight.detach().numpy().tobytes())] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(StateError, match="does not have its hash"):
        rf.torch.read_checkpoint(checkpoint, prefix="")


@pytest.fixture
def _small_disk() -> Iterator[None]:
    """Files of more than a few hundred bytes cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_disk_that_is_too_small_leaves_the_old_file_and_no_other(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _, checkpoint = saved(tmp_path / "run")
    (tmp_path / name).write_bytes(b"old")
    request.getfixturevalue("_small_disk")
    with pytest.raises(StateError, match=r"cannot be written: .*[Tt]oo large"):
        rf.torch.export_checkpoint(checkpoint, tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"old"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([name, "run"])


def test_the_commands(tmp_path: Path) -> None:
    _, checkpoint = saved(tmp_path / "run")
    app, runner, file = build(["checkpoint"]), CliRunner(), tmp_path / "model.safetensors"
    shown = runner.invoke(app, ["checkpoint", "export", str(tmp_path / "run"), "-o", str(file), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["revision"] == 7
    arguments = ["checkpoint", "import", str(file), "-o", str(tmp_path / "new"), "--like", str(checkpoint)]
    shown = runner.invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert Path(shown.stdout.strip()).read_bytes() == checkpoint.read_bytes()
