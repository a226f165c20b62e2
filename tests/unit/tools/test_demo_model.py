"""The model of the demo learns, its gradients are right, and averaging over ranks means what the demo says it means."""

import numpy as np
import pytest

from ringfold.tools.demo.model import (
    BATCH,
    CHARACTERS,
    CONTEXT,
    HELD_OUT,
    SIZE,
    CharacterModel,
    Text,
    decode,
    encode,
    layers,
    together,
    train_alone,
)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text()


def test_text_survives_encoding_and_strange_characters_become_spaces() -> None:
    printable = "".join(map(chr, range(32, 127)))
    assert decode(encode(f"a line\n{printable}")) == f"a line\n{printable}"
    assert encode(printable + "\n").max() == CHARACTERS - 1
    assert decode(encode("tab\tdash—end")) == "tab dash end"


def test_a_batch_depends_on_seed_step_and_rank_and_on_nothing_else(text: Text) -> None:
    first = text.batch(1, 2, 3)
    assert first.before.shape == (BATCH, CONTEXT)
    assert first.after.shape == (BATCH,)
    assert np.array_equal(first.before, text.batch(1, 2, 3).before)
    others = [text.batch(9, 2, 3), text.batch(1, 9, 3), text.batch(1, 2, 9)]
    assert not any(np.array_equal(first.before, other.before) for other in others)


def test_the_following_character_is_the_one_that_follows(text: Text) -> None:
    """Neighbouring held-out examples overlap: what follows one row is the last character of the next one's context."""
    held = text.held_out
    assert len(held.after) == HELD_OUT - CONTEXT
    assert np.array_equal(held.after[:-1], held.before[1:, -1])


def test_gradients_agree_with_differences_of_the_loss(text: Text) -> None:
    """In each layer, along the gradient's own direction, where a difference in f32 is far above its rounding."""
    model, batch = CharacterModel(1), text.batch(1, 0, 0)
    _, grads = model.gradients(batch)
    weights = layers(model.weights)
    for name, gradient in grads.items():
        length = float(np.linalg.norm(gradient))
        step = 0.02 * gradient / length
        weights[name] += step
        above = model.loss(batch)
        weights[name] -= 2 * step
        below = model.loss(batch)
        weights[name] += step
        assert (above - below) / 0.04 == pytest.approx(length, rel=0.02), name


def test_the_average_of_the_ranks_gradients_is_the_gradient_of_all_their_examples(text: Text) -> None:
    model = CharacterModel(1)
    batches = [text.batch(1, 0, rank) for rank in range(4)]
    average = np.zeros(SIZE, np.float32)
    for batch in batches:
        model.gradients(batch)
        average += model.gradient / 4
    model.gradients(together(batches))
    assert np.allclose(average, model.gradient, atol=1e-6)
    assert np.abs(model.gradient).max() > 1e-3


def test_training_lowers_the_loss_on_text_that_was_held_out(text: Text) -> None:
    model = CharacterModel(1)
    before = model.loss(text.held_out)
    assert before == pytest.approx(np.log(CHARACTERS), rel=0.15)
    assert list(train_alone(model, text, 1, 60, 2)) == list(range(60))
    assert model.loss(text.held_out) < 0.65 * before


def test_one_different_bit_of_weights_or_momentum_changes_the_digest() -> None:
    model = CharacterModel(1)
    digests = {model.digest()}
    assert CharacterModel(1).digest() in digests
    for vector in (model.weights, model.momentum):
        vector.view(np.uint32)[SIZE // 2] ^= 1
        digests.add(model.digest())
    assert len(digests) == 3


def test_layers_are_views_of_the_vector() -> None:
    vector = np.zeros(SIZE, np.float32)
    for layer in layers(vector).values():
        layer += 1
    assert (vector == 1).all()


def test_a_model_writes_what_is_requested() -> None:
    written = CharacterModel(1).write("The import statement", 40)
    assert written.startswith("The import statement")
    assert len(written) == len("The import statement") + 40
