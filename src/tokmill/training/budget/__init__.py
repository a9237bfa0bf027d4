"""What a training will take: memory, time, operations. Read `estimate` first."""
