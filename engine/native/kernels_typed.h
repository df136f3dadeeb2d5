// Included by kernels.c for each type of memory: T, NAME(x), WIDEN(x), NARROW(x).
//
// Functions that hold an "omp for" are called by all threads of a team, and end in its barrier.

// One output from one row of w: the tail of linear, and all of it without AVX-512 BF16.
INLINE float NAME(dot)(const T *a, const T *b, int k) {
    v16 even = splat(0), odd = splat(0);
    int i = 0;
    for (; i + 32 <= k; i += 32) {
        even += NAME(load)(a + i) * NAME(load)(b + i);
        odd += NAME(load)(a + i + 16) * NAME(load)(b + i + 16);
    }
    float total = add_up(even + odd);
    for (; i < k; i++) total += WIDEN(a[i]) * WIDEN(b[i]);
    return total;
}

// [rows, k] times the transpose of w [n, k]: to out, or to wide in f32.
static void NAME(linear_rows)(const T *x, int rows, int k, const T *w, int n, const T *bias, T *out, float *wide) {
#pragma omp for schedule(static)
    for (int j = 0; j < n; j++)
        for (int i = 0; i < rows; i++) {
            float value = NAME(dot)(x + (size_t)i * k, w + (size_t)j * k, k) + (bias ? WIDEN(bias[j]) : 0);
            if (wide)
                wide[(size_t)i * n + j] = value;
            else
                out[(size_t)i * n + j] = NARROW(value);
        }
}

static void NAME(linear)(int panels, const T *x, int rows, int k, const T *w, int n, const T *bias, T *out, float *wide) {
#if defined(PANELS) && defined(IS_BF16)
    if (panels) {
        linear_panels(x, rows, k, w, n, bias, out, wide);
        return;
    }
#endif
    NAME(linear_rows)(x, rows, k, w, n, bias, out, wide);
}

// x = x / sqrt(mean(x^2) + eps) * weight
INLINE void NAME(normalise)(const T *x, const T *weight, T *out, int n, float eps) {
    v16 squares = splat(0);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        v16 v = NAME(load)(x + i);
        squares += v * v;
    }
    float total = add_up(squares);
    for (; i < n; i++) total += WIDEN(x[i]) * WIDEN(x[i]);
    float factor = 1.0f / sqrtf(total / n + eps);
#pragma omp simd
    for (int c = 0; c < n; c++) out[c] = NARROW(WIDEN(NARROW(WIDEN(x[c]) * factor)) * WIDEN(weight[c]));
}

static void NAME(norm)(const model_t *m, step_t *s, const void *weight, int has_delta) {
    int n = m->hidden;
#pragma omp for schedule(static)
    for (int t = 0; t < s->tokens; t++) {
        T *row = (T *)s->hidden + (size_t)t * n;
        const T *delta = (const T *)s->delta + (size_t)t * n;
        if (has_delta)
#pragma omp simd
            for (int c = 0; c < n; c++) row[c] = NARROW(WIDEN(row[c]) + WIDEN(delta[c]));
        NAME(normalise)(row, weight, (T *)s->normed + (size_t)t * n, n, m->eps);
    }
}

INLINE void NAME(turn)(T *x, const float *table, int size) {
    int half = size / 2;
#pragma omp simd
    for (int c = 0; c < half; c++) {
        float a = WIDEN(x[c]), b = WIDEN(x[c + half]);
        x[c] = NARROW(a * table[c] - b * table[c + half]);
        x[c + half] = NARROW(b * table[c] + a * table[c + half]);
    }
}

// Norm and turn the queries in place, the keys too; put keys and values where the slots say.
static void NAME(place)(const model_t *m, step_t *s, int layer) {
    const layer_t *w = &m->layers[layer];
    int size = m->head_dim, width = (m->heads + 2 * m->kv_heads) * size, kv_width = m->kv_heads * size;
    T *keys = (T *)(s->keys + layer * s->layer_bytes), *values = (T *)(s->values + layer * s->layer_bytes);
#pragma omp for schedule(static)
    for (int t = 0; t < s->tokens; t++) {
        T *row = (T *)s->qkv + (size_t)t * width;
        const float *table = m->rope + (size_t)s->positions[t] * size;
        for (int h = 0; h < m->heads + m->kv_heads; h++) {
            T *x = row + (size_t)h * size;
            const T *norm = h < m->heads ? w->q_norm : w->k_norm;
            if (norm) NAME(normalise)(x, norm, x, size, m->eps);
            NAME(turn)(x, table, size);
        }
        memcpy(keys + (size_t)s->slots[t] * kv_width, row + (size_t)m->heads * size, (size_t)kv_width * sizeof(T));
        memcpy(values + (size_t)s->slots[t] * kv_width, row + (size_t)(m->heads + m->kv_heads) * size, (size_t)kv_width * sizeof(T));
    }
}

