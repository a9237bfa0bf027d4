"""Program files: what lies where in memory, and which names and tables say so."""
