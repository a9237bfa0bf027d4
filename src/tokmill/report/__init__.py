"""Descriptions, comparisons, figures and pages of stores, runs and tokenizers."""
