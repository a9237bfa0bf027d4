"""Foreign pickles, read as data: nothing in them is imported, and nothing in them is called.

A pickle is a program for a small stack machine, and Python's own reader calls whatever functions
that program names. This reader knows the machine (protocols 0 to 5) and makes plain values only:
dict, list, tuple, set, frozenset, int, float, str, bytes, bytearray, bool, None. What the program
would make by a call is an inert `Instance`, a function or class a `Name`; names that the caller
does not expect are refused.

Source of the format: CPython, `Lib/pickletools.py`.
"""

from tokmill.unpickle.budget import Budget
from tokmill.unpickle.inert import Instance, Name, array_of
from tokmill.unpickle.reader import Pickle

__all__ = ["Instance", "Name", "Pickle", "Budget", "array_of"]
