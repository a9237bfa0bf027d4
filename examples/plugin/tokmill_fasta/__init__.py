"""A plug-in of tokmill for DNA: a source, a task, a figure and a command.

`tokmill build fasta` makes stores of FASTA files, the task `gc` predicts the share of G and C of a
sequence, and a figure and a command show this share.
"""
