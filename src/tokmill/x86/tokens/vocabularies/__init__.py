"""Vocabularies of x86 columns; begin with `vocabulary`."""
