#!/bin/sh
# From text, and from programs, to trained models and a report, in a few minutes on two free cores.
#
#   make demo          installs what is needed and runs this file
#   tokmill demo       runs it, where tokmill is installed with the extras text, train, x86 and plot
#
# Every command can be stopped and typed again: it continues, or finds that all is done. Everything
# is written into demo/, or the folder that is named.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
demo=${1:-demo}

began=$(date +%s)
echo "Eleven steps, about four minutes on two free cores; what is done already is not done again."

step() { printf '\n[%s of 11, %s s] %s\n' "$1" $(($(date +%s) - began)) "$2"; }
run() { printf '$ %s\n' "$*"; "$@"; }

step 1 "Text: the English of the docstrings of six installed packages (nothing is downloaded)."
run python "$here/demo_text.py" "$demo/text"

step 2 "A tokenizer: byte-level BPE with 4,096 ids, in the tokenizer.json that others read too."
run tokmill tokenizer train "$demo/text/train.txt" --vocab-size 4096 -o "$demo/tokenizer"

step 3 "Token stores: checked, memory-mapped, the same bytes whoever builds them."
run tokmill build text "$demo/text/train.txt" --tokenizer "$demo/tokenizer" -o "$demo/train"
run tokmill build text "$demo/text/val.txt" --tokenizer "$demo/tokenizer" -o "$demo/val"
run tokmill store validate "$demo/train"

step 4 "A small decoder learns to continue it (about two minutes on two free cores)."
run tokmill train decoder-tiny --data "$demo/train" --val "$demo/val" \
    -o "$demo/run"

step 5 "The model continues a prompt: 1.3 million weights and two minutes make words, not sense."
run tokmill sample "$demo/run" --prompt "This function returns" --tokens 60 --seed 1

if [ "$(uname -m)" = x86_64 ]; then
    step 6 "Programs of this machine and a module of Python: functions, as six streams of tokens."
    module=$(python -P -c 'import msgspec._core; print(msgspec._core.__file__)')
    set -- "$module"
    for name in bash cp dash date dd df diff dpkg du expr find grep gzip ls mv od ptx sed sort \
        stat tar; do
        if path=$(command -v "$name"); then set -- "$@" "$path"; fi
    done
    run tokmill build x86 "$@" -o "$demo/x86/functions"

    step 7 "Some programs are held out, without the functions that training programs contain too."
    run tokmill build select "$demo/x86/functions" --by program --ratio 0.85 -o "$demo/x86/train"
    run tokmill build select "$demo/x86/functions" --by program --ratio 0.85 --rest \
        --not-in "$demo/x86/train" -o "$demo/x86/val"

    step 8 "A small RWKV-7 learns all six streams (one to three minutes on two free cores)."
    run tokmill train rwkv7-tiny --data "$demo/x86/train" --val "$demo/x86/val" \
        -o "$demo/x86/run" --steps 80

    step 9 "How good it is on the programs that it never saw, beside the frequencies of single ids."
    run tokmill eval "$demo/x86/run" "$demo/x86/val" --by program --rows 200

    step 10 "It continues machine code, an instruction a line."
    run tokmill sample "$demo/x86/run" --prompt "55 48 89 e5" --tokens 40 --seed 1
    set -- "$demo/x86/run"
else
    step 6 "to 10. are about x86 programs, of which this machine has none."
    set --
fi

step 11 "One page about the runs; it needs no network."
run tokmill report "$demo/run" "$@" -o "$demo/report.html"

programs=""
[ ! -d "$demo/x86/run" ] || programs=" and an RWKV-7 of machine code in $demo/x86/run"
cat <<END

made      token stores in $demo/train and $demo/val, a decoder in $demo/run$programs
took      $(($(date +%s) - began)) s, $(du -sh "$demo" | cut -f 1) on the disk
page      $demo/report.html, to be opened in a browser
next      tokmill inspect $demo/train --head 1 (in a clone, first: . .venv/bin/activate)
then      tokmill train decoder-tiny --data STORE -o RUN, with a store of your own text
END
