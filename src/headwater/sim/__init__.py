"""The simulator: the policies of `core` under a virtual clock. Needs the `sim` extra (SimPy)."""
