"""Models: from columns to hidden states."""
