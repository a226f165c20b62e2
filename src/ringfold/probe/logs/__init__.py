"""Logs of probing: written while nodes probe, read again afterwards.

Read `lines.py` (the typed lines of a log) with `pack.py` (exchanges as few bytes), `files.py` (the files), then the
readers: `replay.py` calculates again, without a master if need be, `report.py` summarises, and `compare.py` puts
several runs side by side.
"""
