"""Calls whose target or return must be worked out: registers, slots, noreturn, return addresses.

Read `noreturn` first.
"""
