/* BLAKE2bp (RFC 7693's BLAKE2b in a tree of four leaves and a root, as the BLAKE2 authors define it), unkeyed, 64 bytes.

   Block n of 128 bytes belongs to leaf n % 4. The leaves are hashed side by side, a vector's lane each: three times as
   fast as BLAKE2b where vectors hold four 64-bit words. The root is BLAKE2b over the four leaves' digests. */
#ifndef PENSTOCK_BLAKE2BP_H
#define PENSTOCK_BLAKE2BP_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLAKE2_BLOCK = 128, BLAKE2_LEAVES = 4, BLAKE2_STRIPE = BLAKE2_BLOCK * BLAKE2_LEAVES, BLAKE2_DIGEST = 64 };

typedef uint64_t blake2_lanes __attribute__((vector_size(32)));

/* held : the last bytes, more than one stripe where there were as many: the last block of every leaf is among them,
   and is hashed as a last block once it is known to be one. striped : bytes of every leaf hashed so far */
typedef struct {
    blake2_lanes leaves[8];
    uint64_t striped;
    size_t num_held;
    uint8_t held[2 * BLAKE2_STRIPE];
} Blake2bp;

static const uint64_t BLAKE2_IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

static const uint8_t BLAKE2_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

/* The same lines for one word and for a vector of them. */
#define BLAKE2_ROTATED(x, n) ((x) >> (n) | (x) << (64 - (n)))
#define BLAKE2_MIX(a, b, c, d, x, y)                                                                                   \
    do {                                                                                                               \
        v[a] += v[b] + (x), v[d] ^= v[a], v[d] = BLAKE2_ROTATED(v[d], 32);                                             \
        v[c] += v[d], v[b] ^= v[c], v[b] = BLAKE2_ROTATED(v[b], 24);                                                   \
        v[a] += v[b] + (y), v[d] ^= v[a], v[d] = BLAKE2_ROTATED(v[d], 16);                                             \
        v[c] += v[d], v[b] ^= v[c], v[b] = BLAKE2_ROTATED(v[b], 63);                                                   \
    } while (0)
#define BLAKE2_ROUND(n)                                                                                                \
    do {                                                                                                               \
        const uint8_t *s = BLAKE2_ORDER[(n) % 10];                                                                     \
        BLAKE2_MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);                                                                     \
        BLAKE2_MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);                                                                     \
        BLAKE2_MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);                                                                    \
        BLAKE2_MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);                                                                    \
        BLAKE2_MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);                                                                    \
        BLAKE2_MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);                                                                  \
        BLAKE2_MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);                                                                   \
        BLAKE2_MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);                                                                   \
    } while (0)
#define BLAKE2_ROUNDS                                                                                                  \
    do {                                                                                                               \
        BLAKE2_ROUND(0); BLAKE2_ROUND(1); BLAKE2_ROUND(2); BLAKE2_ROUND(3); BLAKE2_ROUND(4); BLAKE2_ROUND(5);          \
        BLAKE2_ROUND(6); BLAKE2_ROUND(7); BLAKE2_ROUND(8); BLAKE2_ROUND(9); BLAKE2_ROUND(10); BLAKE2_ROUND(11);        \
    } while (0)

