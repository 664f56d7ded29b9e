/* Causal attention of packed queries over their paged context; see attention_naive.py for what it computes. Sums are
 * float32, the pools float32 or 8 bits with a scale for each token and head (quantized_kv.py).
 *
 * Work is split into tiles: some query tokens of one sequence with some K/V heads. The keys of LANES positions are
 * transposed once and serve all rows (query tokens times heads of the group) of a K/V head; softmax runs along
 * (online), so nothing of the context's length is ever stored. Every row sums in the same order of positions, whatever
 * is in the tile beside it: a token's result does not depend on its neighbours or on how its prompt was cut into
 * chunks, to the bit.
 */
#include "kernels.h"
#include "pool.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#define MAX_ROWS 32
#define MAX_DIM 512

/* What one tile keeps: a row is one query token with one head. */
struct state {
    float query[MAX_ROWS][MAX_DIM], sums[MAX_ROWS][MAX_DIM], keys[MAX_DIM][LANES], weights[MAX_ROWS][LANES];
    float top[MAX_ROWS];
    vec total[MAX_ROWS];
};

/* ---- vectors */

static float exp1(float x) { return exp_(splat(x))[0]; }

INLINE vec tanh_(vec x) {
    const ivec negative = x < (vec){};
    const vec e = exp_(splat(-2.0f) * select_(negative, -x, x));
    const vec t = (splat(1.0f) - e) / (splat(1.0f) + e);
    return select_(negative, -t, t);
}

#define TOP_OF_PAIRS(v, half)                                                                                          \
    if (LANES > half) {                                                                                                \
        ivec other;                                                                                                    \
        for (int i = 0; i < LANES; i++)                                                                                \
            other[i] = i ^ half;                                                                                       \
        const vec moved = __builtin_shuffle(v, other);                                                                 \
        v = select_(moved > v, moved, v);                                                                              \
    }

/* The largest lane; what is not a number is passed over. */
INLINE float max_of(vec v) {
    TOP_OF_PAIRS(v, 1) TOP_OF_PAIRS(v, 2) TOP_OF_PAIRS(v, 4) TOP_OF_PAIRS(v, 8)
    return v[0];
}

/* ---- one block of LANES keys */

/* The slots of LANES positions from `first`; those past the context repeat its last one and are masked later. */
static void find_slots(const struct attention *a, int64_t sequence, int64_t first, int64_t *slots) {
    const int64_t *table = a->block_tables + sequence * a->table_width, last = a->context_lens[sequence] - 1;
    for (int j = 0; j < LANES; j++) {
        const int64_t position = first + j < last ? first + j : last;
        slots[j] = table[position / a->block_size] * a->block_size + position % a->block_size;
    }
}

/* Swap the off-diagonal halves of all pairs of rows `half` apart: log2(LANES) of these transpose a square. */
#define EXCHANGE(half)                                                                                                 \
    if (LANES > half) {                                                                                                \
        ivec low, high;                                                                                                \
        for (int i = 0; i < LANES; i++) {                                                                              \
            low[i] = i & half ? LANES + i - half : i;                                                                  \
            high[i] = i & half ? LANES + i : i + half;                                                                 \
        }                                                                                                              \
        for (int i = 0; i < LANES; i++)                                                                                \
            if (!(i & half)) {                                                                                         \
                const vec a = rows[i], b = rows[i + half];                                                             \
                rows[i] = __builtin_shuffle(a, b, low);                                                                \
                rows[i + half] = __builtin_shuffle(a, b, high);                                                        \
            }                                                                                                          \
    }

/* The K/V of LANES positions for one head: where each begins, and its scale. */
struct lanes {
    const char *at[LANES];
    float scale[LANES];
};

INLINE int64_t size_of(const enum kind kind) { return kind == FLOAT32 ? 4 : 1; }

/* LANES numbers from element d on, without their scale. fp8 is e4m3: its bits are a float's with a smaller exponent. */
INLINE vec numbers(const enum kind kind, const char *p, int64_t d) {
    if (kind == FLOAT32)
        return load((const float *)p + d);
    byte_vec b;
    memcpy(&b, p + d, sizeof b);
    if (kind == INT8)
        return __builtin_convertvector(b, vec);
    const ivec wide = __builtin_convertvector(b, ivec);
    return (vec)(((wide & 0x7f) << 20) | (wide & INT32_MIN)) * splat(0x1p120f);
}

