"""Commands for programs: cfg, diff, vocab."""
