// Vectors of floats, the element types, and the sizes of tiles.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_ARCH_ISA_A64)
#include <arm_neon.h> // __ARM_
#endif

namespace {

using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = std::uint64_t;

// A vector has W float lanes. A register tile is MR x NV vectors of sums, NV vectors of one operand and a scalar of the
// other: as many independent sums as registers hold, with few loads for each.
#if defined(__AVX512F__)
constexpr int W = 16, NV = 4, MR = 6;
constexpr int TALL_ROWS = 8, TALL_SUMS = 16; // of a register tile of one vector: see Dot and Mix
#elif defined(__AVX2__)
constexpr int W = 8, NV = 2, MR = 6;
constexpr int TALL_ROWS = 6, TALL_SUMS = 12;
#elif defined(__ARM_ARCH_ISA_A64)
constexpr int W = 4, NV = 4, MR = 5; // __ARM_: of 32 registers; with 6 rows g++ spills a sum
constexpr int TALL_ROWS = 8, TALL_SUMS = 16; // __ARM_
#else
constexpr int W = 4, NV = 4, MR = 4;
constexpr int TALL_ROWS = 6, TALL_SUMS = 12;
#endif
constexpr int T = 64;    // queries per tile: enough work per key that reading keys takes little of the time
constexpr int KEYS = 192; // keys per block, between rescalings: their scores fit the L2 cache; must be even
constexpr int FEW = 16; // queries in a tile up to which a call is bound by memory; at least W
constexpr int FEW_KEYS = 32; // keys per block then: their rows of one head fit the L1 cache
constexpr i64 NEAR_BYTES = 2 << 20; // of a head's keys and values: with more, every block would wait for memory
constexpr int PARTIAL = 64; // keys per block where not every lane sees every key
constexpr int CHUNK = 4 * KEYS; // keys that get a softmax of their own, with `invariant`
constexpr int PARTIAL_SUMS = W == 16 ? 4 : 1; // sums of a score, with `invariant`: as Rowwise reads keys
constexpr int TILE_KEYS = 32; // keys that tile registers add at once
constexpr int CACHE_LINE = 64;
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float MOST = std::numeric_limits<float>::max() / 2; // absolute value of what a bias adds
constexpr float NEVER = std::numeric_limits<float>::infinity();
constexpr float ROUGH = 1 << 12;  // absolute value of lse past which its rounding is worth a second pass over the scores
constexpr double ROUNDING = 6e-8; // of a float, relative
constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;
static_assert(T % (NV * W) == 0, "a tile is whole register tiles");

typedef float vec __attribute__((vector_size(W * 4)));
typedef int ivec __attribute__((vector_size(W * 4)));

// Without unrolling, the compiler stores the sums on the stack.
#define UNROLL _Pragma("GCC unroll 16")

template <class V = vec> inline V load(const void* p) { V x; std::memcpy(&x, p, sizeof x); return x; }
template <class V> inline void store(void* p, V x) { std::memcpy(p, &x, sizeof x); }
inline vec splat(float x) { return x - vec{}; }

inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__ARM_ARCH_ISA_A64)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b); // __ARM_: NaN if one is
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, 0 below 2^-126: Intel's processors take far longer for a result that is no normal number. The polynomial
// is fitted on [-1/2, 1/2] to a relative error of 2e-8.
inline vec exp2_(vec x) {
    x = larger(splat(-160.0f), x); // in this order NaN stays NaN
#if defined(__AVX512F__)
    vec whole = (vec)_mm512_roundscale_ps((__m512)x, 8);
#elif defined(__ARM_ARCH_ISA_A64)
    vec whole = (vec)vrndnq_f32((float32x4_t)x); // __ARM_
#else
    const vec shift = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    vec whole = (x + shift) - shift;
#endif
    vec f = x - whole, p = splat(1.534581242594868e-4f);
    for (float c : {1.3399930903688073e-3f, 9.618489071726799e-3f, 5.550328642129898e-2f, 2.4022646248340607e-1f,
                    6.931471824645996e-1f, 1.0f})
        p = p * f + splat(c);
#if defined(__AVX512F__)
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)whole, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
#else
    vec scaled = (vec)((ivec)p + (__builtin_convertvector(whole, ivec) << 23));
    return whole < splat(-125.0f) ? vec{} : scaled;
#endif
}

// tanh to within 3 units in the last place. The polynomial is fitted on |x| <= 5/8, where the quotient would cancel.
inline vec tanh_(vec x) {
    vec y = x * x, p = splat(-6.1049453306192e-3f), size = larger(x, -x);
    for (float c : {2.1003638864730854e-2f, -5.3852496778279774e-2f, 1.333278225650533e-1f, -3.3333329099397707e-1f})
        p = p * y + splat(c);
    vec e = exp2_(size * splat((float)(-2.0 * LOG2_E))), large = (splat(1.0f) - e) / (splat(1.0f) + e);
    return size < splat(0.625f) ? x + x * (y * p) : x < vec{} ? -large : large;
}

// Element types, and their conversion to float.

struct Bf16 { u16 bits; };
struct Half { u16 bits; };

