// Which weights a call with dropout keeps: a pure function of its seed and of positions, the same in both passes, and in any
// blocks and threads. A generator that counts gives 8 numbers of 16 bits for a key and 8 neighbouring queries of a tile;
// kernels/dropout.py says which.
//
// Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3: Philox4x32-7, which passes BigCrush.

#pragma once

#include "rows.h"

namespace {

typedef u64 lvec __attribute__((vector_size(W * 4)));
constexpr int DRAWN = 8, ROUNDS = 7; // numbers of a draw, one for each query
constexpr int DRAWS = W / 2;         // at once: one in each lane of 64 bits
constexpr int SHARE = DRAWS * DRAWN; // lanes of a tile that have theirs then

// Products of the lower halves.
inline lvec times(lvec x, u32 y) {
#if defined(__AVX512F__)
    return (lvec)_mm512_mul_epu32((__m512i)x, (__m512i)(lvec{} + y));
#elif defined(__AVX2__)
    return (lvec)_mm256_mul_epu32((__m256i)x, (__m256i)(lvec{} + y));
#elif defined(__ARM_ARCH_ISA_A64)
    return (lvec)vmull_u32(vmovn_u64((uint64x2_t)x), vdup_n_u32(y)); // __ARM_
#else
    return (x & 0xffffffff) * y;
#endif
}

// A bit for each number that is at least `limit`. A draw's are the four of a lane of `first`, and of `second`.
inline u64 at_least(lvec first, lvec second, u16 limit) {
#if defined(__AVX512BW__) && defined(__BMI2__)
    const __m512i least = _mm512_set1_epi16((short)limit);
    return _pdep_u64(_mm512_cmpge_epu16_mask((__m512i)first, least), 0x0f0f0f0f0f0f0f0f) |
           _pdep_u64(_mm512_cmpge_epu16_mask((__m512i)second, least), 0xf0f0f0f0f0f0f0f0);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i least = _mm256_set1_epi16((short)limit);
    __m256i low = _mm256_unpacklo_epi64((__m256i)first, (__m256i)second);
    __m256i high = _mm256_unpackhi_epi64((__m256i)first, (__m256i)second);
    low = _mm256_cmpeq_epi16(_mm256_max_epu16(low, least), low);
    high = _mm256_cmpeq_epi16(_mm256_max_epu16(high, least), high);
    return (u32)_mm256_movemask_epi8(_mm256_packs_epi16(low, high));
#elif defined(__ARM_ARCH_ISA_A64)
    const uint16x8_t bits = {1, 2, 4, 8, 16, 32, 64, 128}, least = vdupq_n_u16(limit); // __ARM_
    uint16x8_t low = (uint16x8_t)vzip1q_u64((uint64x2_t)first, (uint64x2_t)second); // __ARM_
    uint16x8_t high = (uint16x8_t)vzip2q_u64((uint64x2_t)first, (uint64x2_t)second); // __ARM_
    return vaddvq_u16(vandq_u16(vcgeq_u16(low, least), bits)) | // __ARM_
           vaddvq_u16(vandq_u16(vcgeq_u16(high, least), bits)) << 8; // __ARM_
#else
    u64 bits = 0;
    for (int i = 0; i < SHARE; i++) {
        u64 four = i % DRAWN < 4 ? first[i / DRAWN] : second[i / DRAWN];
        bits |= (u64)((four >> i % 4 * 16 & 0xffff) >= limit) << i;
    }
    return bits;
#endif
}

// Of the draws whose first queries are these, for one key. `row` counts heads of all batch rows.
INLINE u64 draw(lvec first, u32 key, u32 row, u64 seed, u16 limit) {
    u32 low = (u32)seed, high = (u32)(seed >> 32);
    lvec x0 = first, x1 = lvec{} + key, x2 = lvec{} + row, x3 = {}; // of each lane the lower half
    UNROLL for (int round = 1; round < ROUNDS; round++, low += 0x9e3779b9, high += 0xbb67ae85) {
        lvec a = times(x0, 0xd2511f53), b = times(x2, 0xcd9e8d57);
        x0 = b >> 32 ^ x1 ^ low;
        x1 = b;
        x2 = a >> 32 ^ x3 ^ high;
        x3 = a;
    }
    lvec a = times(x0, 0xd2511f53), b = times(x2, 0xcd9e8d57); // the last round: both halves of a lane are numbers
    return at_least(b ^ x1 << 32 ^ (u64)low << 32, a ^ x3 << 32 ^ (u64)high << 32, limit);
}

// Draws for a block; lanes hold head h.
inline void draw_kept(const Args& a, Scratch& s, const Block& block, i64 b, i64 h) {
    if (!a.dropped) return;
    const u32 row = (u32)((a.first_row + b) * a.heads + h);
    std::fill_n(s.drawn, block.keys, 0);
    for (int lane = block.from * W / SHARE * SHARE; lane < std::min(block.to * W, s.lanes); lane += SHARE) {
        lvec first;
        for (int i = 0; i < DRAWS; i++) first[i] = (u64)s.at[lane + i * DRAWN];
        for (int t = 0; t < block.keys; t++)
            s.drawn[t] |= draw(first, (u32)block.key(t), row, a.seed, (u16)a.dropped) << lane;
    }
}

// x of the lanes that keep it, 0 of the others.
inline vec kept(u64 lanes, int n, vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_maskz_mov_ps((__mmask16)(lanes >> n * W), (__m512)x);
#else
    ivec bit;
    for (int i = 0; i < W; i++) bit[i] = 1 << i;
    return (bit & (int)(lanes >> n * W)) != 0 ? x : vec{};
#endif
}

} // namespace
