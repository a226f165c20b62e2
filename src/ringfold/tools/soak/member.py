"""A member that goes wrong: `python -m ringfold.tools.soak.member ADDRESS PROCESS MASTER RUN NAME CHECKPOINTS LOG`.

It is the loop of the README, and it fails on request of its parent, as programs do. It writes
each committed step to a log, with its contributors. From that `members.py` computes the weights.

The gradients are whole numbers, a function of peer and step. So a sum is exact in any order of the ring, and an average
is one correctly rounded division: to replay a step, only its contributors are needed.
"""

import os
import sys
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

import ringfold as rf
from ringfold.runtime import threads
from ringfold.tools.cluster import Channel, ChannelClosed

COUNT = 100_000
CHECK_EVERY = 10
SAVE_EVERY = 50
PAUSE_S = 0.02
"""What a step takes besides the all-reduce."""
MISMATCH_STATUS = 3
Floats = npt.NDArray[np.float32]


class MemberStep(msgspec.Struct, frozen=True):
    """A step that this peer has committed, and its contributors."""

    step: int
    contributors: tuple[int, ...]


def gradient(peer: int, step: int) -> Floats:
    return np.random.default_rng((peer, step)).integers(-1000, 1000, COUNT).astype(np.float32)


def learn(weights: Floats, average: Floats) -> None:
    """So that the order of the steps has a bearing on every bit."""
    weights *= np.float32(0.9)
    weights += average


def main(arguments: list[str]) -> None:
    address, process, where, run, name, checkpoints, log = arguments
    channel = Channel.connect(address, process)
    channel.send({"what": "ready"})
    try:
        with open(log, "ab", buffering=0) as file, rf.join(where, run=run, name=name, timeout_s=120) as joined:
            train(joined, channel, checkpoints, file.fileno())
    except ChannelClosed:
        os._exit(0)
    except rf.CallMismatch as error:
        channel.send({"what": "mismatch", "text": str(error)})
        sys.exit(MISMATCH_STATUS)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def train(run: rf.Communicator, channel: Channel, checkpoints: str, log: int) -> None:
    weights = np.zeros(COUNT, np.float32)
    state = rf.SharedState(weights=weights)
    for step in run.steps(state, min_world=2, check_every=CHECK_EVERY, checkpoint=checkpoints, every=SAVE_EVERY):
        order = channel.receive(0)
        request = "" if order is None else order["what"]
        if request == "skip":
            continue
        if request == "hang":
            threads.pause(float(order["seconds"] if order is not None else 0))
        arrays = [np.append(gradient(run.peer_id, step.number), np.float32(request == "stop"))]
        if request == "extra":
            arrays.append(np.zeros(1, np.float32))
        before = run.peer_id
        info = step.all_reduce(arrays, op="avg")
        learn(weights, arrays[0][:-1])
        if request == "diverge":
            weights[7] += 1
        os.write(log, msgspec.json.encode(MemberStep(step.number, info.contributors)) + b"\n")
        channel.send(
            {
                "what": "step",
                "step": step.number,
                "peer": run.peer_id,
                "came_back": run.peer_id != before,
                "contributors": len(info.contributors),
                "diverged": [each.name for each in step.sync.diverged],
            }
        )
        if arrays[0][-1] > 0:
            state.push_revision()
            channel.send({"what": "finished", "step": state.revision, "digest": digest(weights)})
            return
        threads.pause(PAUSE_S)


def digest(weights: Floats) -> str:
    return blake2b(weights.tobytes(), digest_size=16).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
