"""What a person would write today: four lines with gigatoken. Arguments: jsonl tokenizer out."""

import sys

import gigatoken
import numpy as np

tokenizer = gigatoken.Tokenizer.from_json(open(sys.argv[2]).read())  # noqa: SIM115
ids = tokenizer.encode_files(gigatoken.JsonlFileSource([sys.argv[1]]))
np.asarray(ids.layout.content.data).astype(np.uint16).tofile(sys.argv[3])
