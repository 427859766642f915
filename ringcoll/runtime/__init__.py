"""Run a schedule inside `shard_map`: the engine, one hop that sends, collectives as primitives."""
