"""Tasks that compare records: entries, losses of likeness, ranks. Read `contrastive` first."""
