"""Strangers' bytes into every parser that they can reach. See docs/fuzzing.md; `python -m bench.fuzz` runs it.

Imports nothing: what is imported before atheris looks at imports, atheris can't guide inputs by.
"""
