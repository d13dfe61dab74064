// Attention on a CPU in one pass over the keys. A tile of queries is packed once, with queries along the vector lanes;
// keys and values are read in place. Lanes never exchange data: neither K nor V is transposed, the softmax is a maximum
// and a sum over registers, and all dilated branches of a tile share one softmax. A few queries at long keys (decoding)
// are bound by memory instead: see Rowwise.
//
// Source: Milakov & Gimelshein 2018, online softmax; Dao 2023, FlashAttention-2, for the backward pass; Dao et al. 2023,
// Flash-Decoding, for keys that are split between threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include <pthread.h> // and not <thread>, <chrono>: the library needs no C++ library, see variants.py
#include <time.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// The threads are those of the OpenMP library that PyTorch has loaded: two pools would compete for the cores. GCC's,
// LLVM's and Intel's all have this function, and it is called by name, since clang's pragmas need one of the latter two.
extern "C" void GOMP_parallel(void (*work)(void*), void* given, unsigned threads, unsigned flags);

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
struct Tall { static constexpr int ROWS = 8, SUMS = 16; }; // of a register tile of one vector: see Dot, Mix
#elif defined(__AVX2__)
constexpr int W = 8, NV = 2, MR = 6;
struct Tall { static constexpr int ROWS = 6, SUMS = 12; };
#else
constexpr int W = 4, NV = 4, MR = 4;
struct Tall { static constexpr int ROWS = 6, SUMS = 12; };
#endif
constexpr int T = 64;    // queries per tile: enough work per key that reading keys takes little of the time
constexpr int KEYS = 192; // keys per block, between rescalings: their scores fit the L2 cache; must be even
constexpr int FEW = 16; // queries in a tile up to which a call is bound by memory; at least W
constexpr int FEW_KEYS = 32; // keys per block then: their rows of one head fit the L1 cache
constexpr int PARTIAL = 64; // keys per block where not every lane sees every key
constexpr int CACHE_LINE = 64;
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float MOST = std::numeric_limits<float>::max() / 2; // absolute value of what a bias adds
constexpr float NEVER = std::numeric_limits<float>::infinity();
constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;
static_assert(T % (NV * W) == 0, "a tile is whole register tiles");

typedef float vec __attribute__((vector_size(W * 4)));
typedef int ivec __attribute__((vector_size(W * 4)));

template <class V = vec> inline V load(const void* p) { V x; std::memcpy(&x, p, sizeof x); return x; }
template <class V> inline void store(void* p, V x) { std::memcpy(p, &x, sizeof x); }
inline vec splat(float x) { return x - vec{}; }

inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, 0 for -inf. The polynomial is fitted on [-1/2, 1/2] to a relative error of 2e-8.
inline vec exp2_(vec x) {
    x = larger(splat(-160.0f), x); // in this order NaN stays NaN
#if defined(__AVX512F__)
    vec whole = (vec)_mm512_roundscale_ps((__m512)x, 8);
#else
    const vec shift = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    vec whole = (x + shift) - shift;
#endif
    vec f = x - whole, p = splat(1.534581242594868e-4f);
    for (float c : {1.3399930903688073e-3f, 9.618489071726799e-3f, 5.550328642129898e-2f, 2.4022646248340607e-1f,
                    6.931471824645996e-1f, 1.0f})
        p = p * f + splat(c);
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
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

template <class E> inline void widen_row(const E* from, float* to, int n) {
    for (int i = 0; i < n; i++) to[i] = widen(from[i]);
}
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
template <> inline void widen_row<Half>(const Half* from, float* to, int n) {
    int i = 0;
#if defined(__AVX512F__)
    for (; i + W <= n; i += W) store(to + i, (vec)_mm512_cvtph_ps(load<__m256i>(from + i)));
#else
    for (; i + W <= n; i += W) store(to + i, (vec)_mm256_cvtph_ps(load<__m128i>(from + i)));
#endif
    for (; i < n; i++) to[i] = widen(from[i]);
}
#endif

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
#endif

// Products of operands: floats one by one, or pairs of bfloat16 where the processor supports that.

struct Single {
    using Scalar = float;
    static vec spread(const void* p) { return splat(*(const float*)p); }
    static vec add(vec sum, vec scalar, vec lanes) { return sum + scalar * lanes; }
};

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
struct Pair {
    using Scalar = u32;
    static vec spread(const void* p) { return (vec)_mm512_set1_epi32(load<int>(p)); }
    static vec add(vec sum, vec scalar, vec lanes) {
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)scalar, (__m512bh)lanes);
    }
};
inline u32 pair_of(Bf16 first, Bf16 second) { return first.bits | (u32)second.bits << 16; }
#endif

// Without unrolling, the compiler stores the sums on the stack.
#define UNROLL _Pragma("GCC unroll 16")

// The rows that are read next, fetched from memory line by line, one at each step of a product: all at once, the processor
// would wait for them. Past the end of the rows there is nothing to fetch, and fetching does no harm.
struct Fetch {
    const char* row;
    i64 stride;
    int rows, lines, line = 0;

    void fetch() {
        if (rows <= 0) return;
        __builtin_prefetch(row + line * CACHE_LINE, 0, 2);
        if (++line < lines) return;
        line = 0;
        row += stride;
        rows--;
    }
};
struct NoFetch { void fetch() const {} };

// Three matrix products. `lanes` is [., pitch] with queries along the lanes; rows are `stride` bytes apart; multiply()
// computes the vectors [from, to) of the tile.

// scores[i][lane] = sum_d rows[i][d] * lanes[d][lane]
template <class Op, class Ahead = NoFetch> struct Dot {
    const char* rows;
    i64 stride;
    int depth, pitch;
    const void* lanes;
    float* scores;
    mutable Ahead ahead = {};
    static constexpr int TALL = Tall::ROWS;

    template <int M, int N> void tile(int i0, int n0) const {
        vec sum[M][N] = {};
        const char* row = rows + i0 * stride;
        const float* x = (const float*)lanes + n0 * W;
        for (int d = 0; d < depth; d++) {
            vec lane[N];
            UNROLL for (int n = 0; n < N; n++) lane[n] = load(x + d * pitch + n * W);
            UNROLL for (int i = 0; i < M; i++) {
                vec scalar = Op::spread(row + i * stride + d * 4);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = Op::add(sum[i][n], scalar, lane[n]);
            }
        }
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) store(scores + (i0 + i) * pitch + (n0 + n) * W, sum[i][n]);
    }
    // TALL rows for one vector of lanes; even and odd entries have sums of their own. More rows that lie a power of two
    // apart would share one set of the L1 cache.
    void tall(int i0, int n0) const {
        constexpr int EACH = 2;
        vec sum[EACH][TALL] = {};
        const i64 step = stride, size = pitch;
        const char* row[(TALL + 2) / 3]; // every third: an address has a register and up to twice another one
        UNROLL for (int i = 0; i < TALL; i += 3) row[i / 3] = rows + (i0 + i) * step;
        const float* x = (const float*)lanes + n0 * W;
        Ahead next = ahead; // in registers
        for (int d = 0; d < depth; d += EACH) {
            UNROLL for (int e = 0; e < EACH; e++) {
                if (e > 0 && d + e == depth) break;
                next.fetch();
                vec lane = load(x);
                x += size;
                UNROLL for (int i = 0; i < TALL; i++)
                    sum[e][i] = Op::add(sum[e][i], Op::spread(row[i / 3] + i % 3 * step + e * 4), lane);
            }
            UNROLL for (int i = 0; i < TALL; i += 3) row[i / 3] += EACH * 4;
        }
        ahead = next;
        UNROLL for (int i = 0; i < TALL; i++) store(scores + (i0 + i) * size + n0 * W, sum[0][i] + sum[1][i]);
    }
};

