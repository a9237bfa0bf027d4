"""What debug information and source say of two programs: the truth that diffs are measured by.

Read `ground_truth` first.
"""
