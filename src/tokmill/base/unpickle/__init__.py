"""Read foreign pickles as data: nothing in them is imported or called.

A pickle is a program for a small stack machine, and Python's own reader calls any function that
this program names. The reader here implements the machine (protocols 0 to 5), but makes only plain
values: dict, list, tuple, set, frozenset, int, float, str, bytes, bytearray, bool, None. In place
of a call it makes an inert `Instance`, in place of a function or class a `Name`. Names that the
caller does not expect are refused.

Source of the format: CPython, `Lib/pickletools.py`.
"""

from tokmill.base.unpickle.inert import Budget, Instance, Name, array_of, type_name
from tokmill.base.unpickle.reader import Pickle

__all__ = ["Budget", "Instance", "Name", "Pickle", "array_of", "type_name"]