// sums[i][lane] += sum_t rows[t][i] * lanes[t][lane]
template <class Op, class Ahead = NoFetch> struct Mix {
    const char* rows;
    i64 stride;
    int keys, pitch;
    const void* lanes;
    float* sums;
    mutable Ahead ahead = {};
    static constexpr int TALL = Tall::SUMS;

    template <int M, int N> void tile(int i0, int n0) const {
        vec sum[M][N];
        float* to = sums + i0 * pitch + n0 * W;
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = load(to + i * pitch + n * W);
        const char* row = rows + i0 * 4;
        const float* x = (const float*)lanes + n0 * W;
        for (int t = 0; t < keys; t++) {
            vec lane[N];
            UNROLL for (int n = 0; n < N; n++) lane[n] = load(x + t * pitch + n * W);
            UNROLL for (int i = 0; i < M; i++) {
                vec scalar = Op::spread(row + t * stride + i * 4);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = Op::add(sum[i][n], scalar, lane[n]);
            }
        }
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) store(to + i * pitch + n * W, sum[i][n]);
    }
    // The same for one vector of lanes.
    void tall(int i0, int n0) const {
        vec sum[TALL];
        const i64 step = stride, size = pitch;
        float* to = sums + i0 * size + n0 * W;
        UNROLL for (int i = 0; i < TALL; i++) sum[i] = load(to + i * size);
        const char* row = rows + i0 * 4;
        const float* x = (const float*)lanes + n0 * W;
        Ahead next = ahead;
        for (int t = 0; t < keys; t++) {
            next.fetch();
            vec lane = load(x);
            UNROLL for (int i = 0; i < TALL; i++) sum[i] = Op::add(sum[i], Op::spread(row + i * 4), lane);
            x += size;
            row += step;
        }
        ahead = next;
        UNROLL for (int i = 0; i < TALL; i++) store(to + i * size, sum[i]);
    }
};

// rows[t][d] += sum_lane lanes[t][lane] * others[lane][d], with vectors along d; `first` and `last` count lanes, or pairs
// of lanes
template <class Op> struct Spread {
    float* rows;
    i64 stride; // in floats
    const float* lanes;
    int first, last;
    const float* others;
    i64 width;
    static constexpr int TALL = 0;

    template <int M, int N> void tile(int i0, int n0) const {
        vec sum[M][N];
        float* to = rows + i0 * stride + n0 * W;
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = load(to + i * stride + n * W);
        const float* x = lanes + i0 * T;
        for (int l = first; l < last; l++) {
            vec other[N];
            UNROLL for (int n = 0; n < N; n++) other[n] = load(others + l * width + (n0 + n) * W);
            UNROLL for (int i = 0; i < M; i++) {
                vec scalar = Op::spread(x + i * T + l);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = Op::add(sum[i][n], scalar, other[n]);
            }
        }
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) store(to + i * stride + n * W, sum[i][n]);
    }
};

template <int M, int N, class P> inline void columns(const P& product, int i, int n) { product.template tile<M, N>(i, n); }

template <int M, class P> inline void row_of_tiles(const P& product, int i, int from, int to) {
    int n = from;
    for (; n + NV <= to; n += NV) columns<M, NV>(product, i, n);
    if (to - n >= 2) { columns<M, 2>(product, i, n); n += 2; }
    if (n < to) columns<M, 1>(product, i, n);
}

template <class P> void multiply(const P& product, int count, int from, int to) {
    int i = 0;
    if constexpr (P::TALL > 0)
        for (; to - from == 1 && i + P::TALL <= count; i += P::TALL) product.tall(i, from);
    for (; i + MR <= count; i += MR) row_of_tiles<MR>(product, i, from, to);
    if (count - i >= 4) { row_of_tiles<4>(product, i, from, to); i += 4; }
    if (count - i >= 2) { row_of_tiles<2>(product, i, from, to); i += 2; }
    if (i < count) row_of_tiles<1>(product, i, from, to);
}

// The arguments. tables.py describes the tables.

// A tile with step 0 reads its queries from `order`; its runs are listed. A listed run reads its keys from `listed`. With
// step 0 the lanes [lo, hi) see all its keys; with step -1 each key is seen by the lanes of its bit mask.
struct Run {
    i64 key, step, count, lo, hi;
    bool is_listed() const { return step <= 0; }
    bool is_masked() const { return step < 0; }
};
struct Tile { i64 query, step, count, run, runs; };
struct View { void* data; i64 batch, row, head; }; // strides in elements; rows are contiguous

struct Args {
    View q, k, v, out, grad, dq, dk, dv; // dk and dv: `parts` float sums each, rows padded to whole vectors
    float* lse;                          // [batch, heads, q_len]
    const float* grad_lse;               // [batch, heads, q_len], or null
    const Tile* tiles;
    const Run* runs;
    const i64* first_tile;
    const i64* head_class;
    const u8* seen;      // [batch, k_len], or null
    const i64* seq_lens; // [batch], or null
    const i32* order;    // positions of queries, or null
    const i32* listed;   // positions of keys, or null
    const u64* lanes;    // per listed key, a bit mask of the lanes that see it, or null
    const u64* run_lanes; // per run with steps, a bit mask of the lanes that see its keys, or null
    i64 batch, heads, group, q_len, k_len, head_dim, dtype, threads, parts, part_stride;
    // Forward: heads in a tile, which share keys; tiles of neighbouring key heads that read their blocks in turns; splits of
    // each run, each a unit of work.
    i64 packed_heads, together, splits;
    float* states; // with more than one split: state_size() for each tile of a split
    double scale, softcap;      // no softcap: 0
    const float *slopes, *bias; // of ALiBi [., heads], and [., ., q_len, k_len]; or null
    float* dbias;               // [batch, heads, q_len, k_len], or null
    i64 slopes_batch, bias_batch, bias_head, bias_row, bias_key; // strides

    // Floats of what a split leaves: peaks, totals and sums by lane, and the unit of scores.
    i64 state_size() const { return 2 * T + head_dim * std::min<i64>(T, (packed_heads * q_len + W - 1) / W * W) + 1; }

    i64 keys_of(i64 b) const { return seq_lens ? seq_lens[b] : k_len; }
    i64 queries_of(i64 b) const { return seq_lens ? seq_lens[b] : q_len; }
    const u8* seen_in(i64 b) const { return seen ? seen + b * k_len : nullptr; }
    i64 lse_row(i64 b, i64 h) const { return (b * heads + h) * q_len; }
    i64 query(const Tile& tile, i64 i) const { return tile.step ? tile.query + i * tile.step : order[tile.query + i]; }
};

template <class E> inline E* head_of(const View& x, i64 b, i64 h) { return (E*)x.data + b * x.batch + h * x.head; }

i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
i64 ceil_div(i64 a, i64 b) { return -floor_div(-a, b); }

// The keys of a run that queries of a tile see: [first, last) by any query, [full_first, full_last) by all.
struct Span {
    i64 first, last, full_first, full_last;

    Span(const Tile& tile, const Run& run, i64 limit) {
        i64 q0 = tile.query, q1 = tile.query + (tile.count - 1) * tile.step;
        first = std::max<i64>(0, ceil_div(q0 + run.lo - run.key, run.step));
        last = std::min({run.count, floor_div(q1 + run.hi - run.key, run.step) + 1, ceil_div(limit - run.key, run.step)});
        full_first = ceil_div(q1 + run.lo - run.key, run.step);
        full_last = floor_div(q0 + run.hi - run.key, run.step) + 1;
    }
    // The number of keys of the block at t. Fewer where not every query sees every key: lanes are skipped per block.
    int block(i64 t) const {
        if (t >= full_first && t < full_last) return (int)std::min<i64>(KEYS, std::min(full_last, last) - t);
        i64 end = t < full_first ? std::min(last, std::max(full_first, t + 1)) : last;
        return (int)std::min<i64>(PARTIAL, end - t);
    }
    bool partial(i64 t, int keys) const { return t < full_first || t + keys > full_last; }
};

// The lanes that see a key: [from, to).
struct Lanes {
    int from, to;
    Lanes(const Tile& tile, const Run& run, i64 t, i64 packed_heads) {
        i64 at = run.key + t * run.step - tile.query;
        from = (int)std::clamp<i64>(ceil_div(at - run.hi, tile.step) * packed_heads, 0, T);
        to = (int)std::clamp<i64>((floor_div(at - run.lo, tile.step) + 1) * packed_heads, 0, T);
    }
};

// A block of keys of one run, and the vectors of lanes [from, to) that see any of its keys.
struct Block {
    const Tile& tile;
    const Run& run;
    i64 t, limit;
    const u8* seen;        // by position, or null
    const i32* positions;  // of the keys, or null where they are an arithmetic progression
    const u64* lanes;      // bit mask of the lanes that see each key, or null
    u64 run_lanes;         // bit mask of the lanes that see any key of the run
    i64 packed_heads;              // lanes per query
    int keys, from, to, pitch;
    bool partial, hidden;

