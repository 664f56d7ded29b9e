/* What the kernels are called with, and their parts that a team of threads runs together: a `_team` function is called
 * by every thread of a parallel region and ends with a barrier. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct weight {
    const char *packed;
    const float *scales, *bias;
};

/* x [rows, k] and y [rows, n] contiguous; packed [ceil(n / PANEL), k, PANEL], zeros where n ends; scales (int8 only)
 * and bias [n] or null. With a gate, y is silu(x * gate) * (x * weight). */
struct linear {
    const float *x;
    float *y;
    struct weight weight, gate;
    int64_t rows, k, n, kind;
};

/* Sizes in elements. Pools: [block][offset][kv_head][dim], their scales [block][offset][kv_head] or null. Row t, head h
 * of the query: query + t * query_stride + h * query_head_stride. out [tokens, heads, value_dim] contiguous. window 0:
 * none. softcap 0: none. sinks [heads] or null. starts [sequences + 1]: where each sequence's tokens begin. */
struct attention {
    const float *query;
    const char *keys, *values;
    const float *key_scales, *value_scales, *sinks;
    float *out;
    const int64_t *block_tables, *starts, *context_lens;
    int64_t sequences, table_width, block_size, heads, kv_heads, key_dim, value_dim, query_stride, query_head_stride,
        window, kind;
    float scale, softcap;
};

struct tile {
    int64_t sequence, kv_head, num_kv_heads, first, tokens;
};

/* One pool. states: `tokens` rows of [heads][dim], `stride` elements apart. */
struct write {
    char *pool;
    float *scales;
    const float *states;
    const int64_t *slots;
    int64_t tokens, heads, dim, stride, kind;
};

/* Norm of rows [rows, dim]; with `more`, x += more first. y may be null: then only the sum is made. */
struct norm {
    float *x;
    const float *more, *weight;
    float *y;
    int64_t rows, dim;
    float eps;
};

/* Rotary positions in place, halves of a head paired: x [rows, stride] with `heads` heads of `dim` at its front;
 * cosines and sines [rows, dim]. */
struct rotate {
    float *x;
    const float *cosines, *sines;
    int64_t rows, stride, heads, dim;
};

void linear_team(const struct linear *a);
void norm_team(const struct norm *a);
void rotate_team(const struct rotate *a);
void write_team(const struct write *a);

/* The work of attention, to be freed by the caller; null when there is no memory for it. */
struct tile *attention_tiles(const struct attention *a, int64_t *count);
void attention_team(const struct attention *a, const struct tile *tiles, int64_t count);
