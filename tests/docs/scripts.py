"""The scripts of the systems that tokmill takes the place of; `later`: it cannot do their job yet.

A script that is `now` has a row in docs/coming-from-the-scripts.md, and its commands run in a test.
"""

from __future__ import annotations

NOW, LATER = "now", "later"

SCRIPTS = {
    "SemanticBBV": {
        "tokenizer.py": NOW,
        "collect_tokens_fine.py": NOW,
        "export_tokens.py": NOW,
        "asm_dataset_generator.py": NOW,
        "merge_tokens.py": NOW,
        "merge_pickle_files.py": NOW,
        "asm_dataset_preprocessed_fine.py": NOW,
        "train_rwkv7_deepspeed.py": NOW,
        "run_deepspeed.sh": NOW,
        "analyze_sequence_length.py": NOW,
        "analyze_sequences.py": NOW,
        "inspect_pkl_structure.py": NOW,
        "plot_token_frequency.py": NOW,
        "pickle_token_to_dict.py": NOW,
        "sort_tokens.py": NOW,
        "asm_bbv_dataset.py": LATER,
        "asm_bbv_cpi_dataset.py": LATER,
        "asm_triple_loss_dataset_generator.py": LATER,
        "merge_triple_loss_tokens.py": LATER,
        "extract_triple_dataset.py": LATER,
        "extract_triple_dataset_circle_loss.py": LATER,
        "asm_text_collect_iced.py": NOW,
        "asm_text_collect_tokenizer.py": NOW,
        "asm_text_collect_tokenizer_ktrans.py": NOW,
        "collect_tokens.py": NOW,
        "compress_vocabulary.py": NOW,
        "program_parser.py": NOW,
        "program_parser_func.py": NOW,
    },
    "CS336": {
        "preprocess_data.py": NOW,
        "pretrain.py": NOW,
    },
    "BERT": {
        "tokenization.py": LATER,
        "checkpoint.py": LATER,
        "models.py": LATER,
        "optim.py": NOW,
        "train.py": NOW,
        "utils.py": NOW,
        "pretrain.py": LATER,
        "classify.py": LATER,
        "gendata.py": NOW,
        "dataprocess.py": NOW,
        "train.sh": LATER,
    },
    "MLIR-RL": {
        "distilbert_tokenizer.py": LATER,
        "model.py": LATER,
        "train.py": LATER,
        "test_distilbert_data.py": LATER,
        "test_distilbert.py": LATER,
        "distilbert_quickref.sh": LATER,
        "MODEL_ARCHITECTURE_COMPARISON.py": LATER,
    },
    "JSONL kit": {
        "tokenize_data.py": NOW,
        "run_full_tokenization.py": NOW,
        "test_cloud_tokenization_10min.py": NOW,
        "resume_tokenization.py": NOW,
        "fix_tokenization_single_threaded.py": NOW,
        "train_tokenizer.py": NOW,
    },
}
"""System → script → whether its job can be done."""
