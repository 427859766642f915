"""Run a schedule inside `shard_map`: its rounds, one hop that sends, collectives as primitives."""
