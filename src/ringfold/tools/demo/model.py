"""The model of the demo: given eight characters of text, what is the ninth? NumPy only.

    8 characters -> embedding (16 numbers each) -> 256 tanh units -> softmax over 96 characters

It learns from the text of Python's own manual, which every Python brings along (`help("LAMBDA")` prints a page of it).
All weights live in one vector, and the layers are views of it: an update is one line, and so is the hash that shows
that two peers hold the same bits.

Run as `python -m ringfold.tools.demo.model ADDRESS NAME SEED STEPS RANKS`, it trains undisturbed in one process.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringfold.tools.cluster import Channel, ChannelClosed

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CONTEXT = 8
CHARACTERS = 96
EMBEDDING = 16
HIDDEN = 256
BATCH = 256
RATE = 0.8
MOMENTUM = 0.9
HELD_OUT = 16_384

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding": (CHARACTERS, EMBEDDING),
    "hidden": (CONTEXT * EMBEDDING, HIDDEN),
    "hidden_bias": (HIDDEN,),
    "output": (HIDDEN, CHARACTERS),
    "output_bias": (CHARACTERS,),
}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples: rows of `CONTEXT` characters, and the character that follows each row."""

    before: Codes
    after: Codes


class Text:
    """The manual as character codes. Its end is held out: no batch is drawn from it, the final loss is taken on it."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        codes = encode("".join(topics[name] for name in sorted(topics)))
        self._training = codes[:-HELD_OUT]
        self.held_out = _examples(codes[-HELD_OUT:], np.arange(HELD_OUT - CONTEXT))

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        """The examples that one rank learns from in one step: different ones in each step and for each rank."""
        generator = np.random.default_rng((seed, step, rank))
        return _examples(self._training, generator.integers(len(self._training) - CONTEXT, size=BATCH))


class CharacterModel:
    """Weights, the momentum of their training, and the gradients of the last batch: three vectors of equal length."""

    def __init__(self, seed: int) -> None:
        self.weights = np.zeros(SIZE, np.float32)
        self.momentum = np.zeros(SIZE, np.float32)
        self.gradient = np.zeros(SIZE, np.float32)
        self._layers = layers(self.weights)
        generator = np.random.default_rng(seed)
        for layer in self._layers.values():
            if layer.ndim == 2:
                layer[:] = generator.normal(0, len(layer) ** -0.5, layer.shape)

    def loss(self, batch: Batch) -> float:
        """The mean surprise, in nats per character."""
        _, _, likelihood = self._forward(batch)
        return _surprise(likelihood, batch)

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Floats]]:
        """The loss on a batch and its gradients by layer. The arrays are the same ones at each call."""
        embedded, hidden, likelihood = self._forward(batch)
        loss = _surprise(likelihood, batch)
        grads = layers(self.gradient)

        output = likelihood
        output[np.arange(len(batch.after)), batch.after] -= 1
        output /= len(batch.after)
        np.matmul(hidden.T, output, out=grads["output"])
        np.sum(output, axis=0, out=grads["output_bias"])

        inner = (output @ self._layers["output"].T) * (1 - hidden**2)
        np.matmul(embedded.T, inner, out=grads["hidden"])
        np.sum(inner, axis=0, out=grads["hidden_bias"])

        outer = (inner @ self._layers["hidden"].T).reshape(-1, EMBEDDING)
        grads["embedding"].fill(0)
        np.add.at(grads["embedding"], batch.before.ravel(), outer)
        return loss, grads

    def update(self, progress: float) -> None:
        """One step of SGD with momentum along `gradient`. The rate falls to nothing as `progress` goes from 0 to 1."""
        self.momentum *= MOMENTUM
        self.momentum -= RATE * (1 - progress) * self.gradient
        self.weights += self.momentum

    def write(self, beginning: str, length: int) -> str:
        """Continue a text by drawing one character after the other, with a slightly sharpened distribution."""
        codes, generator = list(encode(beginning)), np.random.default_rng(0)
        for _ in range(length):
            before = np.array([codes[-CONTEXT:]], np.uint8)
            likelihood = self._forward(Batch(before, before[:, 0]))[2][0].astype(np.float64) ** 1.5
            codes.append(np.uint8(generator.choice(CHARACTERS, p=likelihood / likelihood.sum())))
        return decode(np.array(codes))

    def digest(self) -> str:
        """The SHA-256 of weights and momentum: equal for two models only if every bit is."""
        return hashlib.sha256(self.weights.tobytes() + self.momentum.tobytes()).hexdigest()

    def _forward(self, batch: Batch) -> tuple[Floats, Floats, Floats]:
        embedded = self._layers["embedding"][batch.before].reshape(len(batch.before), -1)
        hidden = np.tanh(embedded @ self._layers["hidden"] + self._layers["hidden_bias"])
        scores = hidden @ self._layers["output"] + self._layers["output_bias"]
        likelihood = np.exp(scores - scores.max(axis=1, keepdims=True))
        likelihood /= likelihood.sum(axis=1, keepdims=True)
        return embedded, hidden, likelihood


def train_alone(model: CharacterModel, text: Text, seed: int, steps: int, ranks: int) -> Iterator[int]:
    """Train as `ranks` undisturbed peers would, in one process: with the same batches, averaged. Yields every step."""
    for step in range(steps):
        batches = [text.batch(seed, step, rank) for rank in range(ranks)]
        model.gradients(together(batches))
        model.update(step / steps)
        yield step


def together(batches: Sequence[Batch]) -> Batch:
    """One batch of all examples. Batches are equally long, so its gradient is the average of theirs."""
    before = np.concatenate([batch.before for batch in batches])
    return Batch(before, np.concatenate([batch.after for batch in batches]))


def layers(vector: Floats) -> dict[str, Floats]:
    """The layers by name, as views of one vector that holds them one after the other."""
    parts, start = {}, 0
    for name, shape in SHAPES.items():
        end = start + int(np.prod(shape))
        parts[name] = vector[start:end].reshape(shape)
        start = end
    return parts


def encode(text: str) -> Codes:
    """Channel break -> 0, space to tilde -> 1 to 95; the few other characters of the manual count as spaces."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
    codes = np.where((points >= 32) & (points < 127), points - 31, 1)
    return np.where(points == ord("\n"), 0, codes).astype(np.uint8)


def decode(codes: Codes) -> str:
    return "".join("\n" if code == 0 else chr(int(code) + 31) for code in codes)


def _examples(codes: Codes, starts: npt.NDArray[np.int64]) -> Batch:
    windows = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)[starts]
    return Batch(windows[:, :CONTEXT], windows[:, CONTEXT])


def _surprise(likelihood: Floats, batch: Batch) -> float:
    right = likelihood[np.arange(len(batch.after)), batch.after]
    return float(-np.log(np.maximum(right, 1e-30)).mean())


def main(arguments: list[str]) -> None:
    """The undisturbed training, for comparison."""
    address, name, seed, steps, ranks = arguments
    channel = Channel.connect(address, name)
    text, model = Text(), CharacterModel(int(seed))
    try:
        for step in train_alone(model, text, int(seed), int(steps), int(ranks)):
            channel.send({"step": step})
        channel.send({"held_out": model.loss(text.held_out)})
    except ChannelClosed:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