static inline uint64_t blake2_word(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Stripes of one block per leaf, none of them a leaf's last. */
static inline __attribute__((always_inline)) void blake2_stripes_of(Blake2bp *b, const uint8_t *data, size_t num) {
    blake2_lanes h[8], v[16], m[16];
    uint64_t counted = b->striped;
    memcpy(h, b->leaves, sizeof h);
    for (size_t stripe = 0; stripe < num; stripe++, data += BLAKE2_STRIPE) {
        counted += BLAKE2_BLOCK;
        for (int n = 0; n < 16; n++)
            m[n] = (blake2_lanes){
                blake2_word(data + 8 * n), blake2_word(data + BLAKE2_BLOCK + 8 * n),
                blake2_word(data + 2 * BLAKE2_BLOCK + 8 * n), blake2_word(data + 3 * BLAKE2_BLOCK + 8 * n)};
        for (int n = 0; n < 8; n++) {
            v[n] = h[n];
            v[n + 8] = (blake2_lanes){0} + BLAKE2_IV[n];
        }
        v[12] ^= (blake2_lanes){0} + counted;
        BLAKE2_ROUNDS;
        for (int n = 0; n < 8; n++)
            h[n] ^= v[n] ^ v[n + 8];
    }
    memcpy(b->leaves, h, sizeof h);
    b->striped = counted;
}

static inline void blake2_stripes_anywhere(Blake2bp *b, const uint8_t *data, size_t num) {
    blake2_stripes_of(b, data, num);
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) static void blake2_stripes_avx2(Blake2bp *b, const uint8_t *data, size_t num) {
    blake2_stripes_of(b, data, num);
}

static inline void blake2_stripes(Blake2bp *b, const uint8_t *data, size_t num) {
    (__builtin_cpu_supports("avx2") ? blake2_stripes_avx2 : blake2_stripes_anywhere)(b, data, num);
}
#else
#define blake2_stripes blake2_stripes_anywhere
#endif

/* One block of one hash. counted : bytes up to its end; last : of this hash; last_node : and this hash of its level */
static inline void blake2_block(uint64_t h[8], const uint8_t *block, uint64_t counted, int last, int last_node) {
    uint64_t v[16], m[16];
    for (int n = 0; n < 16; n++)
        m[n] = blake2_word(block + 8 * n);
    for (int n = 0; n < 8; n++)
        v[n] = h[n], v[n + 8] = BLAKE2_IV[n];
    v[12] ^= counted;
    v[14] ^= last ? ~(uint64_t)0 : 0;
    v[15] ^= last && last_node ? ~(uint64_t)0 : 0;
    BLAKE2_ROUNDS;
    for (int n = 0; n < 8; n++)
        h[n] ^= v[n] ^ v[n + 8];
}

/* The first state of a node of the tree: digests of 64 bytes, fanout 4, depth 2, unlimited leaves. */
static inline void blake2_begin_node(uint64_t h[8], uint64_t offset, uint64_t depth) {
    memcpy(h, BLAKE2_IV, sizeof BLAKE2_IV);
    h[0] ^= BLAKE2_DIGEST | (uint64_t)BLAKE2_LEAVES << 16 | (uint64_t)2 << 24;
    h[1] ^= offset;
    h[2] ^= depth | (uint64_t)BLAKE2_DIGEST << 8;
}

static inline void blake2bp_begin(Blake2bp *b) {
    uint64_t h[8];
    b->striped = b->num_held = 0;
    for (int leaf = 0; leaf < BLAKE2_LEAVES; leaf++) {
        blake2_begin_node(h, (uint64_t)leaf, 0);
        for (int n = 0; n < 8; n++)
            b->leaves[n][leaf] = h[n];
    }
}

static inline void blake2bp_update(Blake2bp *b, const uint8_t *data, size_t num_bytes) {
    while (b->num_held && num_bytes) {
        size_t room = sizeof b->held - b->num_held, taken = num_bytes < room ? num_bytes : room;
        if (!room) {
            blake2_stripes(b, b->held, 1);
            memmove(b->held, b->held + BLAKE2_STRIPE, b->num_held -= BLAKE2_STRIPE);
            /* What is held is one stripe, and more follows: it may go too, as soon as more than a stripe does. */
            if (num_bytes > BLAKE2_STRIPE) {
                blake2_stripes(b, b->held, 1);
                b->num_held = 0;
            }
            continue;
        }
        memcpy(b->held + b->num_held, data, taken);
        b->num_held += taken, data += taken, num_bytes -= taken;
    }
    if (num_bytes > sizeof b->held) {
        size_t stripes = (num_bytes - BLAKE2_STRIPE - 1) / BLAKE2_STRIPE;
        blake2_stripes(b, data, stripes);
        data += stripes * BLAKE2_STRIPE, num_bytes -= stripes * BLAKE2_STRIPE;
    }
    if (num_bytes) {
        memcpy(b->held, data, num_bytes);
        b->num_held = num_bytes;
    }
}

/* The digest of what has come so far; may go on after. */
static inline void blake2bp_digest(const Blake2bp *b, uint8_t digest[BLAKE2_DIGEST]) {
    uint8_t leaves[BLAKE2_LEAVES * BLAKE2_DIGEST], block[BLAKE2_BLOCK];
    uint64_t h[8];
    for (int leaf = 0; leaf < BLAKE2_LEAVES; leaf++) {
        uint64_t counted = b->striped;
        for (int n = 0; n < 8; n++)
            h[n] = b->leaves[n][leaf];
        size_t at = (size_t)leaf * BLAKE2_BLOCK;
        for (int last = 0; !last; at += BLAKE2_STRIPE) {
            size_t here = at >= b->num_held ? 0 : b->num_held - at < BLAKE2_BLOCK ? b->num_held - at : BLAKE2_BLOCK;
            last = at + BLAKE2_STRIPE >= b->num_held;
            memset(block, 0, sizeof block);
            memcpy(block, b->held + (here ? at : 0), here);
            counted += here;
            blake2_block(h, block, counted, last, leaf == BLAKE2_LEAVES - 1);
        }
        for (int n = 0; n < 64; n++)
            leaves[leaf * BLAKE2_DIGEST + n] = (uint8_t)(h[n / 8] >> (8 * (n % 8)));
    }
    blake2_begin_node(h, 0, 1);
    blake2_block(h, leaves, BLAKE2_BLOCK, 0, 1);
    blake2_block(h, leaves + BLAKE2_BLOCK, 2 * BLAKE2_BLOCK, 1, 1);
    for (int n = 0; n < BLAKE2_DIGEST; n++)
        digest[n] = (uint8_t)(h[n / 8] >> (8 * (n % 8)));
}

#endif
