"""A peer's part in the measurement of one link: `measuring.py`, from the master's request to the report. Pure."""
