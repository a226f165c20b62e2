"""One peer of the demo: `python -m ringfold.tools.demo.trainer ADDRESS NAME MASTER SEED STEPS`.

`train` is the loop that users write. What is added to it here are reports to the director: it must know which peer is
inside an all-reduce when it kills one, and what the survivors report afterwards.
"""

import os
import sys

import ringfold as rf
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import Channel, ChannelClosed
from ringfold.tools.demo.model import CharacterModel, Text


def main(arguments: list[str]) -> None:
    address, name, where, seed, steps = arguments
    channel = Channel.connect(address, name)
    try:
        live(channel, name, where, int(seed), int(steps))
    except ChannelClosed:
        os._exit(0)  # the director is gone, and the result is not needed
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def live(channel: Channel, name: str, where: str, seed: int, steps: int) -> None:
    """Wait for the message to join, train to the end, and report the result."""
    text, model = Text(), CharacterModel(seed)
    channel.send({"what": "ready"})
    channel.receive()
    with rf.join(where, name=name) as run:
        train(run, channel, text, model, seed, steps)
    channel.send(
        {
            "what": "finished",
            "digest": model.digest(),
            "held_out": model.loss(text.held_out),
            "sample": model.write("The import statement", 160),
        }
    )


def train(run: rf.Communicator, channel: Channel, text: Text, model: CharacterModel, seed: int, steps: int) -> None:
    """The training loop. Peers die, freeze and come, and nothing here has to deal with it."""
    channel.send({"what": "joined"})
    state = rf.SharedState(weights=model.weights, momentum=model.momentum)
    me = run.peer_id
    for step in run.steps(state, until=steps, min_world=2):
        loss, grads = model.gradients(text.batch(seed, step.number, run.rank))
        begun_in = run.epoch
        channel.send({"what": "entering", "step": step.number})
        step.log(loss=loss)
        info = step.all_reduce(grads, op="avg")
        if run.peer_id != me:
            # The others went on without us, and the loop has joined again: with their weights, at their step.
            channel.send({"what": "evicted", "reason": f"it was peer {me}, and is peer {run.peer_id} now"})
            channel.send({"what": "joined"})
            me = run.peer_id
        channel.send(
            {
                "what": "left",
                "step": step.number,
                "at_ns": monotonic_ns(),
                "loss": loss,
                "epoch": info.epoch,
                "world": len(info.contributors),
                "retried": info.epoch != begun_in,
            }
        )
        model.update(step.number / steps)


if __name__ == "__main__":
    main(sys.argv[1:])
