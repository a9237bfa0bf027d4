"""Engines: how a step runs, in one process or in several."""
