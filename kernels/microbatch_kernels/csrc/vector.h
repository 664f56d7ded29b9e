/* Vectors of the machine's own width, by the compiler's vector extension: no intrinsics, so any target works. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef int8_t byte_vec __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

/* Written out, because `x + (vec){}` is an addition and not a broadcast to the compiler: 0 + -0 is not -0. */
#if LANES == 16
#define SPLAT(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#elif LANES == 8
#define SPLAT(x) {x, x, x, x, x, x, x, x}
#else
#define SPLAT(x) {x, x, x, x}
#endif

INLINE vec splat(float x) { return (vec)SPLAT(x); }

INLINE vec select_(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* e^x for x <= 0: 2^n * polynomial (Cephes expf coefficients), 2 ulp; 0 below -87. */
INLINE vec exp_(vec x) {
    const vec low = splat(-87.0f);
    const ivec under = x < low;
    x = select_(under, low, x);
    const ivec n = __builtin_convertvector(x * splat(1.44269504f) - splat(0.5f), ivec);
    const vec whole = __builtin_convertvector(n, vec);
    const vec r = x - whole * splat(0.693359375f) - whole * splat(-2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const vec power = (vec)((n + 127) << 23);
    return select_(under, (vec){}, p * power);
}

INLINE float sum_of(vec v) {
    float sum = v[0];
    for (int i = 1; i < LANES; i++)
        sum += v[i];
    return sum;
}
