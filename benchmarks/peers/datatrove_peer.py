"""datatrove's local executor, one task. Arguments: jsonl tokenizer out-folder."""

import shutil
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    source, tokenizer, out = sys.argv[1:]
    shutil.rmtree(out, ignore_errors=True)
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(Path(source).parent), glob_pattern=Path(source).name),
            DocumentTokenizer(out, tokenizer, shuffle_documents=False, eos_token=None),
        ],
        tasks=1,
        logging_dir=f"{out}/logs",
    ).run()