    Block(const Args& a, const Tile& tile, const Run& run, const Span& span, i64 t, i64 end, i64 b, int pitch)
        : tile(tile), run(run), t(t), limit(a.keys_of(b)), seen(a.seen_in(b)), positions(nullptr), lanes(nullptr),
          run_lanes(a.run_lanes ? a.run_lanes[&run - a.runs] : ~(u64)0), packed_heads(a.packed_heads),
          keys((int)std::min<i64>({span.block(t), end - t, pitch > FEW ? KEYS : FEW_KEYS})), from(0),
          to((int)(tile.count * packed_heads + W - 1) / W), pitch(pitch), partial(span.partial(t, keys)), hidden(false) {
        find_hidden();
        if (!partial || pitch <= FEW) return; // of a few queries, all are weighed
        // Lanes' bounds increase with the key: the first key has the lowest lane, the last key the highest.
        from = Lanes(tile, run, t, packed_heads).from / W;
        to = std::min(to, (Lanes(tile, run, t + keys - 1, packed_heads).to + W - 1) / W);
    }
    Block(const Args& a, const Tile& tile, const Run& run, i64 t, i64 b, int pitch)
        : tile(tile), run(run), t(t), limit(a.keys_of(b)), seen(a.seen_in(b)), positions(a.listed + run.key + t),
          lanes(run.is_masked() ? a.lanes + run.key + t : nullptr), run_lanes(~(u64)0), packed_heads(1),
          keys((int)std::min<i64>(KEYS, run.count - t)), from((int)run.lo / W),
          to((int)(std::min(run.hi, tile.count) + W - 1) / W), pitch(pitch), partial(false), hidden(false) {
        find_hidden();
    }
    i64 key(int i) const { return positions ? positions[i] : run.key + (t + i) * run.step; }

    bool sees(int i) const { return key(i) < limit && (!seen || seen[key(i)]); }
    void find_hidden() {
        if (!seen && !positions) return; // without a mask, the keys of a run with steps are below the limit
        for (int i = 0; i < keys; i++) hidden |= !sees(i);
    }

    void hide(float* scores) const {
        if (partial) hide_far(scores);
        if (lanes || ~run_lanes) hide_unseen(scores);
        fill_hidden(scores, NONE);
    }
    void fill_hidden(float* rows, float value) const {
        for (int i = 0; hidden && i < keys; i++)
            if (!sees(i))
                for (int n = from; n < to; n++) store(rows + i * pitch + n * W, splat(value));
    }
    void hide_far(float* scores) const {
        ivec first;
        for (int i = 0; i < W; i++) first[i] = i;
        for (int i = 0; i < keys; i++) {
            Lanes see(tile, run, t + i, packed_heads);
            for (int n = from; n < to; n++) {
                ivec lane = first + n * W;
                float* p = scores + i * pitch + n * W;
                store(p, ((lane >= see.from) & (lane < see.to)) ? load(p) : splat(NONE));
            }
        }
    }
    void hide_unseen(float* scores) const {
        ivec bit;
        for (int i = 0; i < W; i++) bit[i] = 1 << i;
        for (int i = 0; i < keys; i++)
            for (int n = from; n < to; n++) {
                float* p = scores + i * pitch + n * W;
                u64 see = lanes ? lanes[i] : run_lanes;
                store(p, ((bit & (int)(see >> n * W)) != 0) ? load(p) : splat(NONE));
            }
    }
};

// Calls `visit` with every block of keys that a tile reads, in one of the splits of each run.
template <class F>
void each_block(const Args& a, const Tile& tile, i64 b, int pitch, i64 split, i64 splits, const F& visit) {
    for (i64 r = tile.run; r < tile.run + tile.runs; r++) {
        const Run& run = a.runs[r];
        if (run.is_listed()) {
            for (i64 t = 0; t < run.count;) {
                Block block(a, tile, run, t, b, pitch);
                t += block.keys;
                visit(block);
            }
            continue;
        }
        Span span(tile, run, a.keys_of(b));
        i64 all = std::max<i64>(0, span.last - span.first), end = span.first + all * (split + 1) / splits;
        for (i64 t = span.first + all * split / splits; t < end;) {
            Block block(a, tile, run, span, t, end, b, pitch);
            t += block.keys;
            visit(block);
        }
    }
}

// The memory of one thread.
struct Scratch {
    float *q, *grad, *sums, *scores, *other, *keys, *values, *q_rows, *grad_rows, *dk_rows, *dv_rows, *memory;
    float peaks[T], totals[T], delta[T];
    float *peak = peaks, *total = totals;
    float *own = nullptr, *shared_q, *shared_sums; // `own`: of each of several heads, q, sums, peak and total
    i64 at[T];   // positions of the queries; unused lanes repeat the last query, and their results are dropped
    i64 head[T]; // heads, counted from the tile's first
    bool dead[T]; // unused lanes, and queries without keys
    int width; // of a padded row
    int pitch = T; // lanes from one row of lanes to the next
    int lanes = 0; // that are used

    explicit Scratch(int depth) : width((depth + W - 1) / W * W) {
        i64 lanes = (i64)width * T, block = (i64)KEYS * std::max(T, width);
        i64 sizes[] = {lanes, lanes, lanes, block, block, block, block, lanes, lanes, block, block};
        float** parts[] = {&q, &grad, &sums, &scores, &other, &keys, &values, &q_rows, &grad_rows, &dk_rows, &dv_rows};
        i64 all = 0;
        for (i64 size : sizes) all += size;
        memory = (float*)std::aligned_alloc(CACHE_LINE, sizeof(float) * all);
        float* next = memory;
        for (int i = 0; i < 11; i++) { *parts[i] = next; next += sizes[i]; }
        shared_q = q;
        shared_sums = sums;
    }
    Scratch(const Scratch&) = delete;
    void place(const Args& a, const Tile& tile, i64 packed_heads) {
        lanes = (int)(tile.count * packed_heads);
        for (i64 i = 0; i < T; i++) {
            i64 lane = std::min<i64>(i, lanes - 1);
            at[i] = a.query(tile, lane / packed_heads);
            head[i] = lane % packed_heads;
        }
    }
    i64 row(const View& x, int i) const { return at[i] * x.row + head[i] * x.head; }
    // Heads that read blocks in turns have a memory of their own for q, sums, peak and total.
    void separate(int heads, int depth) {
        if (!own) own = (float*)std::aligned_alloc(CACHE_LINE, sizeof(float) * heads * own_size(depth));
    }
    static i64 own_size(int depth) { return 2 * FEW * (depth + 1); }
    void select(int head, int depth) {
        q = own + head * own_size(depth);
        sums = q + FEW * depth;
        peak = sums + FEW * depth;
        total = peak + FEW;
    }
    void select_shared() {
        q = shared_q;
        sums = shared_sums;
        peak = peaks;
        total = totals;
    }
    ~Scratch() {
        std::free(memory);
        std::free(own);
    }
};

// Packs rows of queries into lanes.
template <class E>
void pack(const View& x, const E* rows, const Scratch& s, int depth, float factor, float* lanes, const bool* dead = nullptr) {
    int whole = (s.lanes + W - 1) / W * W;
    for (int i = 0; i < whole; i++) {
        const E* row = rows + s.row(x, i);
        bool none = dead && dead[i];
        for (int d = 0; d < depth; d++) lanes[d * s.pitch + i] = none ? 0.0f : widen(row[d]) * factor;
    }
}

template <class E>
void pack_rows(const View& x, const E* rows, const i64* at, i64 count, int depth, float* to, int width, const bool* dead) {
    std::memset(to, 0, sizeof(float) * T * width);
    for (int i = 0; i < count; i++) {
        if (dead[i]) continue;
        const E* row = rows + at[i] * x.row;
        for (int d = 0; d < depth; d++) to[i * width + d] = widen(row[d]);
    }
}

#if defined(HAS_PAIRS)
// Packs rows of queries into lanes, two adjacent entries of a row in each. The inputs are not multiplied by `factor` except
// for its sign; the absolute value is returned, to scale the product.
float pack_pairs(const View& x, const Bf16* rows, const Scratch& s, int depth, float factor, float* lanes,
                 const bool* dead = nullptr) {
    u16 sign = factor < 0.0f ? 0x8000 : 0, mask = factor == 0.0f ? 0 : 0xffff;
    auto entry = [&](Bf16 e) { return Bf16{(u16)((e.bits ^ sign) & mask)}; };
    int whole = (s.lanes + W - 1) / W * W;
    for (int i = 0; i < whole; i++) {
        const Bf16* row = rows + s.row(x, i);
        u32 kept = dead && dead[i] ? 0 : 0xffffffff;
        for (int d = 0; d < depth; d += 2)
            ((u32*)lanes)[d / 2 * s.pitch + i] = pair_of(entry(row[d]), entry(row[d + 1])) & kept;
    }
    return factor == 0.0f ? 1.0f : std::fabs(factor); // not 0: hidden scores of -inf must stay -inf
}

