"""Lifters: the bytes of a program to a graph of its functions and blocks."""
