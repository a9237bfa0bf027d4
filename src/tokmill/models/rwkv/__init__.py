"""RWKV-7 and its recurrence. Read `rwkv7` first."""
