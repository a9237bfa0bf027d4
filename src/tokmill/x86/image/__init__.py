"""Program files: sections in memory, symbols, imports and tables."""
