"""One file of records: its columns, strings, and the rows that are copied out of it.

Read `shard` first."""
