/* Storing the K/V of new tokens at their slots. */
#include "kernels.h"
#include "pool.h"

#include <float.h>
#include <math.h>

/* The nearest e4m3 number to x, |x| <= 448; ties go to the even one. */
static uint8_t fp8_of(float x) {
    const float size = fabsf(x);
    uint32_t bits;
    if (size < 0x1p-6f)
        bits = (uint32_t)nearbyintf(size * 0x1p9f);
    else {
        memcpy(&bits, &size, sizeof bits);
        bits = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    }
    return (uint8_t)(bits | (signbit(x) ? 0x80 : 0));
}

/* One head of one token; returns its scale. What is not finite shows in the scale alone. */
static float round_head(int64_t kind, const float *x, uint8_t *out, int64_t dim) {
    float largest = 0;
    for (int64_t d = 0; d < dim; d++)
        if (largest == largest && !(fabsf(x[d]) <= largest)) /* NaN is taken, and then stays */
            largest = fabsf(x[d]);
    float scale = largest / (kind == INT8 ? 127.0f : 448.0f);
    scale = scale < FLT_MIN ? FLT_MIN : scale;
    for (int64_t d = 0; d < dim; d++) {
        float number = x[d] / scale;
        number = isfinite(number) ? number : 0.0f;
        out[d] = kind == INT8 ? (uint8_t)(int8_t)nearbyintf(number) : fp8_of(number);
    }
    return scale;
}

static void write_token(const struct write *a, int64_t t) {
    const int64_t size = a->heads * a->dim;
    const float *states = a->states + t * a->stride;
    if (a->kind == FLOAT32) {
        memcpy((float *)a->pool + a->slots[t] * size, states, size * sizeof(float));
        return;
    }
    for (int64_t h = 0; h < a->heads; h++) {
        uint8_t *out = (uint8_t *)a->pool + a->slots[t] * size + h * a->dim;
        a->scales[a->slots[t] * a->heads + h] = round_head(a->kind, states + h * a->dim, out, a->dim);
    }
}

void write_team(const struct write *a) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->tokens; t++)
        write_token(a, t);
}

void microbatch_write(const struct write *a) {
    for (int64_t t = 0; t < a->tokens; t++)
        write_token(a, t);
}
