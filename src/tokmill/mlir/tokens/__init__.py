"""Operations as a policy sees them: vectors and sequences of tokens."""
