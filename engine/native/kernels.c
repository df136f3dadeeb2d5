// A decoder's layers on a CPU: norms, rotary embedding, paged attention and matrix products for few rows.
//
// Compiled for the best instruction set of the machine (build.py); without AVX-512 the same code runs on what there is.
// Everything is computed in f32; memory holds f32 or bf16 (kernels_typed.h is included once for each). The result of a
// token does not depend on which other tokens share the step.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

#define LANES 16
#define KEYS 64       // positions in a block of keys
#define QUERIES 96    // query vectors that share a block of keys
#define FEW 16        // up to this many query vectors, keys are not transposed
#define AHEAD 32      // positions that are fetched before they are needed
#define INLINE static inline __attribute__((always_inline))

typedef struct {  // mirrored by engine/native/kernels.py, as are model_t and step_t
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    int64_t window;
} layer_t;

typedef struct {
    const layer_t *layers;
    const float *rope;  // [context, head_dim]: cosines, then sines
    int32_t hidden, heads, kv_heads, head_dim, inner, is_bf16, panels, unused;
    float eps, scale;
} model_t;

typedef struct {
    int32_t tokens, rows, table_width, page_size;
    const int64_t *positions, *slots;
    const int32_t *tables, *starts, *kv_lens;
    char *keys, *values;  // of layer 0
    int64_t layer_bytes;
    void *hidden, *delta, *normed, *qkv, *attended, *gate_up, *act;
    int32_t has_delta, unused;
} step_t;

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

// Scratch of a thread, kept for its life and grown when needed.
static float *scratch(size_t floats) {
    static __thread float *block;
    static __thread size_t held;
    if (held < floats) {
        free(block);
        block = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        if (!block) abort();
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

#define T float
#define NAME(x) x##_f32
#define WIDEN(x) (x)
#define NARROW(x) (x)
INLINE v16 load_f32(const float *p) {
    v16 x;
    memcpy(&x, p, 64);
    return x;
}
#include "kernels_typed.h"
#undef T
#undef NAME
#undef WIDEN
#undef NARROW

#if defined(__AVX512BF16__)
// Matrices in panels: 16 rows of w side by side, pairs of columns together, w[n, k] -> [n / 16][k / 2][16][2]. A row of x
// then meets a panel without sums across lanes, and the panel is read from memory as one stream.
#define PANELS

// panel_tile_RxP: R rows of x by P panels, with C sums for each output that are added last. Sizes are literal, so that
// all sums stay in registers.
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++)
#define PAIR(R, P, c)                                                                                           \
    {                                                                                                           \
        __m512bh wide[P];                                                                                       \
        EACH(p, P) wide[p] = (__m512bh)_mm512_loadu_si512(w + p * panel + (size_t)(at + c) * 32);               \
        EACH(r, R) {                                                                                            \
            int32_t both;                                                                                       \
            memcpy(&both, x + (size_t)r * k + 2 * (at + c), 4);                                                 \
            __m512bh same = (__m512bh)_mm512_set1_epi32(both);                                                  \
            EACH(p, P) acc[r][p][c] = _mm512_dpbf16_ps(acc[r][p][c], wide[p], same);                            \
        }                                                                                                       \
    }
#define PANEL_TILE(R, P, C)                                                                                     \
    static void panel_tile_##R##x##P(const uint16_t *x, int k, const uint16_t *w, __m512(*out)[2]) {            \
        __m512 acc[R][P][C];                                                                                    \
        int pairs = k / 2, at = 0;                                                                              \
        size_t panel = (size_t)k * 16;                                                                          \
        EACH(r, R) EACH(p, P) EACH(c, C) acc[r][p][c] = _mm512_setzero_ps();                                    \
        for (; at + C <= pairs; at += C) EACH(c, C) PAIR(R, P, c)                                               \
        for (; at < pairs; at++) PAIR(R, P, 0)                                                                  \
        EACH(r, R) EACH(p, P) {                                                                                 \
            __m512 sum = acc[r][p][0];                                                                          \
            _Pragma("GCC unroll 8") for (int c = 1; c < C; c++) sum = _mm512_add_ps(sum, acc[r][p][c]);         \
            out[r][p] = sum;                                                                                    \
        }                                                                                                       \
    }
PANEL_TILE(1, 1, 4)
PANEL_TILE(1, 2, 4)
PANEL_TILE(2, 2, 4)
PANEL_TILE(4, 2, 2)
PANEL_TILE(8, 2, 1)

