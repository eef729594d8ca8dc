"""The five published systems in the simulator: their figures beside ours. `python -m bench.scenarios [NAME]`."""
