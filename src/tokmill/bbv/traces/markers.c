/* Marks every K-th call of some library functions, and writes a time stamp at each mark.

   Loaded before a program (LD_PRELOAD). TOKMILL_EVERY: K. TOKMILL_MARKS: a file that is there, of
   which the first 8 bytes become the number of marks, and the following the time stamps: at the
   beginning, at each mark, at the end. Without that file marks are only passed, so that a profiler
   can cut at them. TOKMILL_FAULTS: 1 writes page faults since the program began in place of time
   stamps. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <x86intrin.h>

static uint64_t every, left, room, marks, *stamps;
static uint64_t calls;
static int faults;

/* Nothing is timed in a run that counts page faults, so its marks can afford to be atomic: calls of
   two threads at once are both counted, and no mark is written over another. */
static void stamp_faults(void) {
    struct rusage used;
    uint64_t *to = stamps;
    if (!to)
        return;
    getrusage(RUSAGE_SELF, &used);
    uint64_t number = __atomic_fetch_add(&marks, 1, __ATOMIC_RELAXED);
    if (number < room)
        to[1 + number] = used.ru_minflt + used.ru_majflt;
    __atomic_fetch_add(to, 1, __ATOMIC_RELAXED);
}

static inline void stamp(void) {
    unsigned processor;
    if (faults) {
        stamp_faults();
        return;
    }
    if (stamps && marks < room)
        stamps[1 + marks] = __rdtscp(&processor);
    marks++;
    if (stamps)
        stamps[0] = marks;
}

__attribute__((noinline, visibility("default"))) void tokmill_marker(void) {
    stamp();
    __asm__ volatile("" ::: "memory");
}

static inline void tick(void) {
    if (faults) {
        if (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) % every == 0)
            tokmill_marker();
    } else if (left && --left == 0) {
        left = every;
        tokmill_marker();
    }
}

static void of_a_child(void) {
    stamps = 0;
    faults = 0;
    left = 0;
}

#ifdef MEMORY
static void *(*next_memcpy)(void *, const void *, size_t);
static int (*next_memcmp)(const void *, const void *, size_t);
static size_t (*next_strlen)(const char *);
#endif

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("TOKMILL_EVERY"), *path = getenv("TOKMILL_MARKS");
    const char *counted = getenv("TOKMILL_FAULTS");
#ifdef MEMORY
    next_memcpy = dlsym(RTLD_NEXT, "memcpy");
    next_memcmp = dlsym(RTLD_NEXT, "memcmp");
    next_strlen = dlsym(RTLD_NEXT, "strlen");
#endif
    if (!text)
        return;
    every = left = strtoull(text, 0, 10);
    pthread_atfork(0, 0, of_a_child);
    if (!path)
        return;
    int file = open(path, O_RDWR);
    struct stat facts;
    if (file < 0 || fstat(file, &facts) || facts.st_size < 64)
        _exit(117);
    stamps = mmap(0, facts.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (stamps == MAP_FAILED)
        _exit(117);
    room = facts.st_size / 8 - 1;
    close(file);
    faults = counted && *counted == '1';
    /* What the program starts is not marked. */
    unsetenv("LD_PRELOAD");
    unsetenv("TOKMILL_EVERY");
    unsetenv("TOKMILL_MARKS");
    unsetenv("TOKMILL_FAULTS");
    stamp();
}

__attribute__((destructor)) static void end(void) {
    if (stamps)
        stamp();
    faults = 0;
    stamps = 0;
    left = 0;
}

/* The C library's own calls of `read` do not pass here, so its functions on files are marked too. */
#define NEXT(name) \
    static __typeof__(&name) next; \
    tick(); \
    if (!next) \
        next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

size_t fread(void *to, size_t size, size_t count, FILE *file) {
    NEXT(fread);
    return next(to, size, count, file);
}

size_t fwrite(const void *from, size_t size, size_t count, FILE *file) {
    NEXT(fwrite);
    return next(from, size, count, file);
}

#undef fread_unlocked
size_t fread_unlocked(void *to, size_t size, size_t count, FILE *file) {
    NEXT(fread_unlocked);
    return next(to, size, count, file);
}

#undef fwrite_unlocked
size_t fwrite_unlocked(const void *from, size_t size, size_t count, FILE *file) {
    NEXT(fwrite_unlocked);
    return next(from, size, count, file);
}

char *fgets(char *to, int size, FILE *file) {
    NEXT(fgets);
    return next(to, size, file);
}

ssize_t getdelim(char **to, size_t *size, int end, FILE *file) {
    NEXT(getdelim);
    return next(to, size, end, file);
}

ssize_t getline(char **to, size_t *size, FILE *file) {
    NEXT(getline);
    return next(to, size, file);
}

ssize_t __read(int, void *, size_t);
ssize_t __write(int, const void *, size_t);
ssize_t read(int file, void *to, size_t size) { tick(); return __read(file, to, size); }
ssize_t write(int file, const void *from, size_t size) { tick(); return __write(file, from, size); }

/* What compilers make of `read` where they know the size of the buffer. */
ssize_t __read_chk(int file, void *to, size_t size, size_t room) {
    if (size > room)
        abort();
    return read(file, to, size);
}

#if defined HEAP || defined MEMORY
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);
void *malloc(size_t size) { tick(); return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { tick(); return __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { tick(); return __libc_realloc(old, size); }
void free(void *old) { tick(); __libc_free(old); }
#endif

#ifdef MEMORY
void *memcpy(void *to, const void *from, size_t size) {
    tick();
    if (next_memcpy)
        return next_memcpy(to, from, size);
    for (size_t i = 0; i < size; i++)
        ((char *)to)[i] = ((const char *)from)[i];
    return to;
}

int memcmp(const void *a, const void *b, size_t size) {
    const unsigned char *x = a, *y = b;
    tick();
    if (next_memcmp)
        return next_memcmp(a, b, size);
    for (; size; size--, x++, y++)
        if (*x != *y)
            return *x - *y;
    return 0;
}

size_t strlen(const char *text) {
    const char *at = text;
    tick();
    if (next_strlen)
        return next_strlen(text);
    while (*at)
        at++;
    return at - text;
}
#endif
