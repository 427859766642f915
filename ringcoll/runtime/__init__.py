"""Running a schedule inside `shard_map`: primitives, value types, one hop, the engine, barriers."""
