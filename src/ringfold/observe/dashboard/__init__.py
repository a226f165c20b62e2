"""The dashboard: a small web server beside the master, and the page that it serves. It reads, and changes nothing.

It is a process of its own: its load and its end touch nobody. `access.py` decides who may look. `channels.py` sends
each state once encoded to all pages, and only the newest to slow ones. `server.py` is the web server. `live.py` follows
the runs of a master, `finished.py` reads run directories for `ringfold replay`. `child.py` starts a dashboard beside a
master, and ends it. The folder `page` has the page: ES modules, SVG and canvas, without a build and without foreign
requests.
"""
