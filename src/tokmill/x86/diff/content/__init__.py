"""What operands refer to, and what of it changed; begin with `operand_references`."""
