"""IREE: modules compiled and run; which flags and layout make a model fastest."""
