"""Headwater: run the part of training that shrinks data where the data lives."""
