"""x86 programs: functions, control flow and instruction tokens."""
