"""What a training will take: memory, time, operations. Read `memory` first."""
