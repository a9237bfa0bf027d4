"""Damaged or changed stores made whole again, and the records that are in none.

Read `repair` first.
"""