// Packs pairs of rows of queries, for sums over rows.
void pack_row_pairs(const View& x, const Bf16* rows, const i64* at, i64 count, int depth, u32* to, int width,
                    const bool* dead) {
    std::memset(to, 0, sizeof(u32) * T / 2 * width);
    for (int i = 0; i < count; i += 2) {
        const Bf16 *first = rows + at[i] * x.row, *second = i + 1 < count ? rows + at[i + 1] * x.row : first;
        u32 mask = (dead[i] ? 0 : 0xffffu) | (i + 1 < count && !dead[i + 1] ? 0xffff0000u : 0);
        for (int d = 0; d < depth; d++) to[i / 2 * width + d] = pair_of(first[d], second[d]) & mask;
    }
}

// Packs pairs of keys of a block; hidden keys become zeros, even if they hold NaN.
void key_pairs(const View& x, const Bf16* head, const Block& block, int depth, u32* to) {
    for (int t = 0; t < block.keys; t += 2) {
        const Bf16* first = head + block.key(t) * x.row;
        bool second = t + 1 < block.keys;
        const Bf16* other = second ? head + block.key(t + 1) * x.row : first;
        u32 mask = (block.sees(t) ? 0xffffu : 0) | (second && block.sees(t + 1) ? 0xffff0000u : 0);
        for (int d = 0; d < depth; d++) to[t / 2 * depth + d] = pair_of(first[d], other[d]) & mask;
    }
}
#endif

// The rows of a block as floats; not copied if they are floats in an arithmetic progression. Hidden keys become zeros, even
// if they hold NaN.
struct Rows { const char* data; i64 stride; };
template <class E> bool is_copied(const Block& block) { return sizeof(E) < sizeof(float) || block.hidden || block.positions; }

template <class E> Rows copied_rows(const View& x, const E* head, const Block& block, int depth, float* to) {
    for (int i = 0; i < block.keys; i++)
        if (block.sees(i)) widen_row(head + block.key(i) * x.row, to + i * depth, depth);
        else std::fill_n(to + i * depth, depth, 0.0f);
    return {(const char*)to, (i64)sizeof(float) * depth};
}
template <class E> Rows rows_of(const View& x, const E* head, const Block& block, int depth, float* to) {
    return copied_rows(x, head, block, depth, to);
}
template <> Rows rows_of<float>(const View& x, const float* head, const Block& block, int depth, float* to) {
    if (is_copied<float>(block)) return copied_rows(x, head, block, depth, to);
    return {(const char*)(head + block.key(0) * x.row), (i64)sizeof(float) * block.run.step * x.row};
}

#if defined(HAS_PAIRS)
// Rows without conversion, for products in pairs. Hidden keys may hold NaN: their scores are overwritten.
Rows pair_rows(const View& x, const Bf16* head, const Block& block, int depth, float* to) {
    i64 size = (i64)sizeof(Bf16);
    if (!block.positions) return {(const char*)(head + block.key(0) * x.row), size * block.run.step * x.row};
    for (int i = 0; i < block.keys; i++) std::memcpy((Bf16*)to + i * depth, head + block.key(i) * x.row, size * depth);
    return {(const char*)to, size * depth};
}
#endif

// Caps the scores of a block, and adds ALiBi's terms and the bias. Lanes hold heads from h on; `unit` scales scores to
// powers of 2.
void change_scores(const Args& a, const Scratch& s, const Block& block, i64 b, i64 h, float unit) {
    if (a.softcap == 0.0 && !a.slopes && !a.bias) return;
    const float to_share = a.softcap == 0.0 ? 0.0f : (float)(unit * LN_2 / a.softcap), from_natural = (float)(LOG2_E / unit);
    const float cap = (float)a.softcap * from_natural;
    for (int n = block.from; n < block.to; n++) {
        float* x = s.scores + n * W;
        if (a.softcap != 0.0)
            for (int i = 0; i < block.keys; i++) store(x + i * s.pitch, tanh_(load(x + i * s.pitch) * to_share) * cap);
        if (a.slopes) {
            ivec at;
            vec slope;
            for (int l = 0; l < W; l++) {
                at[l] = (int)(s.at[n * W + l] + a.k_len - a.q_len);
                slope[l] = a.slopes[b * a.slopes_batch + h + s.head[n * W + l]] * from_natural;
            }
            for (int i = 0; i < block.keys; i++) {
                vec far = __builtin_convertvector(at - (int)block.key(i), vec);
                store(x + i * s.pitch, load(x + i * s.pitch) - slope * larger(far, -far));
            }
        }
        if (a.bias) {
            const float* rows[W];
            for (int l = 0; l < W; l++) {
                i64 lane = n * W + l;
                rows[l] = a.bias + b * a.bias_batch + (h + s.head[lane]) * a.bias_head + s.at[lane] * a.bias_row;
            }
            for (int i = 0; i < block.keys; i++) {
                i64 key = block.key(i) * a.bias_key;
                vec added;
                for (int l = 0; l < W; l++) added[l] = rows[l][key];
                vec scaled = added == splat(NONE) ? added : larger(added * from_natural, splat(-MOST));
                store(x + i * s.pitch, load(x + i * s.pitch) + scaled);
            }
        }
    }
}

// Adds dS of a vector of lanes to the gradient of the bias.
inline void add_dbias(const Args& a, const Scratch& s, const Block& block, i64 b, i64 h, int t, int n, int count, vec ds) {
    for (int l = 0; l < W && n * W + l < count; l++)
        a.dbias[(a.lse_row(b, h) + s.at[n * W + l]) * a.k_len + block.key(t)] += ds[l];
}

// Weights for the product with V: as floats, or rounded to bfloat16 with two keys per lane.
struct Floats {
    template <class Weight> static void put(const Scratch& s, const Block& block, int n, const Weight& weight) {
        for (int t = 0; t < block.keys; t++) store(s.scores + t * s.pitch + n * W, weight(t));
    }
    static void scale_sums(const Scratch& s, int n, vec factor, int depth) {
        for (int d = 0; d < depth; d++) {
            float* sum = s.sums + d * s.pitch + n * W;
            store(sum, load(sum) * factor);
        }
    }
};

// The same for sums with vectors along d.
struct FloatRows : Floats {
    static void scale_sums(const Scratch& s, int n, vec factor, int depth) {
        for (int i = 0; i < W && n * W + i < s.lanes; i++) {
            float* sum = s.sums + (n * W + i) * depth;
            for (int d = 0; d < depth; d += W) store(sum + d, load(sum + d) * splat(factor[i]));
        }
    }
};

