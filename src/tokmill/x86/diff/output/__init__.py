"""A diff as JSON, as BinDiff's database, and as a page.

Read `files` first.
"""
