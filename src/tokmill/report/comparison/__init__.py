"""Runs side by side.

Read `compare` first.
"""