#if defined(HAS_PAIRS)
constexpr bool HAS_ROW_PAIRS = true;
using RowProduct = Pair;
struct Pairs : Floats {
    static __m512i round(vec x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
    template <class Weight> static void put(const Scratch& s, const Block& block, int n, const Weight& weight) {
        int t = 0;
        for (; t + 1 < block.keys; t += 2) {
            __m512i first = round(weight(t)), second = round(weight(t + 1));
            store(s.other + t / 2 * s.pitch + n * W, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
        }
        if (t < block.keys) store(s.other + t / 2 * s.pitch + n * W, round(weight(t)));
    }
};

// The same for sums with vectors along d.
struct RowPairs : Pairs {
    static void scale_sums(const Scratch& s, int n, vec factor, int depth) { FloatRows::scale_sums(s, n, factor, depth); }
};
#else
constexpr bool HAS_ROW_PAIRS = false;
using RowProduct = Single;
using RowPairs = FloatRows;
#endif

// Turns scores into weights relative to the running maximum, and rescales earlier sums. `unit` scales scores to powers of 2.
template <class Form> void weigh(const Block& block, float unit, int depth, Scratch& s) {
    for (int n = block.from; n < block.to; n++) {
        float* x = s.scores + n * W;
        vec old = load(s.peak + n * W), peak = old;
        for (int t = 0; t < block.keys; t++) peak = larger(peak, load(x + t * s.pitch));
        // Subtract before scaling: scores are large, and rounding must be the same for all.
        vec base = peak == splat(NONE) ? vec{} : peak, fade = exp2_((old - base) * unit);
        vec total = load(s.total + n * W) * fade;
        Form::put(s, block, n, [&](int t) {
            vec p = exp2_((load(x + t * s.pitch) - base) * unit);
            total += p;
            return p;
        });
        store(s.peak + n * W, peak);
        store(s.total + n * W, total);
        bool same = true;
        for (int i = 0; i < W; i++) same &= fade[i] == 1.0f;
        if (!same) Form::scale_sums(s, n, fade, depth);
    }
}

// The key head whose products a forward pass computes.
template <class E> struct KeyHead {
    const Args& a;
    Scratch& s;
    const E *k, *v;
    const int depth;
    float unit = 1.0f; // scales scores to powers of 2

    KeyHead(const Args& a, Scratch& s) : a(a), s(s), depth((int)a.head_dim) {}
    void select(i64 b, i64 h) {
        k = head_of<E>(a.k, b, h / a.group);
        v = head_of<E>(a.v, b, h / a.group);
    }
    // Rows of the next block of the same run; other patterns than runs are not bound by memory.
    Fetch next_rows(const View& x, const E* head, const Block& block) const {
        const i64 size = (i64)sizeof(E), step = block.run.step * x.row;
        const E* row = head + block.run.key * x.row + (block.t + block.keys) * step;
        return {(const char*)row, step * size, block.positions ? 0 : FEW_KEYS, (int)(depth * size + CACHE_LINE - 1) / CACHE_LINE};
    }
    template <class Op> void dot(const Block& block, Rows rows, int steps) const {
        if (s.pitch > FEW) multiply(Dot<Op>{rows.data, rows.stride, steps, s.pitch, s.q, s.scores}, block.keys, block.from, block.to);
        else multiply(Dot<Op, Fetch>{rows.data, rows.stride, steps, s.pitch, s.q, s.scores, next_rows(a.k, k, block)},
                      block.keys, block.from, block.to);
    }
    template <class Op> void add(const Block& block, Rows rows, int steps, const float* weights) const {
        if (s.pitch > FEW) multiply(Mix<Op>{rows.data, rows.stride, steps, s.pitch, weights, s.sums}, depth, block.from, block.to);
        else multiply(Mix<Op, Fetch>{rows.data, rows.stride, steps, s.pitch, weights, s.sums, next_rows(a.v, v, block)},
                      depth, block.from, block.to);
    }
};

// The products of a tile's forward pass in floats, for any input type.
template <class E> struct Wide : KeyHead<E> {
    using Weights = Floats;
    using KeyHead<E>::KeyHead, KeyHead<E>::a, KeyHead<E>::s, KeyHead<E>::k, KeyHead<E>::v, KeyHead<E>::depth;

    void begin(i64 b, i64 h) { pack(a.q, head_of<E>(a.q, b, h), s, depth, (float)(a.scale * LOG2_E), s.q); }
    void score(const Block& block) { this->template dot<Single>(block, rows_of(a.k, k, block, depth, s.keys), depth); }
    void mix(const Block& block) {
        this->template add<Single>(block, rows_of(a.v, v, block, depth, s.values), block.keys, s.scores);
    }
};

#if defined(HAS_PAIRS)
// The same with pairs of bfloat16, summed in floats: adjacent entries of a row of K, adjacent rows of V.
struct Paired : KeyHead<Bf16> {
    using Weights = Pairs;
    using KeyHead<Bf16>::KeyHead;

    void begin(i64 b, i64 h) {
        unit = pack_pairs(a.q, head_of<Bf16>(a.q, b, h), s, depth, (float)(a.scale * LOG2_E), s.q);
    }
    void score(const Block& block) { dot<Pair>(block, pair_rows(a.k, k, block, depth, s.keys), depth / 2); }
    void mix(const Block& block) {
        key_pairs(a.v, v, block, depth, (u32*)s.values);
        add<Pair>(block, {(const char*)s.values, 4 * depth}, (block.keys + 1) / 2, s.other);
    }
};
#endif

// The products of very few queries, with vectors along d: of most lanes of a vector of queries, nothing would be used.
constexpr int GROUP = 4; // queries and keys of a register tile, and its vectors of V
template <class E, bool PAIRS = false> struct Rowwise : KeyHead<E> {
    using Weights = std::conditional_t<PAIRS, RowPairs, FloatRows>;
    using Product = std::conditional_t<PAIRS, RowProduct, Single>;
    using KeyHead<E>::a, KeyHead<E>::s, KeyHead<E>::k, KeyHead<E>::v, KeyHead<E>::depth, KeyHead<E>::unit;
    const int groups;

    static bool fits(const Args& a, const Scratch& s) {
        return s.lanes <= 2 * GROUP && a.head_dim % ((PAIRS ? 2 : 1) * W) == 0 && !a.order;
    }
    Rowwise(const Args& a, Scratch& s) : KeyHead<E>(a, s), groups((s.lanes + GROUP - 1) / GROUP) {
        std::memset(s.scores, 0, sizeof(float) * FEW_KEYS * s.pitch); // of unused lanes
    }
    void begin(i64 b, i64 h) {
        const E* q = head_of<E>(a.q, b, h);
        float factor = (float)(a.scale * LOG2_E);
        if (PAIRS) { // as pack_pairs() has them
            unit = factor == 0.0f ? 1.0f : std::fabs(factor);
            float sign = factor == 0.0f ? 0.0f : factor < 0.0f ? -1.0f : 1.0f;
            for (int i = 0; i < groups * GROUP; i++)
                for (int d = 0; d < depth; d++)
                    ((Bf16*)s.q)[i * depth + d] = narrow<Bf16>(sign == 0.0f ? 0.0f : widen(q[s.row(a.q, i) + d]) * sign);
        } else
            for (int i = 0; i < groups * GROUP; i++)
                for (int d = 0; d < depth; d++) s.q[i * depth + d] = widen(q[s.row(a.q, i) + d]) * factor;
    }
    const E* row(const View& x, const E* head, const Block& block, int i) const {
        return head + (block.run.key + (block.t + i) * block.run.step) * x.row;
    }
    // Bytes from a row to that of the next block, which is fetched from memory line by line while this one is computed.
    i64 ahead(const View& x, const Block& block) const { return FEW_KEYS * block.run.step * x.row * (i64)sizeof(E); }
    static void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

    // Rows that both groups of queries read are converted once.
    bool copies() const { return sizeof(E) < sizeof(float) && groups > 1 && !PAIRS; }
    const float* copy(const E* from, float* to, i64 next) const {
        for (int d = 0; d < depth; d += W) {
            fetch((const char*)(from + d) + next);
            store(to + d, wide(from + d));
        }
        return to;
    }

    // Scores of M keys for the lanes from `lane` on.
    template <int M, class F> void dot(const F* const* rows, int t, int lane, i64 next) const {
        using Element = std::conditional_t<PAIRS, E, float>;
        constexpr int STEP = PAIRS ? 2 * W : W;
        const Element* q = (const Element*)s.q + lane * depth;
        vec sum[M][GROUP];
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < GROUP; n++) sum[i][n] = vec{};
        for (int d = 0; d < depth; d += STEP) {
            vec key[M];
            UNROLL for (int i = 0; i < M; i++) {
                if (next) fetch((const char*)(rows[i] + d) + next);
                if constexpr (PAIRS) key[i] = load(rows[i] + d);
                else key[i] = wide(rows[i] + d);
            }
            UNROLL for (int n = 0; n < GROUP; n++) {
                vec one = load(q + n * depth + d);
                UNROLL for (int i = 0; i < M; i++) sum[i][n] = Product::add(sum[i][n], one, key[i]);
            }
        }
        put_totals<M, GROUP>(sum, s.scores + t * s.pitch + lane, s.pitch);
    }
    template <class F> void dots(const F* const* rows, int keys, int t, i64 next) const {
        for (int lane = 0; lane < groups * GROUP; lane += GROUP, next = 0)
            if (keys == GROUP) dot<GROUP>(rows, t, lane, next);
            else for (int i = 0; i < keys; i++) dot<1>(rows + i, t + i, lane, next);
    }
    void score(const Block& block) const {
        const i64 next = ahead(a.k, block);
        for (int t = 0; t < block.keys; t += GROUP) {
            int keys = std::min(GROUP, block.keys - t);
            const E* rows[GROUP];
            for (int i = 0; i < keys; i++) rows[i] = row(a.k, k, block, t + i);
            if (copies()) {
                const float* copied[GROUP];
                for (int i = 0; i < keys; i++) copied[i] = copy(rows[i], s.keys + i * depth, next);
                dots(copied, keys, t, 0);
            } else dots(rows, keys, t, next);
        }
    }

    // Adds N vectors of the values at d, weighed, to the sums of the lanes from `lane` on.
    template <int N, class F> void add(const Block& block, const F* values, i64 stride, int lane, int d, i64 next) const {
        vec sum[GROUP][N];
        float* to = s.sums + lane * depth + d;
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = load(to + i * depth + n * W);
        const float* weights = s.scores + lane;
        const int pitch = s.pitch;
        for (int t = 0; t < block.keys; t++) {
            if (block.hidden && !block.sees(t)) continue; // it may hold NaN
            const F* from = values + t * stride + d;
            vec value[N];
            UNROLL for (int n = 0; n < N; n++) {
                if (next) fetch((const char*)(from + n * W) + next);
                value[n] = wide(from + n * W);
            }
            UNROLL for (int i = 0; i < GROUP; i++) {
                vec weight = splat(weights[t * pitch + i]);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] += value[n] * weight;
            }
        }
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int n = 0; n < N; n++) store(to + i * depth + n * W, sum[i][n]);
    }
