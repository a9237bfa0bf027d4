"""Where shards are made: in this process, in spawned ones, on a Ray cluster.

Read `executors` first.
"""
