"""Randomness, for nonces and secrets. Pure code never calls this; its shell puts the bytes into events."""

import os


def random_bytes(count: int) -> bytes:
    return os.urandom(count)
