"""Questions to a finished store: is it sound, what is in it, where is it from.

Read `validate` first."""
