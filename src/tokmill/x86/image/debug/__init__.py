"""Debug information: functions and lines of the source, the compiler and its level.

Read `debug_info` first.
"""
