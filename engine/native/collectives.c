// All-reduce, all-gather and broadcast among the ranks of one host, over a shared block of memory.
//
// Ranks meet in numbered steps. In a step each rank copies its bytes into its slot, publishes a signature (kind, type
// and size) with the step's number, and waits until every other rank has published the same. A rank whose signature
// differs is waited for without end, and so is one that never comes: nobody proceeds, as with NCCL. Waiters sleep on
// one futex, the bell, which every rank rings when it publishes.
//
// Slots are double: step s uses half s % 2. A rank overwrites a half two steps later, and to get there every rank must
// have published the step between, so it has finished reading. A rank seen one step ahead has therefore matched.
//
// The same layout is written by engine/parallel/futex.py, and ranks of both kinds may share a block.
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <linux/futex.h>
#include <sys/syscall.h>

#define MAX_RANKS 63
#define HEADER_BYTES 4096

typedef struct {
    _Atomic uint64_t step;
    _Atomic uint64_t signature;
    uint64_t unused[6];
} line_t;

typedef struct {
    _Atomic uint32_t bell;
    uint32_t unused[15];
    line_t line[MAX_RANKS];
} header_t;

_Static_assert(sizeof(header_t) == HEADER_BYTES, "the Python side writes the same layout");

typedef struct {  // mirrored by engine/native/collectives.py
    char *base;
    int64_t slot_bytes;
    int32_t rank, ranks, spin, unused;
    uint64_t step;
} meeting_t;

static char *slot(const meeting_t *m, int rank, uint64_t step) {
    return m->base + HEADER_BYTES + ((int64_t)rank * 2 + (int64_t)(step & 1)) * m->slot_bytes;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void meet(meeting_t *m, uint64_t signature) {
    header_t *h = (header_t *)m->base;
    uint64_t step = m->step;
    atomic_store_explicit(&h->line[m->rank].signature, signature, memory_order_relaxed);
    atomic_store_explicit(&h->line[m->rank].step, step, memory_order_release);
    atomic_fetch_add(&h->bell, 1);
    syscall(SYS_futex, &h->bell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
    for (int r = 0; r < m->ranks; r++) {
        if (r == m->rank) continue;
        for (int turn = 0;; turn++) {
            uint32_t bell = atomic_load(&h->bell);
            uint64_t there = atomic_load_explicit(&h->line[r].step, memory_order_acquire);
            if (there == step + 1) break;
            if (there == step && atomic_load_explicit(&h->line[r].signature, memory_order_acquire) == signature) break;
            if (turn < m->spin) {
                relax();
                continue;
            }
            struct timespec second = {1, 0};  // a lost wake costs a second, never a hang
            syscall(SYS_futex, &h->bell, FUTEX_WAIT, bell, &second, NULL, 0);
        }
    }
}

static inline float widen(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t narrow(float f) {  // to nearest even; a NaN stays one
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#define BLOCK 1024

// Sums in the order of ranks, on every rank alike: results are the same to the bit. bf16 is summed in f32.
static void sum(const meeting_t *m, char *out, int64_t bytes, int is_bf16) {
    float total[BLOCK];
    int64_t count = bytes / (is_bf16 ? 2 : 4);
    for (int64_t at = 0; at < count; at += BLOCK) {
        int64_t n = count - at < BLOCK ? count - at : BLOCK;
        for (int r = 0; r < m->ranks; r++) {
            const char *from = slot(m, r, m->step);
            if (is_bf16) {
                const uint16_t *x = (const uint16_t *)from + at;
                if (r == 0)
                    for (int64_t i = 0; i < n; i++) total[i] = widen(x[i]);
                else
                    for (int64_t i = 0; i < n; i++) total[i] += widen(x[i]);
            } else {
                const float *x = (const float *)from + at;
                if (r == 0)
                    memcpy(total, x, (size_t)n * 4);
                else
                    for (int64_t i = 0; i < n; i++) total[i] += x[i];
            }
        }
        if (is_bf16)
            for (int64_t i = 0; i < n; i++) ((uint16_t *)out)[at + i] = narrow(total[i]);
        else
            memcpy((float *)out + at, total, (size_t)n * 4);
    }
}

void lastbatch_all_reduce(meeting_t *m, uint64_t signature, char *x, int64_t bytes, int32_t is_bf16) {
    for (int64_t at = 0; at < bytes; at += m->slot_bytes) {
        int64_t n = bytes - at < m->slot_bytes ? bytes - at : m->slot_bytes;
        m->step++;
        memcpy(slot(m, m->rank, m->step), x + at, (size_t)n);
        meet(m, signature);
        sum(m, x + at, n, is_bf16);
    }
}

// out is [ranks, bytes].
void lastbatch_all_gather(meeting_t *m, uint64_t signature, const char *x, char *out, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += m->slot_bytes) {
        int64_t n = bytes - at < m->slot_bytes ? bytes - at : m->slot_bytes;
        m->step++;
        memcpy(slot(m, m->rank, m->step), x + at, (size_t)n);
        meet(m, signature);
        for (int r = 0; r < m->ranks; r++) memcpy(out + r * bytes + at, slot(m, r, m->step), (size_t)n);
    }
}

// From rank 0 of the host to the others.
void lastbatch_broadcast(meeting_t *m, uint64_t signature, char *x, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += m->slot_bytes) {
        int64_t n = bytes - at < m->slot_bytes ? bytes - at : m->slot_bytes;
        m->step++;
        if (m->rank == 0) memcpy(slot(m, 0, m->step), x + at, (size_t)n);
        meet(m, signature);
        if (m->rank != 0) memcpy(x + at, slot(m, 0, m->step), (size_t)n);
    }
}