inline float widen(float x) { return x; }
inline float widen(Bf16 x) { u32 bits = (u32)x.bits << 16; float y; std::memcpy(&y, &bits, 4); return y; }
#if defined(__F16C__)
inline float widen(Half x) { return _cvtsh_ss(x.bits); }
inline u16 half_bits(float x) { return (u16)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
#if defined(__aarch64__)
using f16 = __fp16; // g++ knows _Float16 there from version 13 on
#else
using f16 = _Float16;
#endif
inline float widen(Half x) { f16 y; std::memcpy(&y, &x, 2); return (float)y; }
inline u16 half_bits(float x) { f16 y = (f16)x; u16 z; std::memcpy(&z, &y, 2); return z; }
#endif

template <class E> inline E narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline Bf16 narrow<Bf16>(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {(u16)(bits >> 16 | 64)};
    return {(u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)}; // to the nearest, ties to even
}
template <> inline Half narrow<Half>(float x) { return {half_bits(x)}; }

// W elements as floats.
template <class E> inline vec wide(const E* p) {
    vec x = {};
    for (int i = 0; i < W; i++) x[i] = widen(p[i]);
    return x;
}
template <> inline vec wide<float>(const float* p) { return load(p); }
#if defined(__AVX512F__)
template <> inline vec wide<Bf16>(const Bf16* p) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
}
template <> inline vec wide<Half>(const Half* p) { return (vec)_mm512_cvtph_ps(load<__m256i>(p)); }
#elif defined(__AVX2__)
template <> inline vec wide<Bf16>(const Bf16* p) {
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16);
}
#if defined(__F16C__)
template <> inline vec wide<Half>(const Half* p) { return (vec)_mm256_cvtph_ps(load<__m128i>(p)); }
#endif
#endif

template <class E> inline void widen_row(const E* from, float* to, int n) {
    int i = 0;
    for (; i + W <= n; i += W) store(to + i, wide(from + i));
    for (; i < n; i++) to[i] = widen(from[i]);
}

#if defined(__AVX512F__)
// W floats as elements, rounded as narrow() does.
inline void put(float* to, vec x) { store(to, x); }
inline void put(Half* to, vec x) { store(to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); }
inline void put(Bf16* to, vec x) {
    ivec bits = (ivec)x, odd = bits >> 16 & 1;
    ivec rounded = x != x ? bits | 64 << 16 : bits + 0x7fff + odd;
    store(to, _mm512_cvtepi32_epi16((__m512i)(rounded >> 16)));
}

// Of four rows: x[i] has column i of each quarter, four floats side by side; or quarter i of each.
inline void transpose_quarters(__m512 (&x)[4]) {
    __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    auto pair = [](__m512 x, __m512 y, bool high) {
        return (__m512)(high ? _mm512_unpackhi_pd((__m512d)x, (__m512d)y) : _mm512_unpacklo_pd((__m512d)x, (__m512d)y));
    };
    x[0] = pair(a, c, false), x[1] = pair(a, c, true), x[2] = pair(b, d, false), x[3] = pair(b, d, true);
}
inline void gather_quarters(__m512 (&x)[4]) {
    __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    __m512 c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(a, b, 0x88), x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[2] = _mm512_shuffle_f32x4(c, d, 0x88), x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}
// x[i][j] becomes x[j][i].
inline void transpose(vec (&x)[W]) {
    __m512 by_rows[4][4]; // of rows 4i to 4i + 3
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int c = 0; c < 4; c++) by_rows[i][c] = (__m512)x[4 * i + c];
        transpose_quarters(by_rows[i]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        __m512 column[4] = {by_rows[0][c], by_rows[1][c], by_rows[2][c], by_rows[3][c]};
        gather_quarters(column);
        UNROLL for (int q = 0; q < 4; q++) x[4 * q + c] = (vec)column[q];
    }
}
#endif

// So that sums in registers stay there.
#define INLINE inline __attribute__((always_inline))

inline float total(vec x) {
    float sum = 0.0f;
    for (int i = 0; i < W; i++) sum += x[i];
    return sum;
}

// to[i * pitch + n] = the sum of the floats of x[i][n]
template <int M, int N> INLINE void put_totals(const vec (&x)[M][N], float* to, int pitch) {
    for (int i = 0; i < M; i++)
        for (int n = 0; n < N; n++) to[i * pitch + n] = total(x[i][n]);
}
#if defined(__AVX512F__)
template <> INLINE void put_totals<4, 4>(const vec (&x)[4][4], float* to, int pitch) {
    __m512 by_key[4];
    for (int i = 0; i < 4; i++) { // in each quarter of a vector, four floats: of x[i][0] to x[i][3]
        __m512 a = (__m512)x[i][0], b = (__m512)x[i][1], c = (__m512)x[i][2], d = (__m512)x[i][3];
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        __m512d first = (__m512d)ab, second = (__m512d)cd;
        by_key[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(first, second), (__m512)_mm512_unpackhi_pd(first, second));
    }
    auto halves = [](__m512 a, __m512 b) { // sums of neighbouring quarters: two of a, two of b
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    __m512 all = halves(halves(by_key[0], by_key[1]), halves(by_key[2], by_key[3]));
    store(to, _mm512_extractf32x4_ps(all, 0));
    store(to + pitch, _mm512_extractf32x4_ps(all, 1));
    store(to + 2 * pitch, _mm512_extractf32x4_ps(all, 2));
    store(to + 3 * pitch, _mm512_extractf32x4_ps(all, 3));
}
#elif defined(__ARM_ARCH_ISA_A64)
#include "arm/neon.h"
#endif

} // namespace
