"""Mining: which records of a store are similar, which differ, and entries made of both."""
