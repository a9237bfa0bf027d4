"""Graphs of programs: making them from many files, graph files, and graphs from other tools."""
