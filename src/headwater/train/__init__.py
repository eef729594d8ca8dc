"""The trainer's side. Imports `core`, `data` and `model`, never `node` or `sim`."""
