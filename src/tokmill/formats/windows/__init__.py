"""Padded windows in npz, as a JSONL tokenization kit writes them: in and out. Read `npz` first."""