#if defined(HAS_PAIRS)
    // The same by pairs of keys. A hidden key may hold NaN: its weight is 0.
    template <int N> void add_pairs(const Block& block, int lane, int d, i64 next) const {
        vec sum[GROUP][N];
        float* to = s.sums + lane * depth + d;
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = load(to + i * depth + n * W);
        __m512i low; // entries of two rows in turns
        for (int i = 0; i < 32; i++) ((u16*)&low)[i] = (u16)(i / 2 + i % 2 * 32);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        const int pitch = s.pitch;
        for (int t = 0; t < block.keys; t += 2) {
            const E *first = row(a.v, v, block, t) + d, *second = row(a.v, v, block, t + 1) + d;
            bool one = !block.hidden || block.sees(t), other = t + 1 < block.keys && (!block.hidden || block.sees(t + 1));
            vec value[N];
            UNROLL for (int n = 0; n < N; n += 2) {
                if (next) fetch((const char*)(first + n * W) + next);
                if (next) fetch((const char*)(second + n * W) + next);
                __m512i x = one ? load<__m512i>(first + n * W) : _mm512_setzero_si512();
                __m512i y = other ? load<__m512i>(second + n * W) : _mm512_setzero_si512();
                value[n] = (vec)_mm512_permutex2var_epi16(x, low, y);
                value[n + 1] = (vec)_mm512_permutex2var_epi16(x, high, y);
            }
            const float* weights = s.other + t / 2 * pitch + lane;
            UNROLL for (int i = 0; i < GROUP; i++) {
                vec weight = Pair::spread(weights + i);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = Pair::add(sum[i][n], weight, value[n]);
            }
        }
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int n = 0; n < N; n++) store(to + i * depth + n * W, sum[i][n]);
    }
#else
    template <int N> void add_pairs(const Block&, int, int, i64) const {}
#endif
    void mix(const Block& block) const {
        const i64 next = ahead(a.v, block);
        if (!copies()) return mixed(block, row(a.v, v, block, 0), block.run.step * a.v.row, next);
        for (int t = 0; t < block.keys; t++) copy(row(a.v, v, block, t), s.values + t * depth, next);
        mixed(block, s.values, depth, 0);
    }
    template <class F> void mixed(const Block& block, const F* values, i64 stride, i64 next) const {
        for (int lane = 0; lane < groups * GROUP; lane += GROUP, next = 0) {
            int d = 0;
            for (; d + GROUP * W <= depth; d += GROUP * W)
                if constexpr (PAIRS) add_pairs<GROUP>(block, lane, d, next);
                else add<GROUP>(block, values, stride, lane, d, next);
            for (; d < depth; d += (PAIRS ? 2 : 1) * W)
                if constexpr (PAIRS) add_pairs<2>(block, lane, d, next);
                else add<1>(block, values, stride, lane, d, next);
        }
    }
};
// Of each element type: bfloat16 in pairs where the processor has them and rows are whole vectors of pairs.
template <class E> bool is_rowwise(const Args& a, const Scratch& s) { return Rowwise<E>::fits(a, s); }
template <class E> bool is_rowwise_pairs(const Args& a, const Scratch& s) {
    return HAS_ROW_PAIRS && std::is_same_v<E, Bf16> && Rowwise<E, true>::fits(a, s);
}

// Results of queries without keys.
template <class E> void forward_nothing(const Args& a, const Tile& tile, i64 b, i64 h) {
    E* out = head_of<E>(a.out, b, h);
    float* lse = a.lse + a.lse_row(b, h);
    for (i64 i = 0; i < tile.count; i++) {
        i64 p = a.query(tile, i);
        std::fill_n(out + p * a.out.row, a.head_dim, narrow<E>(0.0f));
        lse[p] = NONE;
    }
}

// `sums` are [d][lane], or [lane][d] if `rows`.
template <class E> void write_results(const Args& a, i64 b, i64 h, float unit, bool rows, const Scratch& s) {
    const int depth = (int)a.head_dim, lane_step = rows ? depth : 1, step = rows ? 1 : s.pitch;
    E* out = head_of<E>(a.out, b, h);
    for (int i = 0; i < s.lanes; i++) {
        i64 p = s.at[i];
        bool any = s.total[i] != 0.0f && p < a.queries_of(b);
        float share = any ? 1.0f / s.total[i] : 0.0f;
        E* row = out + s.row(a.out, i);
        for (int d = 0; d < depth; d++) row[d] = narrow<E>(any ? s.sums[d * step + i * lane_step] * share : 0.0f);
        a.lse[a.lse_row(b, h + s.head[i]) + p] = any ? (float)(((double)s.peak[i] * unit + std::log2(s.total[i])) * LN_2) : NONE;
    }
}

template <class E> void end_split(const Args& a, i64 b, i64 h, float unit, bool rows, float* state, const Scratch& s) {
    if (!state) return write_results<E>(a, b, h, unit, rows, s);
    std::memcpy(state, s.peak, sizeof(float) * s.pitch);
    std::memcpy(state + T, s.total, sizeof(float) * s.pitch);
    std::memcpy(state + 2 * T, s.sums, sizeof(float) * a.head_dim * s.pitch);
    state[a.state_size() - 1] = unit;
}

// One split of the keys of `together` tiles, which read their blocks in turns: each has `packed_heads` heads, the first one
// those from h on.
template <class E, class Products>
void forward_turns(const Args& a, const Tile& tile, i64 b, i64 h, i64 split, float* state, Scratch& s) {
    const int depth = (int)a.head_dim, heads = (int)a.together;
    Products products(a, s);
    auto select = [&](int i) {
        if (heads > 1) s.select(i, depth);
        products.select(b, h + i * a.packed_heads);
    };
    if (heads > 1) s.separate(heads, depth);
    else s.select_shared();
    for (int i = 0; i < heads; i++) {
        select(i);
        products.begin(b, h + i * a.packed_heads);
        std::fill_n(s.peak, s.pitch, NONE);
        std::fill_n(s.total, s.pitch, 0.0f);
        std::memset(s.sums, 0, sizeof(float) * depth * s.pitch);
    }
    each_block(a, tile, b, s.pitch, split, a.splits, [&](const Block& block) {
        for (int i = 0; i < heads; i++) {
            select(i);
            products.score(block);
            change_scores(a, s, block, b, h + i * a.packed_heads, products.unit);
            block.hide(s.scores);
            weigh<typename Products::Weights>(block, products.unit, depth, s);
            products.mix(block);
        }
    });
    for (int i = 0; i < heads; i++) {
        select(i);
        float* own = state ? state + i * a.state_size() : nullptr;
        end_split<E>(a, b, h + i * a.packed_heads, products.unit, is_rowwise<E>(a, s), own, s);
    }
}

template <class E, class Products>
void forward_tile(const Args& a, const Tile& tile, i64 b, i64 h, i64 split, float* state, Scratch& s) {
    if (!tile.runs) {
        for (i64 i = 0; i < a.packed_heads * a.together && split == 0; i++) forward_nothing<E>(a, tile, b, h + i);
        return;
    }
    s.place(a, tile, a.packed_heads);
    s.pitch = (s.lanes + W - 1) / W * W;
    if (is_rowwise_pairs<E>(a, s)) forward_turns<E, Rowwise<E, HAS_ROW_PAIRS && std::is_same_v<E, Bf16>>>(a, tile, b, h, split, state, s);
    else if (is_rowwise<E>(a, s)) forward_turns<E, Rowwise<E>>(a, tile, b, h, split, state, s);
    else forward_turns<E, Products>(a, tile, b, h, split, state, s);
}

