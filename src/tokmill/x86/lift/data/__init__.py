"""Data in or near code: pointers, constants.

Read `pointers` first.
"""
