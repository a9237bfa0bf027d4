"""Instructions as tokens: rules, spellings and vocabularies."""
