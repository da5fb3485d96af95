"""The runtime: one scan per phase inside `shard_map`, driven by a program's tables. It knows no schedule by name."""
