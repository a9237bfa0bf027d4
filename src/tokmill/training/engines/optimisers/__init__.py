"""Optimisers, and the average of weights.

Read `optim` first.
"""
