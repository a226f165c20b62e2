"""The experiment with extrapolated congestion still runs: its decision record names it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringfold.agent.policy import FlowInput, PathInput

ROOT = Path(__file__).resolve().parents[3]
MS = 1_000_000


@pytest.fixture(scope="module")
def predicting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predicting", ROOT / "benchmarks" / "prediction" / "policy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["predicting"] = module
    spec.loader.exec_module(module)
    return module


def test_a_steady_rise_is_extrapolated_and_its_error_falls(predicting: ModuleType) -> None:
    trend = predicting.Trend()
    for now in range(400):
        trend.update(now * MS, now / 4, trend_ms=20.0, age_ms=30.0)
    value, confidence = trend.predicted(30.0)
    assert confidence > 0.5
    assert trend.error < trend.unpredicted_error
    assert abs(value - (399 + 30) / 4) < abs(399 / 4 - (399 + 30) / 4)


def test_noise_without_a_trend_is_not_extrapolated(predicting: ModuleType) -> None:
    trend = predicting.Trend()
    for now in range(400):
        trend.update(now * MS, 100 + (now * 7919 % 17 - 8), trend_ms=20.0, age_ms=30.0)
    value, confidence = trend.predicted(30.0)
    assert confidence < 0.2
    assert abs(value - 100) < 10


def test_a_prediction_never_holds_a_path(predicting: ModuleType) -> None:
    policy = predicting.PredictingPolicy()
    for now in range(200):
        paths = (PathInput(0.0, 30 * MS), PathInput(min(230.0, now * 2.0), 30 * MS))
        [decision] = policy.step(now * MS, [FlowInput(0, paths)])
        assert decision.backpressure == (False, False)
    policy.forget(0)
    assert not policy._trends
