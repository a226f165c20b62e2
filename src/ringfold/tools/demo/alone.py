"""The same training in one process, undisturbed: `python -m ringfold.tools.demo.alone LINE NAME SEED STEPS RANKS`."""

import os
import sys

from ringfold.tools.demo.model import Model, Text, train_alone
from ringfold.tools.spawn import Line, LineClosed


def main(arguments: list[str]) -> None:
    address, name, seed, steps, ranks = arguments
    line = Line.dial(address, name)
    text, model = Text(), Model(int(seed))
    try:
        for step in train_alone(model, text, int(seed), int(steps), int(ranks)):
            line.send({"step": step})
        line.send({"held_out": model.loss(text.held_out)})
    except LineClosed:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
