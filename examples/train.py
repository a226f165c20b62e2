"""A training loop that survives: `python examples/train.py [MASTER]`.

Start a master (`ringfold master`), then this program as often as you like, on any machine that reaches the master.
Kill some, start others: those that live go on, and each newcomer begins where they are.

The model is as small as can be, a straight line through noisy points. What matters is the loop in `main`.
"""

import sys
import time

import numpy as np
import numpy.typing as npt

import ringfold as rf

FEATURES, BATCH, STEPS = 64, 256, 3_000
Floats = npt.NDArray[np.float32]


def main(master: str = "127.0.0.1:48148") -> None:
    weights, velocity = np.zeros(FEATURES, np.float32), np.zeros(FEATURES, np.float32)

    with rf.join(master) as run:
        state = rf.SharedState(model=weights, momentum=velocity)
        for step in run.steps(state, until=STEPS, min_world=2):
            grads, loss = compute(weights, *next_batch(step.number, run.rank))
            step.all_reduce(grads, op="avg")
            update(weights, velocity, grads)
            if step.number % 250 == 0:
                print(f"step {step.number}: loss {loss:.4f}, {run.group_size} peers, epoch {run.epoch}")
            time.sleep(0.01)  # stands for the work of a real model

    print(f"trained: {np.abs(weights - TRUTH).max():.4f} away from the truth")


TRUTH = np.random.default_rng(0).normal(size=FEATURES).astype(np.float32)


def next_batch(step: int, rank: int) -> tuple[Floats, Floats]:
    """Points that no other rank and no other step has."""
    generator = np.random.default_rng((1, step, rank))
    points = generator.normal(size=(BATCH, FEATURES)).astype(np.float32)
    noise = generator.normal(scale=0.1, size=BATCH).astype(np.float32)
    return points, points @ TRUTH + noise


def compute(weights: Floats, points: Floats, values: Floats) -> tuple[Floats, float]:
    """The gradient of the mean squared error, and the error."""
    error = points @ weights - values
    grads = points.T @ error * np.float32(1 / BATCH)
    return grads, float((error**2).mean())


def update(weights: Floats, velocity: Floats, grads: Floats) -> None:
    """SGD with momentum, in place: the shared state refers to these very arrays."""
    velocity *= 0.9
    velocity -= 0.02 * grads
    weights += velocity


if __name__ == "__main__":
    main(*sys.argv[1:])