INLINE void NAME(widen_row)(const T *from, float *to, int size, int padded) {
    int c = 0;
    for (; c + LANES <= size; c += LANES) *(v16 *)(to + c) = NAME(load)(from + c);
    for (; c < size; c++) to[c] = WIDEN(from[c]);
    for (; c < padded; c++) to[c] = 0;
}

// One piece of attention: `count` query tokens of a row from token `first` on, for the query heads of one key/value head.
// A query vector is numbered token * group + head of the group.
INLINE void NAME(attend_piece)(
    const model_t *m, const step_t *s, const int size, int layer, int row, int kv_head, int head, int group, int first, int count) {
    const int padded = (size + 63) / 64 * 64;
    int vectors = count * group;
    int width = (m->heads + 2 * m->kv_heads) * size;
    int64_t kv_width = (int64_t)m->kv_heads * size;
    int window = (int)m->layers[layer].window;
    int position = s->kv_lens[row] - (s->starts[row + 1] - s->starts[row]) + (first - s->starts[row]);  // of the first query
    const T *keys = (const T *)(s->keys + layer * s->layer_bytes) + (int64_t)kv_head * size;
    const T *values = (const T *)(s->values + layer * s->layer_bytes) + (int64_t)kv_head * size;
    const int32_t *table = s->tables + (size_t)row * s->table_width;

    float *q = scratch((size_t)QUERIES * (2 * padded + KEYS + 2) + 2 * (size_t)KEYS * padded);
    float *out = q + (size_t)QUERIES * padded, *scores = out + (size_t)QUERIES * padded;
    float *k_block = scores + QUERIES * KEYS, *v_block = k_block + (size_t)KEYS * padded;
    float *most = v_block + (size_t)KEYS * padded, *total = most + QUERIES;

    for (int v = 0; v < vectors; v++) {
        const T *from = (const T *)s->qkv + (size_t)(first + v / group) * width + (size_t)(head + v % group) * size;
        for (int c = 0; c < size; c++) q[(size_t)v * padded + c] = WIDEN(from[c]) * m->scale;
        for (int c = size; c < padded; c++) q[(size_t)v * padded + c] = 0;
        memset(out + (size_t)v * padded, 0, (size_t)padded * sizeof(float));
        most[v] = -INFINITY;
        total[v] = 0;
    }
    int few = (s->starts[row + 1] - s->starts[row]) * (m->heads / m->kv_heads) <= FEW;  // whatever shares the step
    int begin = window && position - window + 1 > 0 ? (position - window + 1) / KEYS * KEYS : 0;
    for (int block = begin; block < position + count; block += KEYS) {
        int length = position + count - block < KEYS ? position + count - block : KEYS;
        int page = block / s->page_size, offset = block % s->page_size;
        int next_page = (block + AHEAD) / s->page_size, next_offset = (block + AHEAD) % s->page_size;
        for (int j = 0; j < length; j++) {
            if (few && block + j + AHEAD < position + count) {  // a strided walk, which the hardware does not foresee
                int64_t at = ((int64_t)table[next_page] * s->page_size + next_offset) * kv_width;
                if (++next_offset == s->page_size) next_offset = 0, next_page++;
                for (int c = 0; c < size; c += 64 / (int)sizeof(T)) __builtin_prefetch(keys + at + c), __builtin_prefetch(values + at + c);
            }
            int64_t at = ((int64_t)table[page] * s->page_size + offset) * kv_width;
            if (++offset == s->page_size) offset = 0, page++;
            NAME(widen_row)(values + at, v_block + (size_t)j * padded, size, padded);
            if (few)
                NAME(widen_row)(keys + at, k_block + (size_t)j * padded, size, padded);
            else
                for (int c = 0; c < size; c++) k_block[(size_t)c * KEYS + j] = WIDEN(keys[at + c]);
        }
        if (few) {
            for (int v = 0; v < vectors; v++)
                for (int j = 0; j < length; j += LANES) *(v16 *)(scores + v * KEYS + j) = dots(q + (size_t)v * padded, k_block + (size_t)j * padded, padded);
        } else {
            if (length < KEYS)
                for (int c = 0; c < size; c++) memset(k_block + (size_t)c * KEYS + length, 0, (size_t)(KEYS - length) * sizeof(float));
            product(vectors, q, padded, k_block, KEYS, size, scores, KEYS, 0);
        }
        for (int v = 0; v < vectors; v++) {
            float *row_scores = scores + v * KEYS;
            int last = position + v / group, oldest = window ? last - window + 1 : 0;
            if (length < KEYS || block + KEYS - 1 > last || block < oldest)
                for (int j = 0; j < KEYS; j++)
                    if (block + j > last || block + j < oldest || j >= length) row_scores[j] = -INFINITY;
            v16 *s16 = (v16 *)row_scores;
            v16 top = larger(larger(s16[0], s16[1]), larger(s16[2], s16[3]));
            float high = largest(top);
            if (most[v] > high) high = most[v];
            if (high == -INFINITY) {  // all of this block is hidden from this query
                memset(row_scores, 0, KEYS * sizeof(float));
                continue;
            }
            v16 sum = splat(0);
            for (int i = 0; i < 4; i++) {
                s16[i] = exponential(s16[i] - splat(high));
                sum += s16[i];
            }
            float keep = most[v] == -INFINITY ? 0 : expf(most[v] - high);
            total[v] = total[v] * keep + add_up(sum);
            most[v] = high;
            if (keep != 1)
                for (int c = 0; c < padded; c += LANES) *(v16 *)(out + (size_t)v * padded + c) *= splat(keep);
        }
        for (int c = 0; c < padded; c += 64) product(vectors, scores, KEYS, v_block + c, padded, length, out + c, padded, 1);
    }
    for (int v = 0; v < vectors; v++) {
        T *to = (T *)s->attended + ((size_t)(first + v / group) * m->heads + head + v % group) * size;
        for (int c = 0; c < size; c++) to[c] = NARROW(out[(size_t)v * padded + c] / total[v]);
    }
}

