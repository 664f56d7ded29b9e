/* The small steps of a layer between its linear layers, float32: root mean square norm, rotary positions. */
#include "vector.h"

#include <math.h>

/* Rows from which a second thread pays for its waking. */
#define PARALLEL_ROWS 64

static void norm_row(const float *x, const float *weight, float *y, int64_t dim, float eps) {
    vec sums = {};
    float rest = 0, mean;
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        sums += load(x + d) * load(x + d);
    for (; d < dim; d++)
        rest += x[d] * x[d];
    mean = (sum_of(sums) + rest) / dim;
    const float factor = 1.0f / sqrtf(mean + eps);
    for (d = 0; d < dim; d++)
        y[d] = weight[d] * (x[d] * factor);
}

/* y = weight * x / sqrt(mean(x^2) + eps), by rows; x and y [rows, dim]. */
void microbatch_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (rows >= PARALLEL_ROWS)
    for (int64_t r = 0; r < rows; r++)
        norm_row(x + r * dim, weight, y + r * dim, dim, eps);
}

/* Rotary positions in place, halves of a head paired: x [rows, stride] with `heads` heads of `dim` at its front; cosines
 * and sines [rows, dim]. */
void microbatch_rotate(float *x, const float *cosines, const float *sines, int64_t rows, int64_t stride, int64_t heads,
                       int64_t dim) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows >= PARALLEL_ROWS)
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cosines + r * dim, *s = sines + r * dim;
        for (int64_t h = 0; h < heads; h++) {
            float *low = x + r * stride + h * dim, *high = low + half;
            for (int64_t d = 0; d < half; d++) {
                const float a = low[d], b = high[d];
                low[d] = a * c[d] - b * s[d];
                high[d] = b * c[half + d] + a * s[half + d];
            }
        }
    }
}
