"""From an observation to a vector: DistilBERT, an LSTM, a Transformer over loops.

Read `embeddings` first.
"""
