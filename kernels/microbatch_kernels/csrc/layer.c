/* The small steps between linear layers, float32, and whole layers of Llama and its kin. */
#include "kernels.h"
#include "vector.h"

#include <math.h>
#include <stdlib.h>

/* Rows from which a second thread pays for its waking. */
#define PARALLEL_ROWS 64

static void norm_row(const struct norm *a, int64_t row) {
    float *x = a->x + row * a->dim;
    for (int64_t d = 0; d < a->dim && a->more; d++)
        x[d] += a->more[row * a->dim + d];
    if (!a->y)
        return;
    vec sums = {};
    float rest = 0;
    int64_t d = 0;
    for (; d + LANES <= a->dim; d += LANES)
        sums += load(x + d) * load(x + d);
    for (; d < a->dim; d++)
        rest += x[d] * x[d];
    const float factor = 1.0f / sqrtf((sum_of(sums) + rest) / a->dim + a->eps);
    for (d = 0; d < a->dim; d++)
        a->y[row * a->dim + d] = a->weight[d] * (x[d] * factor);
}

void norm_team(const struct norm *a) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < a->rows; r++)
        norm_row(a, r);
}

static void rotate_row(const struct rotate *a, int64_t row) {
    const float *c = a->cosines + row * a->dim, *s = a->sines + row * a->dim;
    const int64_t half = a->dim / 2;
    for (int64_t h = 0; h < a->heads; h++) {
        float *low = a->x + row * a->stride + h * a->dim, *high = low + half;
        for (int64_t d = 0; d < half; d++) {
            const float x = low[d], y = high[d];
            low[d] = x * c[d] - y * s[d];
            high[d] = y * c[half + d] + x * s[half + d];
        }
    }
}

void rotate_team(const struct rotate *a) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < a->rows; r++)
        rotate_row(a, r);
}

void microbatch_norm(const struct norm *a) {
#pragma omp parallel if (a->rows >= PARALLEL_ROWS)
    norm_team(a);
}

void microbatch_rotate(const struct rotate *a) {
#pragma omp parallel if (a->rows >= PARALLEL_ROWS)
    rotate_team(a);
}

/* x += out(attention(rotated qkv(norm(x)))), then x += down(silu(gate) * up), all over one residual stream. The steps
 * are those of microbatch_layer, in this order; what each reads and writes is set by the caller. */
struct layer {
    struct norm before, between, after;
    struct linear qkv, out, inner, down;
    struct rotate rotate;
    struct write keys, values;
    struct attention attention;
};

/* Returns 0, or -1 when memory for the work list of attention cannot be had. */
int microbatch_layer(const struct layer *a) {
    int64_t count;
    struct tile *tiles = attention_tiles(&a->attention, &count);
    if (!tiles)
        return -1;
#pragma omp parallel
    {
        norm_team(&a->before);
        linear_team(&a->qkv);
        rotate_team(&a->rotate);
        write_team(&a->keys);
        write_team(&a->values);
        attention_team(&a->attention, tiles, count);
        linear_team(&a->out);
        norm_team(&a->between);
        linear_team(&a->inner);
        linear_team(&a->down);
        norm_team(&a->after);
    }
    free(tiles);
    return 0;
}
