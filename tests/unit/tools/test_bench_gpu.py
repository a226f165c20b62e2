"""`ringfold bench gpu`: its arithmetic, its options, and a short run with tensors in host memory in the GPU's place."""

import json

import pytest
from typer.testing import CliRunner

from ringfold.tools.bench import app, gpu, targets
from ringfold.tools.bench.report import Row

MS = 1_000_000


def plan(**changed: object) -> gpu.GpuPlan:
    usual: dict[str, object] = {
        "peers": 2,
        "sizes": [4096],
        "transports": ["shm"],
        "rounds": 1,
        "min_time_s": 0.1,
        "layers": 0,
        "compute": 1.5,
        "steps": 1,
    }
    return gpu.GpuPlan(**usual | changed)  # type: ignore[arg-type]  # of several types


def test_the_speed_on_cuda_is_that_of_medians() -> None:
    row = gpu.op_figures({"cpu": [8 * MS, 9 * MS, 100 * MS], "cuda": [10 * MS, 1 * MS, 12 * MS]})
    assert row["cuda_speed"] == pytest.approx(0.9)
    assert (row["cpu_median_us"], row["cuda_median_us"], row["cuda_count"]) == (9_000.0, 10_000.0, 3)


@pytest.mark.parametrize(
    ("step_ms", "hidden"), [(30, 1.0), (33, 0.7), (40, 0.0), (45, -0.5)], ids=["all", "most", "none", "worse"]
)
def test_what_is_hidden_is_what_makes_no_step_longer(step_ms: int, hidden: float) -> None:
    row = gpu.overlap_figures({"alone": [30 * MS], "communication": [10 * MS], "step": [step_ms * MS]})
    assert row["hidden"] == pytest.approx(hidden)
    assert row["backward_over_communication"] == pytest.approx(2.0)


def test_the_batch_is_large_enough_when_the_backward_pass_is_long_enough() -> None:
    durations = {"alone": [30 * MS], "communication": [10 * MS], "step": [33 * MS]}
    assert gpu.is_enough(durations, 1.9)
    assert not gpu.is_enough(durations, 2.1)


def test_a_round_has_so_many_ops_as_its_time_allows() -> None:
    assert gpu.iterations_for([1 * MS] * 3, plan()) == 100
    assert gpu.iterations_for([500 * MS] * 3, plan()) == gpu.FEWEST_ITERATIONS
    assert gpu.iterations_for([1] * 3, plan()) == gpu.MAX_ITERATIONS


@pytest.mark.parametrize(
    "arguments",
    [
        ["--transport", "rdma"],
        ["--device", "tpu"],
        ["--sizes", "6"],
        ["--sizes", "big"],
        ["--peers", "1"],
        ["--layers", "-1"],
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["gpu", *arguments]).exit_code == 2


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ended = CliRunner().invoke(app, ["gpu"], env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert "no CUDA device" in ended.output


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert "ringfold[torch]" in str(gpu.missing("cpu"))


def test_the_targets_are_about_large_tensors_and_long_passes() -> None:
    small: Row = {"part": "op", "size_bytes": 1 << 20, "cuda_speed": 0.1}
    large: Row = {"part": "op", "size_bytes": 16 << 20, "cuda_speed": 0.86}
    short: Row = {"part": "overlap", "backward_over_communication": 1.2, "hidden": 0.1}
    long: Row = {"part": "overlap", "backward_over_communication": 1.6, "hidden": 0.69}
    found = {one.id: one.verdict for one in targets.check("gpu", [small, large, short, long], {}, 16)}
    assert found == {"gpu-ops": "hit", "gpu-overlap": "miss"}


def test_a_short_run_gives_both_kinds_of_figures() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ringfold._native")
    arguments = ["--device", "cpu", "--sizes", "64K", "--transport", "shm", "--rounds", "1", "--min-time", "0.02"]
    arguments += ["--layers", "1", "--compute", "0.1", "--steps", "1"]
    ended = CliRunner().invoke(app, ["gpu", *arguments, "--json"])
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    assert [row["part"] for row in printed["figures"]] == ["op", "overlap"]
    op, overlap = printed["figures"]
    assert op["verified"]
    assert op["cuda_speed"] > 0
    assert overlap["size_bytes"] == gpu.LAYER_BYTES
    assert overlap["alone_median_us"] > 0
