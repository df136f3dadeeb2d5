// Vectors of 16 floats, in GCC's own vector types, so that the same code runs with any instruction set; and the
// conversions, sums and small products that the kernels are made of.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

INLINE v16 splat(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE i16 splat_int(int32_t x) { return (i16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE float add_up(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

INLINE v16 choose(i16 mask, v16 yes, v16 no) { return (v16)(((i16)yes & mask) | ((i16)no & ~mask)); }

INLINE v16 larger(v16 a, v16 b) { return choose(a > b, a, b); }

INLINE float largest(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// e^x to 2 units in the last place for x <= 0; below -87 it is 0.
INLINE v16 exponential(v16 x) {
    i16 dead = x < splat(-87.0f);
    v16 n = x * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
    i16 whole = (i16)n - (i16)splat(12582912.0f);
    n -= splat(12582912.0f);
    v16 r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    v16 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    i16 scaled = (i16)p + (whole << 23);
    return (v16)(scaled & ~dead);
}

INLINE float widen(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE uint16_t narrow(float f) {  // to nearest even; a NaN stays one
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static void no_memory(void) {
    fprintf(stderr, "lastbatch: no memory for the scratch of a kernel\n");
    abort();
}

// Scratch of a thread, kept for its life and grown when needed.
static float *scratch(size_t floats) {
    static __thread float *block;
    static __thread size_t held;
    if (held < floats) {
        free(block);
        block = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        if (!block) no_memory();
        held = floats;
    }
    return block;
}

INLINE v16 swap(v16 a, v16 b, i16 from) { return __builtin_shuffle(a, b, from); }

// The sums of the lanes of 16 vectors, as one vector.
INLINE v16 add_up_16(v16 *x) {
    const i16 low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const i16 low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const i16 low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const i16 low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    const i16 eight = splat_int(8), four = splat_int(4), two = splat_int(2), one = splat_int(1);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = swap(x[i], x[i + 8], low8) + swap(x[i], x[i + 8], low8 + eight);
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) x[i] = swap(x[i], x[i + 4], low4) + swap(x[i], x[i + 4], low4 + four);
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++) x[i] = swap(x[i], x[i + 2], low2) + swap(x[i], x[i + 2], low2 + two);
    return swap(x[0], x[1], low1) + swap(x[0], x[1], low1 + one);
}

// The dot products of q with 16 rows of `size` floats each, a multiple of 16.
INLINE v16 dots(const float *q, const float *rows, int size) {
    v16 sums[LANES];
    v16 first = *(const v16 *)q;
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) sums[j] = first * *(const v16 *)(rows + (size_t)j * size);
    for (int c = LANES; c < size; c += LANES) {
        v16 part = *(const v16 *)(q + c);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) sums[j] += part * *(const v16 *)(rows + (size_t)j * size + c);
    }
    return add_up_16(sums);
}

// acc[q][0..63] += a[q][0..count-1] times b[0..count-1][0..63], for a constant number of rows q.
INLINE void multiply(const int rows, const float *a, int a_stride, const float *b, int b_stride, int count, v16 (*acc)[4]) {
    for (int k = 0; k < count; k++) {
        const float *row = b + (size_t)k * b_stride;
        v16 b0 = *(const v16 *)row, b1 = *(const v16 *)(row + 16), b2 = *(const v16 *)(row + 32), b3 = *(const v16 *)(row + 48);
#pragma GCC unroll 6
        for (int q = 0; q < rows; q++) {
            v16 s = splat(a[(size_t)q * a_stride + k]);
            acc[q][0] += s * b0;
            acc[q][1] += s * b1;
            acc[q][2] += s * b2;
            acc[q][3] += s * b3;
        }
    }
}

// c[q][0..63] = (c, if add) + a[q] times b, for any number of rows.
static void product(int rows, const float *a, int a_stride, const float *b, int b_stride, int count, float *c, int c_stride, int add) {
    int q = 0;
#define ROWS(n)                                                                                                    \
    for (; q + n <= rows; q += n) {                                                                                \
        v16 acc[n][4];                                                                                             \
        for (int i = 0; i < n; i++)                                                                                \
            for (int j = 0; j < 4; j++) acc[i][j] = add ? *(v16 *)(c + (size_t)(q + i) * c_stride + 16 * j) : splat(0); \
        multiply(n, a + (size_t)q * a_stride, a_stride, b, b_stride, count, acc);                                  \
        for (int i = 0; i < n; i++)                                                                                \
            for (int j = 0; j < 4; j++) *(v16 *)(c + (size_t)(q + i) * c_stride + 16 * j) = acc[i][j];             \
    }
    ROWS(6)
    ROWS(3)
    ROWS(2)
    ROWS(1)
#undef ROWS
}
