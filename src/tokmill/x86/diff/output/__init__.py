"""A diff as JSON, in figures, and as a page; begin with `diff_json`."""
