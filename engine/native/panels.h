// Matrix products of few rows by a bf16 matrix that is laid out in panels.
#pragma once
#include "vectors.h"

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

// bf16 w [n, k] to panels; n a multiple of 16, k even. out may be w.
void lastbatch_pack(const uint16_t *w, int32_t n, int32_t k, uint16_t *out) {
#pragma omp parallel
    {
        uint16_t *panel = malloc((size_t)k * 16 * sizeof(uint16_t));
        if (!panel) no_memory();
#pragma omp for schedule(static)
        for (int j = 0; j < n; j += 16) {
            for (int r = 0; r < 16; r++)
                for (int c = 0; c < k; c++) panel[(size_t)(c / 2) * 32 + 2 * r + c % 2] = w[(size_t)(j + r) * k + c];
            memcpy(out + (size_t)j * k, panel, (size_t)k * 16 * sizeof(uint16_t));
        }
        free(panel);
    }
}
