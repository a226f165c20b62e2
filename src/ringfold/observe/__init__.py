"""Views of the events of a run: what happened, who is slow, and why.

Nothing here takes part in a run. Live views read the status and the events of the master that leads, as `ringfold
status` does; views of a finished run read the files of its run directory.

Reading order: `records.py` reads the files of a run directory, and `stream.py` merges their events by time.

Numbers for other programs: `metrics.py` is the table of all metrics, and the text for Prometheus; `master_metrics.py`,
`peer_metrics.py`, `peer_endpoint.py` and `agent_metrics.py` take the values. `otel.py` makes OpenTelemetry spans of
events.

On a terminal: `terminal.py` draws the page of `view.py` as lines of text, and `top.py` has the screen and the keys.
"""
