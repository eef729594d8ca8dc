"""The benchmarks: one file a claim. `python -m bench --list` shows them; docs/benchmarks.md tells how to read them."""
