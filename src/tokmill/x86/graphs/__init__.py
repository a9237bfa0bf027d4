"""Graphs of programs: made of many files, kept, and read from the files of others."""
