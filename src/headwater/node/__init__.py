"""The storage-side server. Imports `core` and `data`, never torch, `train` or `sim`."""
