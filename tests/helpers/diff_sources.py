"""A small program in two versions."""

OLD = r"""
#include <stdio.h>
__attribute__((noinline)) int twice(int x) { return x * 77 + 2; }
__attribute__((noinline)) int gone(int x) { for (int i = 0; i < x; i++) puts("gone"); return x; }
__attribute__((noinline)) int kept(int x) { printf("kept %d\n", x); return twice(x) + gone(x); }
int main(int n, char **v) { return kept(n); }
"""
NEW = (
    OLD.replace("* 77 + 2", "* 77 + 3")
    .replace(" + gone(x)", "")
    .replace("int gone", "static int gone")
)
"""A number of `twice` is another, and nobody calls `gone`, which compilers drop."""
