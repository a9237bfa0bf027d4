"""Transformers: attention, blocks, the decoder, the encoders. Read `transformer` first."""
