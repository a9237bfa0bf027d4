"""Figures.

Read `plot` first.
"""
