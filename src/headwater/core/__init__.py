"""The pure part: no torch, no I/O, no clock, no threads.

Imports nothing of ours but `headwater.errors`, and of others only numpy. Everything that decides lives here;
everything that acts lives in `node`, `train`, `reduce` and `sim`, which feed these policies their events.
"""
