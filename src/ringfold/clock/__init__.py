"""The global clock that probing gives, with a bound on its error: all of it is in `global_clock.py`."""