// The softmax over all keys, of the states of their splits, of which each is `step` floats after the one before.
template <class E>
void join_splits(const Args& a, const Tile& tile, i64 b, i64 h, const float* states, i64 step, Scratch& s) {
    if (!tile.runs) return;
    s.place(a, tile, a.packed_heads);
    s.pitch = (s.lanes + W - 1) / W * W;
    const bool rows = is_rowwise<E>(a, s);
    s.select_shared();
    const int size = (int)a.head_dim * s.pitch;
    const float unit = states[a.state_size() - 1];
    std::memset(s.sums, 0, sizeof(float) * size);
    float fade[T];
    for (int n = 0; n < s.pitch; n += W) {
        vec peak = splat(NONE);
        for (i64 i = 0; i < a.splits; i++) peak = larger(peak, load(states + i * step + n));
        store(s.peak + n, peak);
        store(s.total + n, vec{});
    }
    for (i64 i = 0; i < a.splits; i++) {
        const float* state = states + i * step;
        for (int n = 0; n < s.pitch; n += W) {
            vec peak = load(s.peak + n), base = peak == splat(NONE) ? vec{} : peak;
            vec factor = exp2_((load(state + n) - base) * unit);
            store(fade + n, factor);
            store(s.total + n, load(s.total + n) + load(state + T + n) * factor);
        }
        for (int at = 0; at < size; at++) s.sums[at] += state[2 * T + at] * fade[rows ? at / (int)a.head_dim : at % s.pitch];
    }
    write_results<E>(a, b, h, unit, rows, s);
}

// Where other programs take the cores, a call may wait for a thread that does not run far longer than it works, and
// spins meanwhile. After such a wait calls run in one thread for some time, longer if it happens again soon.
struct Waits {
    static constexpr i64 LEAST = 200'000, OVER_WORK = 2; // of a wait that is too long: ns, and caller's own times of work
    static constexpr i64 UNIT = 16, MOST = 256 * UNIT, LONGEST = 1'000'000'000; // time in one thread: waits / UNIT, and ns
    std::atomic<i64> until{0}, length{UNIT};

    static i64 now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1'000'000'000 + t.tv_nsec;
    }

    void note(i64 start, i64 worked, i64 end) {
        i64 waited = end - worked, units = length.load(std::memory_order_relaxed);
        bool too_long = waited > LEAST && waited > OVER_WORK * (worked - start);
        if (too_long) until.store(end + std::min(units * waited / UNIT, LONGEST), std::memory_order_relaxed);
        units = too_long ? std::min(4 * units, MOST) : std::max(units - units / UNIT, UNIT);
        length.store(units, std::memory_order_relaxed);
    }
};
Waits waits;

// Calls work(next) in each thread; the threads take units of work in turns by next++. Which thread has which unit does not
// matter to the results.
template <class Work> void in_threads(i64 threads, const Work& work) {
    struct Shared {
        const Work& work;
        pthread_t caller;
        std::atomic<i64> next;
        i64 worked;
    } shared{work, pthread_self(), {0}, 0};
    // A thread's first call makes its pool: threads that begin may be waited for on an idle machine too.
    static thread_local bool pooled = false;
    i64 start = Waits::now();
    if (threads == 1 || start < waits.until.load(std::memory_order_relaxed)) return work(shared.next);
    GOMP_parallel([](void* given) {
        Shared& s = *(Shared*)given;
        s.work(s.next);
        if (pthread_equal(pthread_self(), s.caller)) s.worked = Waits::now();
    }, &shared, (unsigned)threads, 0);
    if (pooled) waits.note(start, shared.worked, Waits::now());
    pooled = true;
}

// Calls visit(unit, tile, b, h, split, scratch) for every split of every tile, or of `together` tiles, from head h on.
template <class F> void each_tile(const Args& a, i64 splits, const F& visit) {
    in_threads(a.threads, [&](std::atomic<i64>& next) {
        Scratch s((int)a.head_dim);
        // A head's tiles in this split begin with unit `first`. Rows of the heads lie side by side in memory: all heads
        // read a split before the next one begins.
        i64 unit = next++, first = 0;
        for (i64 b = 0; b < a.batch; b++)
            for (i64 split = 0; split < splits; split++)
                for (i64 h = 0; h < a.heads; h += a.packed_heads * a.together) {
                    i64 tile = a.first_tile[a.head_class[h]], last = first + a.first_tile[a.head_class[h] + 1] - tile;
                    for (; unit < last; unit = next++) visit(unit, a.tiles[tile + unit - first], b, h, split, s);
                    first = last;
                }
    });
}

template <class E, class Products> void forward(const Args& a) {
    const i64 size = a.together * a.state_size();
    each_tile(a, a.splits, [&](i64 unit, const Tile& tile, i64 b, i64 h, i64 split, Scratch& s) {
        forward_tile<E, Products>(a, tile, b, h, split, a.splits > 1 ? a.states + unit * size : nullptr, s);
    });
    if (a.splits == 1) return;
    i64 row = 0; // tiles of all heads of a batch row: from one split's states to the next one's
    for (i64 h = 0; h < a.heads; h += a.packed_heads * a.together) row += a.first_tile[a.head_class[h] + 1] - a.first_tile[a.head_class[h]];
    each_tile(a, 1, [&](i64 unit, const Tile& tile, i64 b, i64 h, i64, Scratch& s) {
        const float* first = a.states + (b * row * a.splits + unit - b * row) * size;
        for (i64 i = 0; i < a.together; i++)
            join_splits<E>(a, tile, b, h + i * a.packed_heads, first + i * a.state_size(), row * size, s);
    });
}

// The products of a backward pass in floats. `scores` holds the weights P, `other` holds dP and then dS.
template <class E> struct WideBack {
    const Args& a;
    Scratch& s;
    const E *k, *v;
    float unit = 1.0f;

    WideBack(const Args& a, Scratch& s, const Tile& tile, i64 b, i64 h)
        : a(a), s(s), k(head_of<E>(a.k, b, h / a.group)), v(head_of<E>(a.v, b, h / a.group)) {
        const E *q = head_of<E>(a.q, b, h), *grad = head_of<E>(a.grad, b, h);
        pack(a.q, q, s, (int)a.head_dim, (float)(a.scale * LOG2_E), s.q, s.dead);
        pack(a.grad, grad, s, (int)a.head_dim, 1.0f, s.grad, s.dead);
        pack_rows(a.q, q, s.at, tile.count, (int)a.head_dim, s.q_rows, s.width, s.dead);
        pack_rows(a.grad, grad, s.at, tile.count, (int)a.head_dim, s.grad_rows, s.width, s.dead);
    }
    void score(const Block& block) {
        int depth = (int)a.head_dim;
        Rows kr = rows_of(a.k, k, block, depth, s.keys), vr = rows_of(a.v, v, block, depth, s.values);
        multiply(Dot<Single>{kr.data, kr.stride, depth, T, s.q, s.scores}, block.keys, block.from, block.to);
        multiply(Dot<Single>{vr.data, vr.stride, depth, T, s.grad, s.other}, block.keys, block.from, block.to);
    }
    template <class Slope> void weigh(const Block& block, const Slope& slope) {
        for (int t = 0; t < block.keys; t++)
            for (int n = block.from; n < block.to; n++) {
                vec p, ds;
                slope(t, n, p, ds);
                store(s.scores + t * T + n * W, p);
                store(s.other + t * T + n * W, ds);
            }
    }
    void add(const Block& block, int count, float* dk, i64 dk_stride, float* dv, i64 dv_stride) {
        int depth = (int)a.head_dim, vectors = s.width / W, first = block.from * W, last = std::min(block.to * W, count);
        Rows kr = is_copied<E>(block) ? Rows{(const char*)s.keys, (i64)sizeof(float) * depth} // by score()
                                      : rows_of(a.k, k, block, depth, s.keys);
        multiply(Mix<Single>{kr.data, kr.stride, block.keys, T, s.other, s.sums}, depth, block.from, block.to);
        multiply(Spread<Single>{dk, dk_stride, s.other, first, last, s.q_rows, s.width}, block.keys, 0, vectors);
        multiply(Spread<Single>{dv, dv_stride, s.scores, first, last, s.grad_rows, s.width}, block.keys, 0, vectors);
    }
};

#if defined(HAS_PAIRS)
// The same with pairs of bfloat16. For dk and dv, P and dS are rounded in place, row by row; for dq, `values` holds dS with
// two keys per lane.
struct PairedBack {
    const Args& a;
    Scratch& s;
    const Bf16 *k, *v;
    float unit;

