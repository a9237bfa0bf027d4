"""Tables of pointers to functions: callbacks that only their places tell apart."""

import copy
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.diff.result import Reason
from tokmill.x86.features.tables import tables_of
from tokmill.x86.graph import Graph
from tokmill.x86.lift.cfg import lift
from x86_programs import compiles, stripped, symbols

COMPARATORS = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct item { const char *name; long size, time, links, share; };
static int by_name(const struct item *a, const struct item *b) { return strcmp(a->name, b->name); }
static int compare(long a, long b) { return (a > b) - (a < b); }
#define BOTH(key) \
  static int up_##key(const void *a, const void *b) { const struct item *x = a, *y = b; \
    int d = compare(x->key, y->key); return d ? d : by_name(x, y); } \
  static int down_##key(const void *a, const void *b) { const struct item *x = a, *y = b; \
    int d = compare(y->key, x->key); return d ? d : by_name(x, y); } \
  static int up_first_##key(const void *a, const void *b) { const struct item *x = a, *y = b; \
    int d = (x->links > 1) - (y->links > 1); return d ? d : up_##key(a, b); } \
  static int down_first_##key(const void *a, const void *b) { const struct item *x = a, *y = b; \
    int d = (x->links > 1) - (y->links > 1); return d ? d : down_##key(a, b); }
BOTH(size) BOTH(time) BOTH(links) BOTH(share)
typedef int (*order)(const void *, const void *);
static const order orders[4][2][2] = {
  {{up_size, down_size}, {up_first_size, down_first_size}},
  {{up_time, down_time}, {up_first_time, down_first_time}},
  {{up_links, down_links}, {up_first_links, down_first_links}},
  {{up_share, down_share}, {up_first_share, down_first_share}}};
static int one(int a) { return a + 1; }
static int two(int a) { return a + 2; }
static int three(int a) { return a + 3; }
static int four(int a) { return a + 4; }
static const struct { const char *name; int (*run)(int); } commands[] = {
  {"first command", one}, {"second command", two}, {"third command", three},
  {"fourth command", four}};
int run_command(const char *name, int a) {
  for (unsigned i = 0; i < sizeof commands / sizeof *commands; i++)
    if (!strcmp(commands[i].name, name)) return commands[i].run(a);
  return -1;
}
void sort_items(struct item *items, size_t n, int key, int first, int down) {
  fprintf(stderr, "sorting %zu items\n", n);
  qsort(items, n, sizeof *items, orders[key][first][down]);
}
int main(int argc, char **argv) {
  struct item *items = calloc(argc, sizeof *items);
  for (int i = 1; i < argc; i++) items[i].name = argv[i], items[i].size = strlen(argv[i]);
  sort_items(items, argc, argc & 3, argc & 1, argc >> 1 & 1);
  for (int i = 1; i < argc; i++) printf("%s %d\n", items[i].name, run_command(argv[i], i));
  free(items);
}
"""
SHAPES = r"""
struct Shape { virtual ~Shape() {} virtual int area() = 0; virtual int edges() = 0; int a = 1; };
struct Square : Shape { int area() override { return a * a; } int edges() override { return 4; } };
struct Triangle : Shape { int area() override { return a * a / 2; } int edges() override { return 3; } };
struct Line : Shape { int area() override { return 0; } int edges() override { return 1; } };
Shape *make(int kind) {
  if (kind == 4) return new Square;
  if (kind == 3) return new Triangle;
  return new Line;
}
int main(int argc, char **) { Shape *s = make(argc); int n = s->area() + s->edges(); delete s; return n; }
"""  # noqa: E501
FLAGS = {"anywhere": ("-fpie", "-pie"), "fixed": ("-fno-pie", "-no-pie")}


def two_levels(built: Path, name: str, source: str, *flags: str, by: str = "gcc") -> list[Graph]:
    """Return the stripped program at -O0 and -O2, functions named as before they were stripped."""
    found = []
    for level in ("-O0", "-O2"):
        path = compiles(built, f"{name}{level}", source, level, *flags, by=by)
        graph = lift(stripped(path), facts=True)
        names = {address: one for one, address in symbols(path).items()}
        assert not any(graph.function_name)
        graph.function_name = [names.get(at, "") for at in graph.function_address.tolist()]
        found.append(graph)
    return found


def wrong(a: Graph, b: Graph) -> set[str]:
    """Return the names of functions of both programs that are not matched with themselves."""
    found = diff_graphs(a, b, names=False)
    right = {
        a.function_name[i]
        for i, j in zip(found.function_a.tolist(), found.function_b.tolist(), strict=True)
        if a.function_name[i] == b.function_name[j]
    }
    return (set(a.function_name) & set(b.function_name)) - right - {""}


def without_pointers(graph: Graph) -> Graph:
    made = copy.copy(graph)
    made.pointer_address = made.pointer_target = np.zeros(0, np.uint64)
    made.pointer_text = []
    return made


@pytest.mark.parametrize("where", FLAGS)
def test_comparators_are_told_apart_by_their_places(built: Path, where: str) -> None:
    a, b = two_levels(built, f"sorts-{where}", COMPARATORS, *FLAGS[where])
    ours = {name for name in a.function_name if name.startswith(("up_", "down_"))}
    assert len(ours) == 16 and ours <= set(b.function_name)
    assert not ours & wrong(a, b)
    assert len(ours & wrong(without_pointers(a), without_pointers(b))) > 4
    found = diff_graphs(a, b, names=False)
    reasons = {
        a.function_name[i]: Reason(reason)
        for i, reason in zip(found.function_a.tolist(), found.reason.tolist(), strict=True)
    }
    assert Reason.TABLES in {reasons[name] for name in ours}


def test_virtual_functions_are_told_by_the_names_of_types(built: Path) -> None:
    a, b = two_levels(built, "shapes", SHAPES, by="g++")
    virtual = {one for one in b.function_name if "areaEv" in one or "edgesEv" in one}
    assert len(virtual) == 6
    assert not virtual & wrong(a, b)
    labels = tables_of(a).labels
    assert {a.function_name[row] for row in labels.row.tolist()} >= virtual
