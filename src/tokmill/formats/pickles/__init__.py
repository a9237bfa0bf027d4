"""Pickles and texts of SemanticBBV's scripts and of walks: token dicts, triplets, corpus.txt.

Read `token_dicts` first."""
