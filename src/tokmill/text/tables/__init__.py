"""Tables of labelled sentences (TSV of GLUE). Read `tsv` first."""
