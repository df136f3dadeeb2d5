// A decoder's layers on a CPU: norms, rotary embedding, paged attention and matrix products for few rows.
//
// Compiled for the best instruction set of the machine (build.py); without AVX-512 the same code runs on what there is.
// Everything is computed in f32; memory holds f32 or bf16 (kernels_typed.h is included once for each). A token's norms
// and attention are the same to the bit whatever shares the step; matrix products may round otherwise in larger steps.
#include <omp.h>

#include "panels.h"
#include "vectors.h"

#define KEYS 64       // positions in a block of keys
#define QUERIES 96    // query vectors that share a block of keys
#define FEW 16        // up to this many query vectors, keys are not transposed
#define AHEAD 32      // positions that are fetched before they are needed

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

// Whether lastbatch_pack and panels can be used at all.
int32_t lastbatch_has_panels(void) {
#ifdef PANELS
    return 1;
#else
    return 0;
#endif
}


#define IS_BF16
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
