"""Optimisers.

Read `optim` first.
"""
