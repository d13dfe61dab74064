"""Sequences over many devices: shards, which rows each rank needs of the others, their exchange, and group decisions."""
