"""Commands for text: tokenizer, and the options of builds of text."""
