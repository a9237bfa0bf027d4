"""The scripts of the systems that tokmill takes the place of, and where the docs say so.

A script in a row of docs/coming-from-the-scripts.md has commands there that run in a test; others
have pages of their own.
"""

from __future__ import annotations

ROW, PAGE = "row", "page"

SCRIPTS = {
    "SemanticBBV": {
        "tokenizer.py": ROW,
        "collect_tokens_fine.py": ROW,
        "export_tokens.py": ROW,
        "asm_dataset_generator.py": ROW,
        "merge_tokens.py": ROW,
        "merge_pickle_files.py": ROW,
        "asm_dataset_preprocessed_fine.py": ROW,
        "train_rwkv7_deepspeed.py": ROW,
        "run_deepspeed.sh": ROW,
        "analyze_sequence_length.py": ROW,
        "analyze_sequences.py": ROW,
        "inspect_pkl_structure.py": ROW,
        "plot_token_frequency.py": ROW,
        "pickle_token_to_dict.py": ROW,
        "sort_tokens.py": ROW,
        "asm_bbv_dataset.py": PAGE,
        "asm_bbv_cpi_dataset.py": PAGE,
        "asm_triple_loss_dataset_generator.py": PAGE,
        "merge_triple_loss_tokens.py": PAGE,
        "extract_triple_dataset.py": PAGE,
        "extract_triple_dataset_circle_loss.py": PAGE,
        "asm_text_collect_iced.py": ROW,
        "asm_text_collect_tokenizer.py": ROW,
        "asm_text_collect_tokenizer_ktrans.py": ROW,
        "collect_tokens.py": ROW,
        "compress_vocabulary.py": ROW,
        "program_parser.py": ROW,
        "program_parser_func.py": ROW,
    },
    "CS336": {
        "preprocess_data.py": ROW,
        "pretrain.py": ROW,
    },
    "BERT": {
        "tokenization.py": PAGE,
        "checkpoint.py": PAGE,
        "models.py": PAGE,
        "optim.py": ROW,
        "train.py": ROW,
        "utils.py": ROW,
        "pretrain.py": PAGE,
        "classify.py": PAGE,
        "gendata.py": ROW,
        "dataprocess.py": ROW,
        "train.sh": PAGE,
    },
    "MLIR-RL": {
        "distilbert_tokenizer.py": PAGE,
        "model.py": PAGE,
        "train.py": PAGE,
        "test_distilbert_data.py": PAGE,
        "test_distilbert.py": PAGE,
        "distilbert_quickref.sh": PAGE,
        "MODEL_ARCHITECTURE_COMPARISON.py": PAGE,
    },
    "JSONL kit": {
        "tokenize_data.py": ROW,
        "run_full_tokenization.py": ROW,
        "test_cloud_tokenization_10min.py": ROW,
        "resume_tokenization.py": ROW,
        "fix_tokenization_single_threaded.py": ROW,
        "train_tokenizer.py": ROW,
    },
}
"""System → script → where its job is described."""