static void linear_panels(const uint16_t *x, int rows, int k, const uint16_t *w, int n, const uint16_t *bias, uint16_t *out, float *wide) {
#pragma omp for schedule(static)
    for (int j = 0; j < n; j += 32) {
        const uint16_t *panel = w + (size_t)j * k;
        int panels = n - j >= 32 ? 2 : 1;
        for (int i = 0; i < rows;) {
            __m512 found[8][2];
            const uint16_t *from = x + (size_t)i * k;
            int left = rows - i, taken;
            if (panels == 1) {
                panel_tile_1x1(from, k, panel, found);
                taken = 1;
            } else if (left >= 8) {
                panel_tile_8x2(from, k, panel, found);
                taken = 8;
            } else if (left >= 4) {
                panel_tile_4x2(from, k, panel, found);
                taken = 4;
            } else if (left >= 2) {
                panel_tile_2x2(from, k, panel, found);
                taken = 2;
            } else {
                panel_tile_1x2(from, k, panel, found);
                taken = 1;
            }
            for (int r = 0; r < taken; r++)
                for (int p = 0; p < panels; p++) {
                    size_t at = (size_t)(i + r) * n + j + 16 * p;
                    __m512 value = found[r][p];
                    if (bias) {
                        __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(bias + j + 16 * p)));
                        value = _mm512_add_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
                    }
                    if (wide)
                        _mm512_storeu_ps(wide + at, value);
                    else
                        _mm256_storeu_si256((__m256i *)(out + at), (__m256i)_mm512_cvtneps_pbh(value));
                }
            i += taken;
        }
    }
}
#endif

// Whether lastbatch_pack and panels can be used at all.
int32_t lastbatch_has_panels(void) {
#ifdef PANELS
    return 1;
#else
    return 0;
#endif
}

// bf16 w [n, k] to panels; n a multiple of 16, k even. out may be w.
void lastbatch_pack(const uint16_t *w, int32_t n, int32_t k, uint16_t *out) {
#pragma omp parallel
    {
        uint16_t *panel = malloc((size_t)k * 16 * sizeof(uint16_t));
        if (!panel) abort();
#pragma omp for schedule(static)
        for (int j = 0; j < n; j += 16) {
            for (int r = 0; r < 16; r++)
                for (int c = 0; c < k; c++) panel[(size_t)(c / 2) * 32 + 2 * r + c % 2] = w[(size_t)(j + r) * k + c];
            memcpy(out + (size_t)j * k, panel, (size_t)k * 16 * sizeof(uint16_t));
        }
        free(panel);
    }
}

#define T uint16_t
#define NAME(x) x##_bf16
#define WIDEN(x) widen(x)
#define NARROW(x) narrow(x)
INLINE v16 load_bf16(const uint16_t *p) {
    h16 x;
    memcpy(&x, p, 32);
    return (v16)(__builtin_convertvector(x, u16x32) << 16);
}
#include "kernels_typed.h"

// Layers first..last-1, for few tokens.
void lastbatch_layers(const model_t *m, step_t *s, int32_t first, int32_t last) {
#pragma omp parallel
    for (int l = first; l < last; l++) {
        if (m->is_bf16) {
            attention_half_bf16(m, s, l, s->has_delta || l > first);
            mlp_half_bf16(m, s, l);
        } else {
            attention_half_f32(m, s, l, s->has_delta || l > first);
            mlp_half_f32(m, s, l);
        }
    }
}

void lastbatch_attention_half(const model_t *m, step_t *s, int32_t layer) {
#pragma omp parallel
    if (m->is_bf16)
        attention_half_bf16(m, s, layer, s->has_delta);
    else
        attention_half_f32(m, s, layer, s->has_delta);
}

void lastbatch_mlp_half(const model_t *m, step_t *s, int32_t layer) {
#pragma omp parallel
    if (m->is_bf16)
        mlp_half_bf16(m, s, layer);
    else
        mlp_half_f32(m, s, layer);
}

// hidden += delta (if there is one); normed = norm(hidden) * weight. For any number of tokens, as are the next two.
void lastbatch_norm(const model_t *m, step_t *s, const void *weight) {
#pragma omp parallel
    if (m->is_bf16)
        norm_bf16(m, s, weight, s->has_delta);
    else
        norm_f32(m, s, weight, s->has_delta);
}

// From qkv to attended: norms of heads, rotary embedding, store, attention.
void lastbatch_attention(const model_t *m, step_t *s, int32_t layer) {
#pragma omp parallel
    if (m->is_bf16) {
        place_bf16(m, s, layer);
        attend_bf16(m, s, layer);
    } else {
        place_f32(m, s, layer);
        attend_f32(m, s, layer);
    }
}

// From gate_up to act.
void lastbatch_silu_mul(const model_t *m, step_t *s) {
#pragma omp parallel
    if (m->is_bf16)
        silu_mul_bf16(m, s);
    else
        silu_mul_f32(m, s);
}

// out f32 [rows, n] = x [rows, k] times the transpose of w [n, k], for few rows.
void lastbatch_head(const model_t *m, int32_t panels, const void *x, int32_t rows, int32_t k, const void *w, int32_t n, float *out) {
#pragma omp parallel
    if (m->is_bf16)
        linear_bf16(panels, x, rows, k, w, n, NULL, NULL, out);
    else
        linear_f32(0, x, rows, k, w, n, NULL, NULL, out);
}
