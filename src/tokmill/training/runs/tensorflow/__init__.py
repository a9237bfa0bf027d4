"""Checkpoints of TensorFlow, read without TensorFlow. Read `google_bert_run` first."""
