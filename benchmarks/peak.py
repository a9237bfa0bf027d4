"""The peak of one core: float32 products and sums a second, measured.

    python benchmarks/peak.py [x86-64-v3]

Independent chains of fused multiply-adds on vectors that stay in registers: no program that reads
memory is faster.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = r"""
#include <stdio.h>
#include <time.h>
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define CHAINS 12
#define TIMES 2000000
typedef float vector __attribute__((vector_size(4 * WIDTH)));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(void) {
  vector sums[CHAINS], factor, added;
  double best = 0;
  for (int j = 0; j < WIDTH; j++) { factor[j] = .999f; added[j] = .001f; }
  for (int i = 0; i < CHAINS; i++) for (int j = 0; j < WIDTH; j++) sums[i][j] = i + .1f * j;
  for (int round = 0; round < 30; round++) {
    vector held[CHAINS]; /* of this round alone, so that it stays in registers */
    for (int i = 0; i < CHAINS; i++) held[i] = sums[i];
    double since = now();
    for (long time = 0; time < TIMES; time++) {
#pragma GCC unroll 12
      for (int i = 0; i < CHAINS; i++) {
        held[i] = held[i] * factor + added;
        __asm__ volatile("" : "+v"(held[i]));
      }
    }
    double rate = 2.0 * TIMES * CHAINS * WIDTH / (now() - since);
    if (rate > best) best = rate;
    for (int i = 0; i < CHAINS; i++) sums[i] = held[i];
  }
  float total = 0;
  for (int i = 0; i < CHAINS; i++) for (int j = 0; j < WIDTH; j++) total += sums[i][j];
  printf("%.9g %g\n", best, total);
  return 0;
}
"""


def peak(march: str = "native") -> float:
    """Return floating-point operations a second, of code for a processor (`-march`)."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "peak.c"), Path(folder, "peak")
        source.write_text(PROGRAM)
        options = ["-O3", f"-march={march}", "-mprefer-vector-width=512", "-ffp-contract=fast"]
        subprocess.run(["gcc", *options, str(source), "-o", str(program)], check=True)
        done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[0])


def main(march: str = "native") -> None:
    """Print the peak."""
    print(f"{peak(march) / 1e9:.1f} GFLOP/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
