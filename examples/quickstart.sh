#!/bin/sh
# From a folder of text to a trained model and a report, in a few minutes on two cores.
#
#   make demo                     installs what is needed and runs this file
#   sh examples/quickstart.sh     runs it, where `tokmill` is installed
#
# Every command can be stopped and typed again: it continues, or finds that all is done. Everything
# is written into demo/ (or $DEMO); `make clean` removes it.
set -eu
cd "$(dirname "$0")/.."
demo=${DEMO:-demo}

step() { printf '\n%s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

step "1. Text: the English of the docstrings of six installed packages (nothing is downloaded)."
run python scripts/demo_text.py "$demo/text"

step "2. A tokenizer: byte-level BPE with 4,096 ids, in the tokenizer.json that others read too."
run tokmill tokenizer train "$demo/text/train.txt" --vocab-size 4096 -o "$demo/tokenizer"

step "3. Token stores: checked, memory-mapped, the same bytes whoever builds them."
run tokmill build text "$demo/text/train.txt" --tokenizer "$demo/tokenizer" -o "$demo/train"
run tokmill build text "$demo/text/val.txt" --tokenizer "$demo/tokenizer" -o "$demo/val"
run tokmill store validate "$demo/train"

step "4. A small decoder learns to continue it (about 90 seconds on two cores)."
run tokmill train recipes/text/decoder-tiny.toml --data "$demo/train" --val "$demo/val" \
    -o "$demo/run" --resume

step "5. The model continues a prompt: 1.3 million weights and two minutes make words, not sense."
run tokmill sample "$demo/run" --prompt "This function returns" --tokens 60 --seed 1

step "6. One page about the store and the run; it needs no network."
run tokmill report "$demo/train" "$demo/run" -o "$demo/report.html"

made() {
    printf '\n%s\n' "$2"
    find "$demo/$1" -type f ! -name '.*' -printf '%11s  %p\n' | sort -k 2
}
step "Made (bytes, file):"
made text "The text:"
made tokenizer "The tokenizer:"
made train "The token store to learn from:"
made val "The token store to evaluate on:"
made run "The run: metrics, checkpoints to continue from, weights (safetensors):"
made report.html "The report, to be opened in a browser:"

printf '\nnow try: . .venv/bin/activate && tokmill inspect %s/train --head 1\n' "$demo"
