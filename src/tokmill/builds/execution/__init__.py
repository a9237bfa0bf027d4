"""Where shards are made: in this process, in spawned ones; plug-ins add others.

Read `executors` first."""
