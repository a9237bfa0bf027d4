/* Makes words, counts them, sorts them, and looks for similar pairs: the program that three
   tutorials compile, compare and profile. Equal arguments give equal work.

   cc -O2 words.c -o words && ./words 20000 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    char word[16];
    unsigned count;
};

static struct entry *table;
static size_t capacity = 64, used;
static uint32_t state = 1, crc_table[256];

uint32_t draw(uint32_t limit)
{
    state = state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)state * limit) >> 32);
}

void make_word(char *word)
{
    static const char *const syllables[] = {"ka", "to", "mi", "re", "su", "lon", "ber", "art"};
    unsigned parts = 2 + draw(3);
    word[0] = '\0';
    for (unsigned i = 0; i < parts; i++)
        strcat(word, syllables[draw(8)]);
}

uint32_t hash(const char *word)
{
    uint32_t h = 2166136261u;
    for (; *word; word++)
        h = (h ^ (unsigned char)*word) * 16777619u;
    return h;
}

struct entry *find_or_add(const char *word)
{
    size_t at = hash(word) & (capacity - 1);
    while (table[at].count && strcmp(table[at].word, word))
        at = (at + 1) & (capacity - 1);
    if (!table[at].count) {
        strcpy(table[at].word, word);
        used++;
    }
    return &table[at];
}

void grow(void)
{
    struct entry *old = table;
    size_t before = capacity;
    capacity = old ? 2 * capacity : capacity;
    used = 0;
    table = calloc(capacity, sizeof *table);
    if (!table) {
        fputs("no memory for the table of words\n", stderr);
        exit(1);
    }
    for (size_t i = 0; old && i < before; i++)
        if (old[i].count)
            *find_or_add(old[i].word) = old[i];
    free(old);
}

void count_words(unsigned words)
{
    char word[16];
    for (unsigned i = 0; i < words; i++) {
        if (!table || 4 * used > 3 * capacity)
            grow();
        make_word(word);
        find_or_add(word)->count++;
    }
}

void sift(struct entry *heap, size_t root, size_t end)
{
    for (size_t child; (child = 2 * root + 1) < end; root = child) {
        if (child + 1 < end && heap[child].count < heap[child + 1].count)
            child++;
        if (heap[root].count >= heap[child].count)
            return;
        struct entry other = heap[root];
        heap[root] = heap[child];
        heap[child] = other;
    }
}

void sort_by_count(struct entry *entries, size_t count)
{
    for (size_t i = count / 2; i-- > 0;)
        sift(entries, i, count);
    for (size_t end = count; end > 1;) {
        struct entry largest = entries[0];
        entries[0] = entries[--end];
        entries[end] = largest;
        sift(entries, 0, end);
    }
}

unsigned distance(const char *a, const char *b)
{
    unsigned row[17], columns = (unsigned)strlen(b);
    for (unsigned j = 0; j <= columns; j++)
        row[j] = j;
    for (unsigned i = 1; a[i - 1]; i++) {
        unsigned corner = row[0];
        row[0] = i;
        for (unsigned j = 1; j <= columns; j++) {
            unsigned best = corner + (a[i - 1] != b[j - 1]);
            corner = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[columns];
}

unsigned similar_pairs(const struct entry *entries, size_t count, unsigned limit)
{
    unsigned pairs = 0;
    for (size_t i = 0; i < count; i++)
        for (size_t j = i + 1; j < count; j++)
            if (distance(entries[i].word, entries[j].word) <= limit)
                pairs++;
    return pairs;
}

uint32_t crc(uint32_t value, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    if (!crc_table[1])
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t entry = i;
            for (int bit = 0; bit < 8; bit++)
                entry = entry & 1 ? 0xedb88320u ^ (entry >> 1) : entry >> 1;
            crc_table[i] = entry;
        }
    for (value = ~value; bytes; bytes--)
        value = crc_table[(value ^ *at++) & 255] ^ (value >> 8);
    return ~value;
}

int main(int argc, char **argv)
{
    unsigned words = argc > 1 ? (unsigned)atoi(argv[1]) : 20000;
    unsigned pairs = 0;
    uint32_t sum = 0;
    if (!words) {
        fprintf(stderr, "usage: %s WORDS\n", argv[0]);
        return 2;
    }
    for (int round = 0; round < 3; round++) {
        count_words(words);
        sort_by_count(table, capacity);
        pairs += similar_pairs(table + capacity - 200, 200, 2);
        for (int i = 0; i < 20; i++)
            sum = crc(sum, table, capacity * sizeof *table);
        free(table);
        table = NULL;
        used = 0;
    }
    printf("%u similar pairs, checksum %08x\n", pairs, sum);
    return 0;
}
