"""Sequences over many devices: shards, the rows that ranks need of one another, their exchange, group decisions."""
