"""Jump tables and where their entries lead; begin with `jump_tables`."""
