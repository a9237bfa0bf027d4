"""Masked language modelling and BERT's pairs. Read `masked` first."""
