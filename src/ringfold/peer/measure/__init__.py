"""A peer's part in the measurement of one link: `link_rate.py`, from the master's request to the report. Pure."""
