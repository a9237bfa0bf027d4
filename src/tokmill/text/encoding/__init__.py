"""The engines that encode text in bulk, with equal ids, and what guards them.

Read `encoders` first; all other files are the price of gigatoken."""
