"""Jump tables: which instructions read one, and where its entries lead.

Read `jump_tables` first.
"""
