"""The version of this program, which stores and reports name."""

__version__ = "0.1.0"
