"""Optimisers. Read `optim` first."""
