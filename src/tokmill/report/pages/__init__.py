"""Figures and pages. Read `page` first."""
