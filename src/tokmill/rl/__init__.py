"""Policies that choose schedules, and how they learn: embeddings of observations."""
