/* Philox 4x64 with ten rounds (Salmon et al., 2011), with the counters of numpy.random.Philox, and rows drawn from it. */
#ifndef PENSTOCK_PHILOX_H
#define PENSTOCK_PHILOX_H

#include <stdint.h>

typedef struct { uint64_t low, high; } PhiloxKey;

/* The block that NumPy's generator returns first if its counter is (low, high, 0, 0): it counts before it draws. */
static inline void philox_block(uint64_t low, uint64_t high, PhiloxKey key, uint64_t out[4]) {
    uint64_t c0 = low + 1, c1 = high + (c0 == 0), c2 = c0 == 0 && c1 == 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        unsigned __int128 a = (unsigned __int128)0xD2E7470EE14C6C93u * c0;
        unsigned __int128 b = (unsigned __int128)0xCA5A826395121157u * c2;
        c0 = (uint64_t)(b >> 64) ^ c1 ^ key.low;
        c2 = (uint64_t)(a >> 64) ^ c3 ^ key.high;
        c1 = (uint64_t)b;
        c3 = (uint64_t)a;
        key.low += 0x9E3779B97F4A7C15u;
        key.high += 0xBB67AE8584CAA73Bu;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* 53 bits of a word as a double in [0, 1). */
static inline double philox_unit(uint64_t word) { return (double)(int64_t)(word >> 11) * 0x1p-53; }

enum { ROW_CHUNK = 64 };

/* Row ``number`` of a table of 2**64 rows: uniform in (0, 1), then mapped, in doubles.
 * normal: first is the scale, second the mean; else first is the width, second the lower bound.
 *
 * TensorFlow's truncated normal redraws values beyond two standard deviations. This one inverts the distribution function:
 * x = q*P(q*q)/Q(q*q) for |q| <= Phi(2) - 1/2 is within 4e-9 of the normal quantile of 1/2 + q (least-squares fit, checked
 * on 2e6 points), far below one float32 step at 2. It is a rational function because log and exp differ between C
 * libraries in their last bit. */
static inline void draw_row(PhiloxKey key, uint64_t number, int64_t dim, int normal, double first, double second,
                            float *row) {
    static const double P[] = {2.506628277481258,   -30.74622382801368, 139.1492294923544,
                               -278.5147114114572, 224.03642817156643, -40.52895479889411};
    static const double Q[] = {1.0,                 -13.313165719867957, 67.1510818369637,
                               -157.02215052762983, 163.6011732862739,   -55.4425703360281};
    unsigned __int128 counter = (unsigned __int128)number * (uint64_t)((dim + 3) / 4);
    for (int64_t begin = 0; begin < dim; begin += ROW_CHUNK) {
        uint64_t words[ROW_CHUNK];
        double units[ROW_CHUNK];
        int64_t n = dim - begin < ROW_CHUNK ? dim - begin : ROW_CHUNK;
        for (int64_t i = 0; i < n; i += 4, counter++)
            philox_block((uint64_t)counter, (uint64_t)(counter >> 64), key, words + i);
        for (int64_t i = 0; i < n; i++) units[i] = philox_unit(words[i]) + 0x1p-54;
        if (normal) {
            for (int64_t i = 0; i < n; i++) {
                double q = (units[i] - 0.5) * (2 * 0.4772498680518208), t = q * q, above = P[5], below = Q[5];
                for (int c = 4; c >= 0; c--) {
                    above = above * t + P[c];
                    below = below * t + Q[c];
                }
                row[begin + i] = (float)(q * (above / below) * first + second);
            }
        } else {
            for (int64_t i = 0; i < n; i++) row[begin + i] = (float)(second + first * units[i]);
        }
    }
}

#endif
