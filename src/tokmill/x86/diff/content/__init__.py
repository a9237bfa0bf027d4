"""What the operands of matched functions refer to, and what of it changed.

Read `operand_references` first.
"""
