"""One peer of the demo: `python -m ringfold.tools.demo.trainer LINE NAME MASTER SEED STEPS`.

`train` is the loop that users write. What is added to it here are reports to the director, on a line of JSON messages:
the director must know who is inside an all-reduce when it strikes, and what the survivors say afterwards.
"""

import os
import sys

import ringfold as rf
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.demo.model import Model, Text
from ringfold.tools.spawn import Line, LineClosed


def main(arguments: list[str]) -> None:
    address, name, where, seed, steps = arguments
    line = Line.dial(address, name)
    try:
        live(line, name, where, int(seed), int(steps))
    except LineClosed:
        os._exit(0)  # the director is gone, and nobody wants the result
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def live(line: Line, name: str, where: str, seed: int, steps: int) -> None:
    """Wait for the word to join, train to the end whatever happens, and report what has been learnt."""
    text, model = Text(), Model(seed)
    line.send({"what": "ready"})
    line.receive()
    with rf.join(where, name=name) as run:
        train(run, line, text, model, seed, steps)
    line.send(
        {
            "what": "finished",
            "digest": model.digest(),
            "held_out": model.loss(text.held_out),
            "sample": model.write("The import statement", 160),
        }
    )


def train(run: rf.Communicator, line: Line, text: Text, model: Model, seed: int, steps: int) -> None:
    """The training loop. Peers die, freeze and come, and nothing here has to deal with it."""
    line.send({"what": "joined"})
    state = rf.SharedState(weights=model.weights, momentum=model.momentum)
    me = run.peer_id
    for step in run.steps(state, until=steps, min_world=2):
        loss, grads = model.gradients(text.batch(seed, step.number, run.rank))
        begun_in = run.epoch
        line.send({"what": "entering", "step": step.number})
        info = step.all_reduce(grads, op="avg")
        if run.peer_id != me:
            # The others went on without us, and the loop has joined again: with their weights, at their step.
            line.send({"what": "evicted", "reason": f"it was peer {me}, and is peer {run.peer_id} now"})
            line.send({"what": "joined"})
            me = run.peer_id
        line.send(
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