// Paged attention of all rows. The work is cut into pieces of at most QUERIES query vectors of one row and key/value
// head; where that gives too few pieces for the team, a piece is one query head.
static void NAME(attend)(const model_t *m, step_t *s, int layer) {
    int group = m->heads / m->kv_heads;
    if (group > QUERIES || s->tokens * m->kv_heads < omp_get_num_threads()) group = 1;
    int chunk = QUERIES / group, parts = m->heads / group;
    int pieces = 0;
    for (int r = 0; r < s->rows; r++) pieces += (s->starts[r + 1] - s->starts[r] + chunk - 1) / chunk;
#pragma omp for schedule(dynamic, 1)
    for (int item = 0; item < pieces * parts; item++) {
        int part = item % parts, piece = item / parts, r = 0;
        for (;; r++) {
            int here = (s->starts[r + 1] - s->starts[r] + chunk - 1) / chunk;
            if (piece < here) break;
            piece -= here;
        }
        int first = s->starts[r] + piece * chunk, count = s->starts[r + 1] - first;
        int head = part * group, kv_head = head * m->kv_heads / m->heads;
        if (count > chunk) count = chunk;
        if (m->head_dim == 64)
            NAME(attend_piece)(m, s, 64, layer, r, kv_head, head, group, first, count);
        else if (m->head_dim == 128)
            NAME(attend_piece)(m, s, 128, layer, r, kv_head, head, group, first, count);
        else
            NAME(attend_piece)(m, s, m->head_dim, layer, r, kv_head, head, group, first, count);
    }
}

static void NAME(silu_mul)(const model_t *m, step_t *s) {
    int n = m->inner;
#pragma omp for schedule(static) collapse(2)
    for (int t = 0; t < s->tokens; t++)
        for (int half = 0; half < 2; half++) {
            const T *gate = (const T *)s->gate_up + (size_t)t * 2 * n, *up = gate + n;
            T *out = (T *)s->act + (size_t)t * n;
            int c = half ? n / 2 : 0, end = half ? n : n / 2;
            for (; c + LANES <= end; c += LANES) {
                v16 g = NAME(load)(gate + c), u = NAME(load)(up + c);
                v16 e = exponential(choose(g < splat(0), g, -g));  // e^-|g|
                v16 sigmoid = choose(g < splat(0), e, splat(1)) / (splat(1) + e);
                v16 y = g * sigmoid;
                for (int i = 0; i < LANES; i++) out[c + i] = NARROW(WIDEN(NARROW(y[i])) * u[i]);
            }
            for (; c < end; c++) {
                float g = WIDEN(gate[c]);
                out[c] = NARROW(WIDEN(NARROW(g / (1 + expf(-g)))) * WIDEN(up[c]));
            }
        }
}

static void NAME(attention_half)(const model_t *m, step_t *s, int layer, int has_delta) {
    const layer_t *w = &m->layers[layer];
    int qkv = (m->heads + 2 * m->kv_heads) * m->head_dim;
    NAME(norm)(m, s, w->input_norm, has_delta);
    NAME(linear)(m->panels, s->normed, s->tokens, m->hidden, w->qkv, qkv, w->qkv_bias, s->qkv, NULL);
    NAME(place)(m, s, layer);
    NAME(attend)(m, s, layer);
    NAME(linear)(m->panels, s->attended, s->tokens, m->heads * m->head_dim, w->o, m->hidden, w->o_bias, s->delta, NULL);
}

static void NAME(mlp_half)(const model_t *m, step_t *s, int layer) {
    const layer_t *w = &m->layers[layer];
    NAME(norm)(m, s, w->post_norm, 1);
    NAME(linear)(m->panels, s->normed, s->tokens, m->hidden, w->gate_up, 2 * m->inner, w->gate_up_bias, s->gate_up, NULL);
    NAME(silu_mul)(m, s);
    NAME(linear)(m->panels, s->act, s->tokens, m->inner, w->down, m->hidden, w->down_bias, s->delta, NULL);
}
