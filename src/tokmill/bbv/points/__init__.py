"""Intervals that stand for a program; begin with `choose_points`."""
