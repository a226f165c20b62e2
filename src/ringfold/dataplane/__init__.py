"""The bytes of a collective: what a caller's arrays are to the engine, and the handle on the engine itself.

Read `codes.py` (the numbers that Python and the engine share), `buffers.py` (arrays -> spans, without a copy), then
`engine.py` (the commands and events of the native engine, as types).
"""