INLINE float number(const enum kind kind, const char *p, int64_t d) {
    if (kind == FLOAT32)
        return ((const float *)p)[d];
    char padded[LANES] = {p[d]};
    return numbers(kind, padded, 0)[0];
}

INLINE void transpose_square(const enum kind kind, const struct lanes *from, int64_t d, float (*to)[LANES]) {
    vec rows[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
        rows[j] = numbers(kind, from->at[j], d);
        if (kind != FLOAT32)
            rows[j] *= splat(from->scale[j]);
    }
#pragma GCC unroll 16
    for (int once = 0; once < 1; once++) {
        EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(8)
    }
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++)
        store(to[d + j], rows[j]);
}

INLINE void transpose_keys(const enum kind kind, const struct lanes *from, int64_t dim, float (*to)[LANES]) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        transpose_square(kind, from, d, to);
    for (; d < dim; d++)
        for (int j = 0; j < LANES; j++)
            to[d][j] = number(kind, from->at[j], d) * (kind == FLOAT32 ? 1.0f : from->scale[j]);
}

/* Scores of one row against the transposed keys: four sums, added in a fixed order. */
INLINE vec dot(const float *query, const float (*keys)[LANES], int64_t dim) {
    vec a = {}, b = {}, c = {}, e = {};
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
        a += splat(query[d]) * load(keys[d]);
        b += splat(query[d + 1]) * load(keys[d + 1]);
        c += splat(query[d + 2]) * load(keys[d + 2]);
        e += splat(query[d + 3]) * load(keys[d + 3]);
    }
    for (; d < dim; d++)
        a += splat(query[d]) * load(keys[d]);
    return (a + b) + (c + e);
}

/* sums += weights[low..high] * values of those lanes. */
INLINE void add_values(const enum kind kind, float *sums, const float *weights, const struct lanes *values, int low,
                       int high, int64_t dim) {
    int64_t d = 0;
    float scaled[LANES];
    for (int j = low; j <= high; j++)
        scaled[j] = kind == FLOAT32 ? weights[j] : weights[j] * values->scale[j];
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        vec a = load(sums + d), b = load(sums + d + LANES), c = load(sums + d + 2 * LANES),
            e = load(sums + d + 3 * LANES);
        for (int j = low; j <= high; j++) {
            const vec w = splat(scaled[j]);
            const char *v = values->at[j];
            a += w * numbers(kind, v, d);
            b += w * numbers(kind, v, d + LANES);
            c += w * numbers(kind, v, d + 2 * LANES);
            e += w * numbers(kind, v, d + 3 * LANES);
        }
        store(sums + d, a), store(sums + d + LANES, b), store(sums + d + 2 * LANES, c), store(sums + d + 3 * LANES, e);
    }
    for (; d + LANES <= dim; d += LANES) {
        vec a = load(sums + d);
        for (int j = low; j <= high; j++)
            a += splat(scaled[j]) * numbers(kind, values->at[j], d);
        store(sums + d, a);
    }
    for (; d < dim; d++)
        for (int j = low; j <= high; j++)
            sums[d] += scaled[j] * number(kind, values->at[j], d);
}

/* One row against one block of keys; lanes low..high are those that it sees. */
INLINE void attend_row(const enum kind kind, const struct attention *a, struct state *s, int row,
                       const struct lanes *values, int low, int high) {
    ivec lane;
    for (int j = 0; j < LANES; j++)
        lane[j] = j;
    vec scores = dot(s->query[row], (const float (*)[LANES])s->keys, a->key_dim);
    if (a->softcap != 0)
        scores = splat(a->softcap) * tanh_(scores / splat(a->softcap));
    const ivec seen = (lane >= low) & (lane <= high);
    scores = select_(seen, scores, splat(-INFINITY));
    const float top = max_of(scores);
    if (!(top <= s->top[row])) {
        /* Also taken when top is not a number, which then spreads to this row's result and nowhere else. */
        const float factor = s->top[row] == -INFINITY ? 0.0f : exp1(s->top[row] - top);
        s->total[row] *= splat(factor);
        for (int64_t d = 0; d < a->value_dim; d++)
            s->sums[row][d] *= factor;
        s->top[row] = top;
    }
    const vec weights = select_(seen, exp_(scores - splat(s->top[row])), (vec){});
    s->total[row] += weights;
    store(s->weights[row], weights);
    add_values(kind, s->sums[row], s->weights[row], values, low, high, a->value_dim);
}

