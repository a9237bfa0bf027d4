"""The own lowering: which changes of loops are legal, as a schedule, lowered and run."""
