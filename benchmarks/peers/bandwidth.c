/* Read bandwidth: each thread, bound to a core, sums its part of one buffer on huge pages; the best pass counts.
   bandwidth THREADS MEGABYTES PASSES prints bytes each second. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct {
    int core;
    size_t words;
    const uint64_t *begin;
    uint64_t sum;
} Part;

static pthread_barrier_t gate;
static int passes;

static double now(void) {
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return (double)moment.tv_sec + 1e-9 * (double)moment.tv_nsec;
}

static void bind_to(int place) {
    cpu_set_t allowed, one;
    sched_getaffinity(0, sizeof allowed, &allowed);
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed) && place-- == 0) CPU_SET(core, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

static void *read_part(void *given) {
    Part *part = given;
    bind_to(part->core);
    for (int pass = 0; pass < passes; pass++) {
        pthread_barrier_wait(&gate);
        uint64_t sum = 0;
        for (size_t i = 0; i < part->words; i++) sum += part->begin[i];
        part->sum += sum; /* kept, so that the loop is */
        pthread_barrier_wait(&gate);
    }
    return NULL;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    int threads = atoi(words[1]);
    size_t bytes = (size_t)atoi(words[2]) << 20;
    passes = atoi(words[3]);
    size_t huge = (size_t)2 << 20;
    char *raw = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return 3;
    char *buffer = raw + (huge - (uintptr_t)raw % huge) % huge;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    memset(buffer, 1, bytes);
    pthread_barrier_init(&gate, NULL, (unsigned)threads + 1);
    pthread_t *running = calloc((size_t)threads, sizeof *running);
    Part *parts = calloc((size_t)threads, sizeof *parts);
    size_t share = bytes / sizeof(uint64_t) / (size_t)threads;
    for (int place = 0; place < threads; place++) {
        parts[place] = (Part){place, share, (const uint64_t *)buffer + share * (size_t)place, 0};
        pthread_create(&running[place], NULL, read_part, &parts[place]);
    }
    double best = 1e30;
    for (int pass = 0; pass < passes; pass++) {
        pthread_barrier_wait(&gate);
        double begin = now();
        pthread_barrier_wait(&gate);
        double seconds = now() - begin;
        if (seconds < best) best = seconds;
    }
    uint64_t sum = 0;
    for (int place = 0; place < threads; place++) {
        pthread_join(running[place], NULL);
        sum += parts[place].sum;
    }
    printf("%.0f\n", (double)(share * (size_t)threads * sizeof(uint64_t)) / best);
    return sum == 0;
}
