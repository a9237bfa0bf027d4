"""Data in or near code: pointers, constants, GHC's info tables.

Read `pointers` first.
"""