/* ---- a tile */

/* Rows of a tile: K/V head by K/V head, in it token by token, in it head by head of the group. */
static int row_of(const struct tile *t, int group, int64_t kv_head, int64_t token) {
    return (int)(kv_head * t->tokens + token) * group;
}

static void start_rows(const struct attention *a, struct state *s, const struct tile *t, int64_t kv_head,
                       int64_t token) {
    const int group = (int)(a->heads / a->kv_heads), row = row_of(t, group, kv_head, token);
    const float *query = a->query + (a->starts[t->sequence] + t->first + token) * a->query_stride +
                         (t->kv_head + kv_head) * group * a->query_head_stride;
    for (int g = 0; g < group; g++) {
        for (int64_t d = 0; d < a->key_dim; d++)
            s->query[row + g][d] = query[g * a->query_head_stride + d] * a->scale;
        memset(s->sums[row + g], 0, a->value_dim * sizeof(float));
        s->top[row + g] = -INFINITY;
        s->total[row + g] = (vec){};
    }
}

static void end_rows(const struct attention *a, struct state *s, const struct tile *t, int64_t kv_head, int64_t token) {
    const int group = (int)(a->heads / a->kv_heads), row = row_of(t, group, kv_head, token);
    const int64_t head = (t->kv_head + kv_head) * group;
    float *out = a->out + ((a->starts[t->sequence] + t->first + token) * a->heads + head) * a->value_dim;
    for (int g = 0; g < group; g++) {
        float total = sum_of(s->total[row + g]), factor = 1.0f;
        if (a->sinks) {
            const float sink = a->sinks[head + g], own = s->top[row + g], top = sink > own ? sink : own;
            factor = exp1(own - top);
            total = total * factor + exp1(sink - top);
        }
        for (int64_t d = 0; d < a->value_dim; d++)
            out[g * a->value_dim + d] = s->sums[row + g][d] * factor / total;
    }
}

static void fetch(const char *p, int64_t size) {
    for (int64_t at = 0; at < size; at += 64)
        __builtin_prefetch(p + at, 0, 3);
}

/* The lanes of one pool at `slots`, while those at `coming` are fetched. */
INLINE void find_lanes(const enum kind kind, const char *pool, const float *scales, int64_t kv_heads, int64_t kv_head,
                       int64_t dim, const int64_t *slots, const int64_t *coming, struct lanes *lanes) {
    const int64_t size = dim * size_of(kind);
    for (int j = 0; j < LANES; j++) {
        lanes->at[j] = pool + (slots[j] * kv_heads + kv_head) * size;
        if (kind != FLOAT32)
            lanes->scale[j] = scales[slots[j] * kv_heads + kv_head];
        fetch(pool + (coming[j] * kv_heads + kv_head) * size, size);
    }
}

/* The block of keys from position `first` on, for one K/V head and all its rows. `coming`: the slots of the block after
 * it, fetched meanwhile. `kind` is a constant where this is inlined. */
INLINE void attend_block(const enum kind kind, const struct attention *a, struct state *s, const struct tile *t,
                         int64_t kv_head, int64_t first, const int64_t *slots, const int64_t *coming) {
    const int group = (int)(a->heads / a->kv_heads);
    const int64_t head = t->kv_head + kv_head;
    struct lanes keys, values;
    find_lanes(kind, a->keys, a->key_scales, a->kv_heads, head, a->key_dim, slots, coming, &keys);
    find_lanes(kind, a->values, a->value_scales, a->kv_heads, head, a->value_dim, slots, coming, &values);
    transpose_keys(kind, &keys, a->key_dim, s->keys);
    const int64_t position =
        a->context_lens[t->sequence] - (a->starts[t->sequence + 1] - a->starts[t->sequence]) + t->first;
    for (int64_t token = 0; token < t->tokens; token++) {
        const int64_t own = position + token, from = a->window ? own + 1 - a->window - first : 0;
        const int low = from > 0 ? (int)(from < LANES ? from : LANES) : 0;
        const int high = (int)(own - first < LANES ? own - first : LANES - 1);
        if (low <= high)
            for (int g = 0; g < group; g++)
                attend_row(kind, a, s, row_of(t, group, kv_head, token) + g, &values, low, high);
    }
}

