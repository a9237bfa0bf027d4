#!/bin/sh
# Install the Debian packages that tests use, where they are missing; with `pairs` those of
# `make pairs` too, with `profiles` those of `make profiles`, with `similarity` those of
# `make similarity`, with `bench` those of `make bench` too.
#
# Without root or apt it does nothing: the tests that need them are then skipped with a reason,
# which fails continuous integration (tests/listed_skips.py).
set -u

# command:package[,package], a line each; a command with a slash is a file that must be there.
# strace ends builds at any system call, mount makes small disks, setpriv gives up root's rights;
# the compilers make the programs that are lifted; git compares their sources; chromium shows pages;
# the readers of BinExport files that tests compare with need libmagic; valgrind runs the programs
# whose executions are profiled, which are the compressors and sqlite3; dwz moves debug information
# into a file of its own.
WANTED="
strace:strace
mount:mount
setpriv:util-linux
setarch:util-linux
gcc:gcc,libc6-dev
g++:g++
objcopy:binutils
git:git
dwz:dwz
valgrind:valgrind
bzip2:bzip2
xz:xz-utils
sqlite3:sqlite3
/usr/include/x86_64-linux-gnu/gnu/stubs-32.h:gcc-multilib
clang:clang
/usr/lib/x86_64-linux-gnu/libmagic.so.1:libmagic1
x86_64-w64-mingw32-gcc:gcc-mingw-w64-x86-64-win32
chromium:chromium
"
# What unpacks and makes programs of source packages.
PAIRS="
make:make
"
# What else makes the projects that functions are looked for in.
SIMILARITY="
tclsh:tcl
g++-11:g++-11
/usr/include/zlib.h:zlib1g-dev
"
# Programs whose executions are profiled.
PROFILES="
zstd:zstd
lz4:lz4
perl:perl
mawk:mawk
tclsh:tcl
jq:jq
python3:python3
openssl:openssl
bc:bc
bash:bash
"
# What else makes the programs that lifters are measured on.
BENCH="
tclsh:tcl
"
case "${1:-}" in
pairs) WANTED="$WANTED$PAIRS" ;;
similarity) WANTED="$WANTED$PAIRS$SIMILARITY" ;;
profiles) WANTED="$WANTED$PROFILES" ;;
bench) WANTED="$WANTED$PAIRS$BENCH" ;;
esac

missing=""
for pair in $WANTED; do
    case "${pair%%:*}" in
    /*) [ -e "${pair%%:*}" ] && continue ;;
    *) command -v "${pair%%:*}" >/dev/null 2>&1 && continue ;;
    esac
    missing="$missing $(echo "${pair#*:}" | tr , " ")"
done
# Upstream's MLIR replays a schedule (73 MB). Not every archive has it, and one unknown name would
# keep all others from being installed.
optional=""
command -v mlir-opt-22 >/dev/null 2>&1 || optional=" mlir-22-tools"
[ -n "$missing$optional" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed (no root or no apt), tests that need them are skipped:$missing$optional" >&2
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
for wanted in "$missing" "$optional"; do
    [ -n "$wanted" ] || continue
    echo "installing:$wanted" >&2
    # shellcheck disable=SC2086 # the names are separate words
    { apt-get install -qq -y --no-install-recommends $wanted ||
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends $wanted; }
    } >/dev/null 2>&1 || echo "could not install:$wanted" >&2
done
exit 0
