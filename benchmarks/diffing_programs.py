"""Sources of programs that are compiled beside those of `programs.py`, and releases of Debian."""

from programs import PROGRAMS, Source, below

SUITES = {"bullseye": "bookworm", "bookworm": "trixie", "trixie": "forky"}
"""Debian's release → the next one, whose version is the newer one of a pair."""
SOURCES = {name: PROGRAMS[name] for name in ("bzip2", "zlib", "lua", "sqlite")} | {
    "lz4": Source(
        "lz4",
        below("lib/*.c", "programs/*.c", but="lz4_file.c"),
        ("-I{tree}/lib", "-I{tree}/programs", "-DXXH_NAMESPACE=LZ4_"),
    ),
    "brotli": Source("brotli", below("c/*/*.c"), ("-I{tree}/c/include",), ("-lm",)),
    "zstd": Source(
        "libzstd",
        below("lib/common/*.c", "lib/compress/*.c", "lib/decompress/*.c", "lib/dictBuilder/*.c",
               "programs/*.c"),
        ("-I{tree}/lib", "-I{tree}/lib/common", "-DXXH_NAMESPACE=ZSTD_", "-DZSTD_DISABLE_ASM=1"),
        ("-lpthread",),
    ),
}  # fmt: skip
