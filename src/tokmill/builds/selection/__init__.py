"""Stores made of stores: filter, sample, split, merge, near duplicates, columns added.

Read `select` first."""
