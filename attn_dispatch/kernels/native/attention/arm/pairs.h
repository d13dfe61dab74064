// Pairs of bfloat16 by NEON, and what the other files do with them, under the names that x86 has for it. A vector is W pairs.
// Included in products.h.

#define HAS_PAIRS 1
struct Pair {
    using Scalar = u32;
    static vec spread(const void* p) { return (vec)(ivec{} + load<int>(p)); }
    static vec add(vec sum, vec scalar, vec lanes) {
        return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)scalar, (bfloat16x8_t)lanes);
    }
};
inline u32 pair_of(Bf16 first, Bf16 second) { return first.bits | (u32)second.bits << 16; }

typedef u16 __m256i __attribute__((vector_size(W * 2)));
using __m512i = ivec;
using __m512 = float32x4_t;
inline ivec _mm512_setzero_si512() { return ivec{}; }
inline ivec _mm512_set1_epi32(int x) { return ivec{} + x; }
inline ivec _mm512_or_si512(ivec a, ivec b) { return a | b; }
inline ivec _mm512_slli_epi32(ivec x, int bits) { return x << bits; }
inline ivec _mm512_cvtepu16_epi32(__m256i x) { return (ivec)vmovl_u16((uint16x4_t)x); }
inline bfloat16x4_t _mm512_cvtneps_pbh(__m512 x) { return vcvt_bf16_f32(x); }

// Entries of two rows in turns: 2 W of each.
INLINE void interleave(const void* first, const void* second, ivec (&to)[2]) {
    uint16x8_t x = load<uint16x8_t>(first), y = load<uint16x8_t>(second);
    to[0] = (ivec)vzip1q_u16(x, y);
    to[1] = (ivec)vzip2q_u16(x, y);
}

// Two vectors rounded, entries of each in turns.
INLINE ivec rounded(vec first, vec second) {
    uint16x4_t x = (uint16x4_t)vcvt_bf16_f32((float32x4_t)first), y = (uint16x4_t)vcvt_bf16_f32((float32x4_t)second);
    return (ivec)vcombine_u16(vzip1_u16(x, y), vzip2_u16(x, y));
}

// x[i][j] becomes x[j][i].
inline void transpose(vec (&x)[W]) {
    auto pairs = [](float32x4_t a, float32x4_t b, bool high) {
        float64x2_t first = (float64x2_t)a, second = (float64x2_t)b;
        return (vec)(high ? vtrn2q_f64(first, second) : vtrn1q_f64(first, second));
    };
    float32x4_t a = (float32x4_t)x[0], b = (float32x4_t)x[1], c = (float32x4_t)x[2], d = (float32x4_t)x[3];
    float32x4_t even_ab = vtrn1q_f32(a, b), odd_ab = vtrn2q_f32(a, b), even_cd = vtrn1q_f32(c, d), odd_cd = vtrn2q_f32(c, d);
    x[0] = pairs(even_ab, even_cd, false);
    x[1] = pairs(odd_ab, odd_cd, false);
    x[2] = pairs(even_ab, even_cd, true);
    x[3] = pairs(odd_ab, odd_cd, true);
}
