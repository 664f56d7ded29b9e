/* y[rows, n] = x[rows, k] * w[n, k]^T + bias, with w packed in panels.
 *
 * A panel holds PANEL columns of the result, k-major: panel[k][PANEL]. Every weight is read once from memory for all
 * rows. Each element of y is one sum in the order of k, whatever the number of rows: a row's result does not depend on
 * its neighbours, to the bit.
 */
#include "kernels.h"
#include "vector.h"

#define PANEL (2 * LANES)
/* Rows whose sums fit into the registers beside two vectors of weights and one of x. */
#if LANES == 16
#define TILE 12
#else
#define TILE 6
#endif
/* Bytes of the panel that are fetched into the first cache ahead of their use. */
#define NEAR 1024

/* How a weight is kept. int8 has one scale for each column of the result. */
enum kind { FLOAT32, BFLOAT16, INT8 };

typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));

INLINE ptrdiff_t size_of(const enum kind kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

/* LANES weights from element i on. */
INLINE vec weights(const enum kind kind, const char *panel, ptrdiff_t i) {
    if (kind == FLOAT32)
        return load((const float *)panel + i);
    if (kind == BFLOAT16) {
        half_vec h;
        memcpy(&h, panel + 2 * i, sizeof h);
        return (vec)(__builtin_convertvector(h, ivec) << 16);
    }
    byte_vec b;
    memcpy(&b, panel + i, sizeof b);
    return __builtin_convertvector(b, vec);
}

/* One tile: `rows` rows of x against one panel, all sums in registers. `kind` and `rows` are constants where this is
 * inlined. Memory is slower than the sums: while a panel is used, `next`, this tile's share of the panel after it, is
 * fetched into the second cache, `share` bytes for each k. */
INLINE void tile(const enum kind kind, const int rows, const float *x, ptrdiff_t k, const char *panel, float *out,
                 const char *next, ptrdiff_t share) {
    vec low[TILE], high[TILE];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        low[r] = high[r] = (vec){};
    for (ptrdiff_t i = 0; i < k; i++) {
        const char *at = panel + i * PANEL * size_of(kind);
        __builtin_prefetch(at + NEAR, 0, 3);
        __builtin_prefetch(next, 0, 2);
        if (kind == FLOAT32) {
            __builtin_prefetch(at + NEAR + 64, 0, 3);
            __builtin_prefetch(next + share / 2, 0, 2);
        }
        next += share;
        const vec a = weights(kind, at, 0), b = weights(kind, at, LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const vec v = splat(x[r * k + i]);
            low[r] += v * a;
            high[r] += v * b;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(out + r * PANEL, low[r]);
        store(out + r * PANEL + LANES, high[r]);
    }
}

#define CASE(kind, n)                                                                                                  \
    case n:                                                                                                            \
        tile(kind, n, x, k, panel, out, next, share);                                                                  \
        break;
#if TILE == 12
#define MORE_CASES(kind) CASE(kind, 7) CASE(kind, 8) CASE(kind, 9) CASE(kind, 10) CASE(kind, 11) CASE(kind, 12)
#else
#define MORE_CASES(kind)
#endif
#define TILES(name, kind)                                                                                              \
    static void name(int rows, const float *x, ptrdiff_t k, const char *panel, float *out, const char *next,           \
                     ptrdiff_t share) {                                                                                \
        switch (rows) {                                                                                                \
            CASE(kind, 1) CASE(kind, 2) CASE(kind, 3) CASE(kind, 4) CASE(kind, 5) CASE(kind, 6) MORE_CASES(kind)       \
        }                                                                                                              \
    }

TILES(tiles_float32, FLOAT32)
TILES(tiles_bfloat16, BFLOAT16)
TILES(tiles_int8, INT8)

/* Scale and bias of one row of sums, in place. */
static void finish_row(const struct weight *w, float *sums, int64_t first, int64_t width) {
    for (int64_t c = 0; c < width && w->scales; c++)
        sums[c] *= w->scales[first + c];
    for (int64_t c = 0; c < width && w->bias; c++)
        sums[c] += w->bias[first + c];
}

/* x / (1 + e^-x), by the exponential of what is not positive. */
INLINE vec silu(vec x) {
    const ivec negative = x < (vec){};
    const vec e = exp_(select_(negative, x, -x)), one = splat(1.0f);
    return x * select_(negative, e, one) / (one + e);
}

typedef void run_tile(int, const float *, ptrdiff_t, const char *, float *, const char *, ptrdiff_t);

/* `some` rows of x from `row` on against panel number p of a weight; `t` of `tiles` says which share of the next panel
 * to fetch. */
static void weight_rows(const struct linear *a, const struct weight *w, int64_t p, int64_t row, int some, int64_t t,
                        int64_t tiles, float *out) {
    static run_tile *const run[] = {tiles_float32, tiles_bfloat16, tiles_int8};
    const int64_t step = PANEL * size_of(a->kind), share = step / tiles, first = p * PANEL;
    const char *panel = w->packed + p * step * a->k, *next = panel + step * a->k;
    run[a->kind](some, a->x + row * a->k, a->k, panel, out, next + t * share * a->k, share);
    for (int r = 0; r < some; r++)
        finish_row(w, out + r * PANEL, first, a->n - first < PANEL ? a->n - first : PANEL);
}

/* All rows against panel number p. */
static void panel_rows(const struct linear *a, int64_t p) {
    const int64_t first = p * PANEL, width = a->n - first < PANEL ? a->n - first : PANEL;
    const int64_t tiles = (a->rows + TILE - 1) / TILE;
    float out[TILE * PANEL], gate[TILE * PANEL];
    for (int64_t t = 0, done = 0; t < tiles; t++) {
        /* Tiles of nearly one size: 13 rows are 7 and 6, not 12 and 1. */
        const int some = (int)((a->rows - done + tiles - t - 1) / (tiles - t));
        weight_rows(a, &a->weight, p, done, some, t, tiles, out);
        if (a->gate.packed) {
            weight_rows(a, &a->gate, p, done, some, t, tiles, gate);
            for (int i = 0; i < some * PANEL; i += LANES)
                store(out + i, silu(load(gate + i)) * load(out + i));
        }
        for (int r = 0; r < some; r++)
            memcpy(a->y + (done + r) * a->n + first, out + r * PANEL, width * sizeof(float));
        done += some;
    }
}

int microbatch_panel_width(void) { return PANEL; }

void linear_team(const struct linear *a) {
    const int64_t panels = (a->n + PANEL - 1) / PANEL;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; p++)
        panel_rows(a, p);
}

void microbatch_linear(const struct linear *a) {
#pragma omp parallel
    linear_team(a);
}
