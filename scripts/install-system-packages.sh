#!/bin/sh
# Install the Debian packages that tests use, where they are missing.
#
# Without root or apt it does nothing: the tests that need them are then skipped with a reason.
set -u

# command:package, a pair a line
WANTED="
strace:strace
"

missing=""
for pair in $WANTED; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed (no root or no apt), tests that need them are skipped:$missing" >&2
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
echo "installing:$missing" >&2
# shellcheck disable=SC2086 # the names are separate words
{ apt-get install -qq -y --no-install-recommends $missing ||
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing; }
} >/dev/null 2>&1 || echo "could not install:$missing" >&2
exit 0
