"""Vocabularies of x86 columns: counted, frozen, changed, read from other projects.

Read `vocabulary` first.
"""
