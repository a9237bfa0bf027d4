"""Instructions as tokens: rules and vocabularies."""
