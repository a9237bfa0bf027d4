"""Mining: which records of a store are alike, which differ, and entries made of both."""
