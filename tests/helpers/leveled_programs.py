"""Small programs of two projects, compiled at several levels, in folders that say so."""

from pathlib import Path

from x86_programs import C_SOURCE, compiles

LAYOUT = "{project}/{compiler}-{level}/{program}"
SECOND = r"""
#include <stdio.h>
#include <string.h>

struct node { int key; struct node *left, *right; };

__attribute__((noinline)) int depth(const struct node *n) {
    if (!n)
        return 0;
    int l = depth(n->left), r = depth(n->right);
    return 1 + (l > r ? l : r);
}

__attribute__((noinline)) int search(const struct node *n, int key, char *path, int room) {
    while (n && room > 1) {
        if (key == n->key) {
            *path = 0;
            return printf("found %d\n", key);
        }
        *path++ = key < n->key ? 'l' : 'r';
        room--;
        n = key < n->key ? n->left : n->right;
    }
    return -1;
}

__attribute__((noinline)) unsigned hash(const char *text, int n) {
    unsigned h = 2166136261u;
    for (int i = 0; i < n; i++) {
        h ^= (unsigned char)text[i];
        h *= 16777619u;
        if (h & 1)
            h ^= h >> 7;
    }
    return h;
}

__attribute__((noinline)) int words(const char *text) {
    int n = 0, inside = 0;
    for (; *text; text++) {
        if (strchr(" \t\n", *text))
            inside = 0;
        else if (!inside)
            inside = 1, n++;
    }
    return n;
}

int main(int argc, char **argv) {
    struct node leaf = {3, 0, 0}, root = {5, &leaf, 0};
    char path[40];
    int total = depth(&root) + search(&root, argc, path, 40);
    return total + (int)hash(argv[0], 4) + words(argv[0]);
}
"""


def leveled(folder: Path, levels: tuple[str, ...] = ("O0", "O2", "O3"), by: str = "gcc") -> Path:
    """Return a folder of programs in the places that `LAYOUT` says."""
    for project, source in (("first", C_SOURCE), ("second", SECOND)):
        for level in levels:
            place = folder / project / f"{by}-{level}"
            place.mkdir(parents=True, exist_ok=True)
            compiles(place, "tool", source, f"-{level}", by=by)
            for left in place.glob("*-source.c"):
                left.unlink()
    return folder
