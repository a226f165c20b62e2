"""Views of the events of a run: what happened, who is slow, and why.

Nothing here takes part in a run. Live views read the status and the events of the master that leads, as `ringfold
status` does; views of a finished run read the files of its run directory.

Reading order: `records.py` reads the files of a run directory, and `stream.py` merges their events by time.
`summary/` makes the summary of a run, and `report/` a page of it.
"""
