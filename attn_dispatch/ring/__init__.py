"""One sequence over many devices: shards, the exchange of rows, decisions made by all ranks, predictions.

Imports decisions and what they import. Its rooms: rows <- engine <- ring's own files; plan imports engine and rows.
Public: Sharded, shard, shard_positions, unshard, weights_of.
"""
