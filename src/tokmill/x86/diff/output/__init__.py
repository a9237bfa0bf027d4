"""A diff as JSON, in figures, and as a page.

Read `diff_json` first.
"""