typedef void block_kernel(const struct attention *, struct state *, const struct tile *, int64_t, int64_t,
                          const int64_t *, const int64_t *);

#define BLOCK_KERNEL(name, kind)                                                                                       \
    static void name(const struct attention *a, struct state *s, const struct tile *t, int64_t kv_head, int64_t first, \
                     const int64_t *slots, const int64_t *coming) {                                                    \
        attend_block(kind, a, s, t, kv_head, first, slots, coming);                                                    \
    }

BLOCK_KERNEL(block_float32, FLOAT32)
BLOCK_KERNEL(block_int8, INT8)
BLOCK_KERNEL(block_fp8, FP8)

static void run_tile(const struct attention *a, struct state *s, const struct tile *t) {
    const int64_t new_tokens = a->starts[t->sequence + 1] - a->starts[t->sequence];
    const int64_t position = a->context_lens[t->sequence] - new_tokens + t->first, last = position + t->tokens - 1;
    const int64_t oldest = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    static block_kernel *const blocks[] = {block_float32, block_int8, block_fp8};
    int64_t slots[LANES], coming[LANES];
    for (int64_t h = 0; h < t->num_kv_heads; h++)
        for (int64_t token = 0; token < t->tokens; token++)
            start_rows(a, s, t, h, token);
    /* Blocks begin at multiples of LANES whatever the window, so that a token's sums do not depend on the tile. */
    find_slots(a, t->sequence, oldest / LANES * LANES, coming);
    for (int64_t first = oldest / LANES * LANES; first <= last; first += LANES) {
        memcpy(slots, coming, sizeof slots);
        find_slots(a, t->sequence, first + LANES, coming);
        for (int64_t h = 0; h < t->num_kv_heads; h++)
            blocks[a->kind](a, s, t, h, first, slots, coming);
    }
    for (int64_t h = 0; h < t->num_kv_heads; h++)
        for (int64_t token = 0; token < t->tokens; token++)
            end_rows(a, s, t, h, token);
}

/* The tiles of one sequence, appended at `tiles`; null only counts them. One token takes many heads into a tile, for
 * their K/V lie side by side in memory; many tokens take one head, whose keys then serve them all. */
static int64_t add_tiles(const struct attention *a, int64_t sequence, int64_t most_kv_heads, struct tile *tiles) {
    const int64_t group = a->heads / a->kv_heads, tokens = a->starts[sequence + 1] - a->starts[sequence];
    const int64_t kv_heads = tokens == 1 ? most_kv_heads : 1, some = tokens == 1 ? 1 : MAX_ROWS / group;
    int64_t count = 0;
    for (int64_t first = 0; first < tokens; first += some)
        for (int64_t head = 0; head < a->kv_heads; head += kv_heads, count++)
            if (tiles)
                tiles[count] = (struct tile){sequence, head,
                                             a->kv_heads - head < kv_heads ? a->kv_heads - head : kv_heads, first,
                                             tokens - first < some ? tokens - first : some};
    return count;
}

int microbatch_attention_max_dim(void) { return MAX_DIM; }

int microbatch_attention_max_group(void) { return MAX_ROWS; }

struct tile *attention_tiles(const struct attention *a, int64_t *count) {
    const int64_t group = a->heads / a->kv_heads;
    const int64_t most = a->sequences < 2 * omp_get_max_threads() ? 1 : MAX_ROWS / group;
    int64_t made = 0;
    *count = 0;
    for (int64_t b = 0; b < a->sequences; b++)
        *count += add_tiles(a, b, most, NULL);
    struct tile *tiles = malloc((*count ? *count : 1) * sizeof *tiles);
    for (int64_t b = 0; b < a->sequences && tiles; b++)
        made += add_tiles(a, b, most, tiles + made);
    return tiles;
}

void attention_team(const struct attention *a, const struct tile *tiles, int64_t count) {
    struct state state;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
        run_tile(a, &state, tiles + i);
}

/* Returns 0, or -1 when memory for the work list cannot be had. */
int microbatch_attention(const struct attention *a) {
    int64_t count;
    struct tile *tiles = attention_tiles(a, &count);
    if (!tiles)
        return -1;
#pragma omp parallel
    attention_team(a, tiles, count);
    free(tiles);
    return 0;
}
