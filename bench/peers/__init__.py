"""What a user might pick instead of Headwater, each at its best, with the same training step behind it.

One file a peer: `prepare` writes its format, `batches` reads it. `worker` is the process that trains with one of them.
"""
