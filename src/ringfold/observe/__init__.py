"""Views of the events of a run: what happened, who is slow, and why.

Nothing here takes part in a run. Live views read the status and the events of the master that leads, as `ringfold
status` does; views of a finished run read the files of its run directory.

Reading order: `records.py` reads the files of a run directory, and `stream.py` merges their events by time. Then:

* `dashboard/`, the page of `ringfold dashboard` and `replay`. `view.py` makes what it shows, for `ringfold top`, too:
  `series.py` thins series by age, `rates.py` makes rates of what peers have counted, `incidents.py` says in words what
  happened.
* `trace.py`, what `ringfold trace` writes. `processes.py` has what it takes of each record, `align.py` maps all times
  to one timeline, `orders.py` counts impossible orders, `torch_traces.py` adds traces of the PyTorch profiler. `why.py`
  names who made steps slow.
* `summary/`, a finished run in typed facts, and `report/`, a page of them.
* `metrics.py`, the table of all metrics, and the text for Prometheus; `master_metrics.py`, `peer_metrics.py`,
  `peer_endpoint.py` and `agent_metrics.py` take the values.
* `otel.py`, spans of OpenTelemetry, made of events.
* `top.py`, the screen and the keys of `ringfold top`, and `terminal.py`, its lines of text.
"""
