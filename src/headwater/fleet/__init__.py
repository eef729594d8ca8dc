"""Nodes as actors of a Ray cluster: Ray places and restarts them, `core.fleet` says how many there are."""
