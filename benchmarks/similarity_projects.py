"""The projects of `make similarity`: what of each Debian source package is compiled, and how.

No `configure` is run. What it would write stands here, a line or two a project. A library becomes
a program with an empty `main`, so all of its code is linked in. The quick ones come first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diffing_programs import SOURCES
from programs import Source, below

COMMON = """\
#define HAVE_STDINT_H 1
#define HAVE_INTTYPES_H 1
#define HAVE_STDLIB_H 1
#define HAVE_STRING_H 1
#define HAVE_STRINGS_H 1
#define HAVE_UNISTD_H 1
#define HAVE_FCNTL_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TIME_H 1
#define HAVE_ALLOCA_H 1
#define STDC_HEADERS 1
#define SIZEOF_INT 4
#define SIZEOF_LONG 8
#define SIZEOF_LONG_LONG 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOIDP 8
"""
OGG_TYPES = """\
#include <stdint.h>
typedef int16_t {0}_int16_t;
typedef uint16_t {0}_uint16_t;
typedef int32_t {0}_int32_t;
typedef uint32_t {0}_uint32_t;
typedef int64_t {0}_int64_t;
typedef uint64_t {0}_uint64_t;
"""


@dataclass(frozen=True)
class Project(Source):
    """How one project is compiled. `{tree}` in flags is its source, `{made}` what is written."""

    made: Mapping[str, str] = field(default_factory=dict)
    """File → its text; `@NAME` is a copy of a file of the source."""
    library: bool = False
    """Whether an empty `main` is added."""


def _project(
    package: str,
    *patterns: str,
    but: str = "",
    flags: str = "",
    libraries: str = "",
    language: str = "C",
    made: Mapping[str, str] | None = None,
    library: bool = False,
) -> Project:
    files: Callable[[Path], list[Path]] = below(*patterns, but=but)
    words = ("-I{made}", *flags.split())
    return Project(package, files, words, libraries.split(), language, made or {}, library)


def _known(name: str) -> Project:
    return Project(**vars(SOURCES[name]))


PROJECTS: dict[str, Project] = {
    "bzip2": _known("bzip2"),
    "zlib": _known("zlib"),
    "lua": _known("lua"),
    "cjson": _project("cjson", "cJSON.c", "cJSON_Utils.c", library=True, libraries="-lm"),
    "libcsv": _project("libcsv", "libcsv.c", library=True),
    "http-parser": _project("http-parser", "http_parser.c", library=True),
    "xxhash": _project("xxhash", "xxhash.c", "cli/*.c", flags="-I{tree}"),
    "utf8proc": _project("utf8proc", "utf8proc.c", library=True),
    "ncompress": _project("ncompress", "compress42.c"),
    "nanopb": _project("nanopb", "pb_*.c", library=True),
    "lmdb": _project(
        "lmdb", "libraries/liblmdb/mdb.c", "libraries/liblmdb/midl.c",
        "libraries/liblmdb/mdb_load.c", libraries="-lpthread",
    ),
    "libogg": _project(
        "libogg", "src/*.c", flags="-I{tree}/include", library=True,
        made={"ogg/config_types.h": OGG_TYPES.format("ogg")},
    ),
    "md4c": _project("md4c", "src/*.c", "md2html/*.c", flags=(
        "-I{tree}/src -DMD_VERSION_MAJOR=0 -DMD_VERSION_MINOR=4 -DMD_VERSION_RELEASE=8"
    )),
    "libyaml": _project("libyaml", "src/*.c", flags="-DHAVE_CONFIG_H -I{tree}/include", made={
        "config.h": '#define YAML_VERSION_MAJOR 0\n#define YAML_VERSION_MINOR 2\n'
        '#define YAML_VERSION_PATCH 5\n#define YAML_VERSION_STRING "0.2.5"\n',
    }, library=True),
    "jansson": _project("jansson", "src/*.c", flags="-DHAVE_CONFIG_H", library=True, made={
        "jansson_config.h": "@android/jansson_config.h",
        "jansson_private_config.h": COMMON + "#define INITIAL_HASHTABLE_ORDER 3\n",
    }),
    "yajl": _project("yajl", "src/*.c", library=True, made={
        "yajl/yajl_version.h": "#define YAJL_MAJOR 2\n#define YAJL_MINOR 1\n#define YAJL_MICRO 0\n"
        "#define YAJL_VERSION 20100\nint yajl_version(void);\n",
        "yajl/yajl_common.h": "@src/api/yajl_common.h",
        "yajl/yajl_parse.h": "@src/api/yajl_parse.h",
        "yajl/yajl_gen.h": "@src/api/yajl_gen.h",
        "yajl/yajl_tree.h": "@src/api/yajl_tree.h",
    }),
    "ed": _project("ed", "*.c", flags='-DPROGVERSION="1.19"'),
    "lzlib": _project(
        "lzlib", "lzlib.c", "minilzip.c", "carg_parser.c", flags='-DPROGVERSION="1.13"'
    ),
    "giflib": _project(
        "giflib", "dgif_lib.c", "egif_lib.c", "gif_err.c", "gif_font.c", "gif_hash.c",
        "gifalloc.c", "openbsd-reallocarray.c", "quantize.c", "getarg.c", "qprintf.c",
        "giftool.c", flags="-D_GNU_SOURCE",
    ),
    "tinyscheme": _project(
        "tinyscheme", "*.c", flags="-DSTANDALONE=1 -DUSE_DL=1 -DSUN_DL=1 -DUSE_MATH=1",
        libraries="-ldl -lm",
    ),
    "figlet": _project("figlet", "figlet.c", "zipio.c", "crc.c", "inflate.c", "utf8.c"),
    "zopfli": _project("zopfli", "src/zopfli/*.c", libraries="-lm"),
    "hiredis": _project("hiredis", "*.c", but="test.c dict.c", library=True),
    "tree": _project("tree", "*.c", flags="-DLINUX -D_LARGEFILE64_SOURCE -D_FILE_OFFSET_BITS=64"),
    "jhead": _project("jhead", "*.c", but="myglob.c", libraries="-lm"),
    "expat": _project("expat", "expat/lib/*.c", library=True, made={
        "expat_config.h": COMMON + "#define XML_NS 1\n#define XML_DTD 1\n#define HAVE_GETRANDOM 1\n"
        "#define XML_CONTEXT_BYTES 1024\n#define BYTEORDER 1234\n",
    }),
    "cmark": _project("cmark", "src/*.c", library=False, made={
        "config.h": "#include <stdbool.h>\n#define HAVE_STDBOOL_H\n#define HAVE___BUILTIN_EXPECT\n"
        "#define HAVE___ATTRIBUTE__\n#define CMARK_ATTRIBUTE(list) __attribute__(list)\n"
        "#define CMARK_INLINE inline\n",
        "cmark_version.h": "#define CMARK_VERSION ((0 << 16) | (30 << 8) | 2)\n"
        '#define CMARK_VERSION_STRING "0.30.2"\n',
        "cmark_export.h": "#define CMARK_EXPORT\n#define CMARK_NO_EXPORT\n",
    }),
    "unzip": _project(
        "unzip", "unzip.c", "crc32.c", "crypt.c", "envargs.c", "explode.c", "extract.c",
        "fileio.c", "globals.c", "inflate.c", "list.c", "match.c", "process.c", "ttyio.c",
        "ubz2err.c", "unreduce.c", "unshrink.c", "zipinfo.c", "unix/unix.c",
        flags="-DUNIX -DNO_LCHMOD -DLARGE_FILE_SUPPORT -D_FILE_OFFSET_BITS=64 -I{tree} "
        "-I{tree}/unix -DUNICODE_SUPPORT -DUTF8_MAYBE_NATIVE -DUNICODE_WCHAR",
    ),
    "lz4": _known("lz4"),
    "speexdsp": _project(
        "speexdsp", "libspeexdsp/*.c", but="testdenoise.c testecho.c testjitter.c testresample.c "
        "testresample2.c", flags="-DHAVE_CONFIG_H -I{tree}/include", libraries="-lm", library=True,
        made={
            "config.h": "#define FLOATING_POINT\n#define EXPORT\n#define USE_SMALLFT\n",
            "speexdsp_config_types.h": OGG_TYPES.format("spx"),
        },
    ),
    "lzo": _project("lzo2", "src/*.c", flags="-I{tree}/include -I{tree}/src", library=True),
    "mujs": _project("mujs", "one.c", "main.c", libraries="-lm"),
    "libdeflate": _project(
        "libdeflate", "lib/*.c", "lib/x86/*.c", "programs/gzip.c", "programs/prog_util.c",
        "programs/tgetopt.c", flags="-I{tree} -D_POSIX_C_SOURCE=200809L -D_FILE_OFFSET_BITS=64",
        made={"config.h": "#define HAVE_FUTIMENS 1\n#define HAVE_STAT_NANOSECOND_PRECISION 1\n"},
    ),
    "libtommath": _project("libtommath", "*.c", library=True),
    "chipmunk": _project(
        "chipmunk", "src/*.c", but="cpHastySpace.c", flags="-I{tree}/include -DNDEBUG",
        libraries="-lm -lpthread", library=True,
    ),
    "brotli": _known("brotli"),
    "libpng": _project(
        "libpng1.6", "*.c", but="example.c pngtest.c", flags="-DPNG_INTEL_SSE_OPT=0",
        libraries="-lz -lm", library=True, made={"pnglibconf.h": "@scripts/pnglibconf.h.prebuilt"},
    ),
    "oniguruma": _project(
        "libonig", "src/*.c", but="mktable.c unicode_egcb_data.c unicode_property_data.c "
        "unicode_property_data_posix.c unicode_wb_data.c "
        "unicode_fold_data.c", library=True,
        made={"config.h": COMMON + '#define PACKAGE "onig"\n#define VERSION "6.9.8"\n'
              "#define USE_CRNL_AS_LINE_TERMINATOR 0\n"},
    ),
    "libsodium": _project(
        "libsodium", "src/libsodium/**/*.c", flags="-I{made}/sodium -DCONFIGURED=1 -D_GNU_SOURCE "
        "-I{tree}/src/libsodium/include -I{tree}/src/libsodium/include/sodium -DHAVE_TI_MODE=1 "
        "-DNATIVE_LITTLE_ENDIAN=1 -DSODIUM_STATIC=1 -DHAVE_SYS_MMAN_H=1 -DHAVE_PTHREAD=1",
        libraries="-lpthread", library=True,
        made={"sodium/version.h": "@builds/msvc/version.h"},
    ),
    "duktape": _project(
        "duktape", "src/duktape.c", "examples/cmdline/duk_cmdline.c", flags="-I{tree}/src",
        libraries="-lm",
    ),
    "lcms2": _project(
        "lcms2", "src/*.c", flags="-I{tree}/include -I{tree}/src", libraries="-lm -lpthread",
        library=True,
    ),
    "libtomcrypt": _project(
        "libtomcrypt", "src/**/*.c", but="aes_tab.c sober128tab.c safer_tab.c twofish_tab.c "
        "whirltab.c", flags="-I{tree}/src/headers -DLTC_SOURCE", library=True,
    ),
    "bearssl": _project(
        "bearssl", "src/**/*.c", flags="-I{tree}/inc -I{tree}/src", library=True
    ),
    "tinyxml2": _project("tinyxml2", "tinyxml2.cpp", language="C++", library=True),
    "lzip": _project("lzip", "*.cc", flags='-DPROGVERSION="1.23"', language="C++"),
    "pugixml": _project("pugixml", "src/pugixml.cpp", language="C++", library=True),
    "pcre2": _project(
        "pcre2", "src/pcre2_*.c",
        but="pcre2_dftables.c pcre2_fuzzsupport.c pcre2_jit_match.c pcre2_jit_misc.c "
        "pcre2_jit_test.c pcre2_printint.c pcre2_ucptables.c pcre2demo.c pcre2grep.c "
        "pcre2posix_test.c pcre2test.c", library=True,
        flags="-DHAVE_CONFIG_H -DPCRE2_CODE_UNIT_WIDTH=8 -DSUPPORT_PCRE2_8 -DSUPPORT_UNICODE "
        "{made}/pcre2_chartables.c -I{tree}/src",
        made={"config.h": "@src/config.h.generic", "pcre2.h": "@src/pcre2.h.generic",
              "pcre2_chartables.c": "@src/pcre2_chartables.c.dist"},
    ),
    "libwebp": _project(
        "libwebp", "src/**/*.c", "sharpyuv/*.c", flags="-I{tree} -I{tree}/src",
        libraries="-lm -lpthread", library=True,
    ),
    "zstd": _known("zstd"),
    "mbedtls": _project(
        "mbedtls", "library/*.c", flags="-I{tree}/include -I{tree}/library", library=True
    ),
    "sqlite": _known("sqlite"),
}  # fmt: skip
"""Name → how it is compiled, the quick ones first."""
SMALL = ("bzip2", "zlib", "lua")
