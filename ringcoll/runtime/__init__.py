"""Run a schedule inside `shard_map`: primitives, value types, hops, the engine, barriers."""
