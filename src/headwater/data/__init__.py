"""Data where it lies: stores, listings, decoding and transforms.

Runs on a storage node as well as on a trainer, so nothing here imports torch. May import `headwater.core`,
`headwater.errors` and of others numpy, pyarrow, obstore and Pillow.
"""
