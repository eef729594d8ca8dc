"""Serialized shards: samples whose decoding and fixed transforms are already done (docs/shards.md).

`record` is one sample's bytes, `manifest` what a set says about itself, `reading` how a sample is fetched, `pack` how a
set is made and `verify` how it is checked. `headwater.data.layouts.shards` lists a set.
"""
