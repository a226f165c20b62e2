"""The usual loop of peers that serve metrics."""

import os

from programs import ProgramContext
from training_program import train


def train_with_metrics(me: ProgramContext) -> None:
    """The peer serves metrics at the first free port from `port` on."""
    os.environ["RINGFOLD_METRICS_PORT"] = str(me.options["port"])
    train(me)
