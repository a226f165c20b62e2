"""The global clock that probing gives, with its bound. `model.py` is the mathematics, `clock.py` what users hold."""