    PairedBack(const Args& a, Scratch& s, const Tile& tile, i64 b, i64 h)
        : a(a), s(s), k(head_of<Bf16>(a.k, b, h / a.group)), v(head_of<Bf16>(a.v, b, h / a.group)) {
        const Bf16 *q = head_of<Bf16>(a.q, b, h), *grad = head_of<Bf16>(a.grad, b, h);
        unit = pack_pairs(a.q, q, s, (int)a.head_dim, (float)(a.scale * LOG2_E), s.q, s.dead);
        pack_pairs(a.grad, grad, s, (int)a.head_dim, 1.0f, s.grad, s.dead);
        pack_row_pairs(a.q, q, s.at, tile.count, (int)a.head_dim, (u32*)s.q_rows, s.width, s.dead);
        pack_row_pairs(a.grad, grad, s.at, tile.count, (int)a.head_dim, (u32*)s.grad_rows, s.width, s.dead);
    }
    void score(const Block& block) {
        int depth = (int)a.head_dim;
        Rows kr = pair_rows(a.k, k, block, depth, s.keys), vr = pair_rows(a.v, v, block, depth, s.values);
        multiply(Dot<Pair>{kr.data, kr.stride, depth / 2, T, s.q, s.scores}, block.keys, block.from, block.to);
        multiply(Dot<Pair>{vr.data, vr.stride, depth / 2, T, s.grad, s.other}, block.keys, block.from, block.to);
    }
    template <class Slope> void weigh(const Block& block, const Slope& slope) {
        for (int t = 0; t < block.keys; t += 2)
            for (int n = block.from; n < block.to; n++) {
                __m512i first = put(t, n, slope), second = _mm512_setzero_si512();
                if (t + 1 < block.keys) second = put(t + 1, n, slope);
                store(s.values + t / 2 * T + n * W, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
            }
    }
    template <class Slope> __m512i put(int t, int n, const Slope& slope) {
        vec p, ds;
        slope(t, n, p, ds);
        __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)ds);
        store((u16*)(s.scores + t * T) + n * W, (__m256i)_mm512_cvtneps_pbh((__m512)p));
        store((u16*)(s.other + t * T) + n * W, rounded);
        return _mm512_cvtepu16_epi32(rounded);
    }
    void add(const Block& block, int count, float* dk, i64 dk_stride, float* dv, i64 dv_stride) {
        int depth = (int)a.head_dim, vectors = s.width / W, pairs = (block.keys + 1) / 2;
        key_pairs(a.k, k, block, depth, (u32*)s.keys);
        multiply(Mix<Pair>{(const char*)s.keys, 4 * depth, pairs, T, s.values, s.sums}, depth, block.from, block.to);
        int first = block.from * W / 2, last = (std::min(block.to * W, count) + 1) / 2;
        multiply(Spread<Pair>{dk, dk_stride, s.other, first, last, s.q_rows, s.width}, block.keys, 0, vectors);
        multiply(Spread<Pair>{dv, dv_stride, s.scores, first, last, s.grad_rows, s.width}, block.keys, 0, vectors);
    }
};
#endif

// Adds the rows of a block to the rows of its keys.
void add_rows(const Block& block, const float* rows, int width, float* to, i64 stride) {
    for (int i = 0; i < block.keys; i++) {
        float* row = to + block.key(i) * stride;
        for (int d = 0; d < width; d += W) store(row + d, load(row + d) + load(rows + i * width + d));
    }
}

// P = exp(s - lse), dS = P * (dP - rowsum(dO * out) + dlse): with the lse of all branches, each branch is a term of a sum.
template <class E, class Products>
void backward_tile(const Args& a, const Tile& tile, i64 b, i64 h, float* dk, float* dv, Scratch& s) {
    const int depth = (int)a.head_dim, count = (int)tile.count;
    const E *out = head_of<E>(a.out, b, h), *grad = head_of<E>(a.grad, b, h);
    E* dq = head_of<E>(a.dq, b, h);
    if (!tile.runs) {
        for (int i = 0; i < count; i++) std::fill_n(dq + a.query(tile, i) * a.dq.row, depth, narrow<E>(0.0f));
        return;
    }
    s.place(a, tile, 1);
    std::memset(s.sums, 0, sizeof(float) * depth * T);
    for (int i = 0; i < T; i++) {
        i64 p = s.at[i];
        float lse = a.lse[a.lse_row(b, h) + p], delta = 0.0f;
        for (int d = 0; d < depth; d++) delta += widen(out[p * a.out.row + d]) * widen(grad[p * a.grad.row + d]);
        // Unused lanes and queries without keys have weight 0, even if their gradient is NaN.
        s.dead[i] = i >= count || lse == NONE;
        s.peak[i] = s.dead[i] ? NEVER : (float)(lse * LOG2_E);
        s.delta[i] = s.dead[i] ? 0.0f : delta - (a.grad_lse ? a.grad_lse[a.lse_row(b, h) + p] : 0.0f);
    }
    Products products(a, s, tile, b, h);
    const float unit = products.unit, scale = (float)a.scale;
    const float share = a.softcap == 0.0 ? 0.0f : (float)(unit * LN_2 / a.softcap);
    each_block(a, tile, b, T, 0, 1, [&](const Block& block) {
        auto slope = [&](int t, int n, vec& p, vec& ds) {
            vec x = load(s.scores + t * T + n * W);
            p = exp2_(x * unit - load(s.peak + n * W));
            ds = p * (load(s.other + t * T + n * W) - load(s.delta + n * W));
            if (a.dbias) add_dbias(a, s, block, b, h, t, n, count, ds);
            if (share != 0.0f) ds *= larger(splat(1.0f) - x * share * (x * share), vec{}); // 0 where x is -inf
            ds *= scale;
        };
        products.score(block);
        change_scores(a, s, block, b, h, unit);
        block.hide(s.scores);
        block.fill_hidden(s.other, 0.0f); // hidden values may hold NaN
        products.weigh(block, slope);
        if (block.positions) {
            std::memset(s.dk_rows, 0, sizeof(float) * block.keys * s.width);
            std::memset(s.dv_rows, 0, sizeof(float) * block.keys * s.width);
            products.add(block, count, s.dk_rows, s.width, s.dv_rows, s.width);
            add_rows(block, s.dk_rows, s.width, dk, a.dk.row);
            add_rows(block, s.dv_rows, s.width, dv, a.dv.row);
        } else {
            i64 key = block.key(0), step = block.run.step;
            products.add(block, count, dk + key * a.dk.row, step * a.dk.row, dv + key * a.dv.row, step * a.dv.row);
        }
    });
    for (int i = 0; i < count; i++)
        for (int d = 0; d < depth; d++) dq[s.at[i] * a.dq.row + d] = narrow<E>(s.sums[d * T + i]);
}

// A thread has its own sums dk and dv: of a key head, or of one part of its queries.
template <class E, class Products> void backward(const Args& a) {
    const i64 kv_heads = a.heads / a.group;
    in_threads(a.threads, [&](std::atomic<i64>& next) {
        Scratch s((int)a.head_dim);
        for (i64 unit = next++; unit < a.batch * kv_heads * a.parts; unit = next++) {
            i64 part = unit % a.parts, kv = unit / a.parts % kv_heads, b = unit / a.parts / kv_heads;
            float* dk = head_of<float>(a.dk, b, kv) + part * a.part_stride;
            float* dv = head_of<float>(a.dv, b, kv) + part * a.part_stride;
            for (i64 h = kv * a.group; h < (kv + 1) * a.group; h++) {
                i64 kind = a.head_class[h];
                for (i64 i = a.first_tile[kind] + part; i < a.first_tile[kind + 1]; i += a.parts)
                    backward_tile<E, Products>(a, a.tiles[i], b, h, dk, dv, s);
            }
        }
    });
}

} // namespace

extern "C" {

// dtype: 0 float, 1 bfloat16, 2 half.
void attention_forward(const Args* args) {
    if (args->dtype == 0) return forward<float, Wide<float>>(*args);
    if (args->dtype == 2) return forward<Half, Wide<Half>>(*args);
#if defined(HAS_PAIRS)
    if (args->head_dim % 2 == 0) return forward<Bf16, Paired>(*args);
#endif
    forward<Bf16, Wide<Bf16>>(*args);
}

void attention_backward(const Args* args) {
    if (args->dtype == 0) return backward<float, WideBack<float>>(*args);
    if (args->dtype == 2) return backward<Half, WideBack<Half>>(*args);
#if defined(HAS_PAIRS)
    if (args->head_dim % 2 == 0) return backward<Bf16, PairedBack>(*args);
#endif
    backward<Bf16, WideBack<Bf16>>(*args);
}

int attention_vector_floats() { return W; }
}
