"""Runs side by side. Read `compare_runs` first."""
