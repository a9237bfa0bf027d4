"""Intervals that stand for a program: clusters, designs, estimates.

Read `choose_points` first.
"""
