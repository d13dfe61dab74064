// Products of a block of keys, or of its values, with the lanes of a tile.

#pragma once

#include "vectors.h"

namespace {

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
// Entries of two rows in turns: 2 W of each.
INLINE void interleave(const void* first, const void* second, __m512i (&to)[2]) {
    __m512i low, x = load<__m512i>(first), y = load<__m512i>(second);
    for (int i = 0; i < 32; i++) ((u16*)&low)[i] = (u16)(i / 2 + i % 2 * 32);
    to[0] = _mm512_permutex2var_epi16(x, low, y);
    to[1] = _mm512_permutex2var_epi16(x, _mm512_add_epi16(low, _mm512_set1_epi16(W)), y);
}
// Two vectors rounded, entries of each in turns.
INLINE __m512i rounded(vec first, vec second) {
    __m512i turns, both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    for (int i = 0; i < 2 * W; i++) ((u16*)&turns)[i] = (u16)(i / 2 + i % 2 * W);
    return _mm512_permutexvar_epi16(turns, both);
}
inline u32 pair_of(Bf16 first, Bf16 second) { return first.bits | (u32)second.bits << 16; }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "arm/pairs.h"
#endif

// Rows `stride` bytes apart, or those at the listed positions.
struct Rows {
    const char* data;
    i64 stride;
    const i32* at = nullptr;

    template <bool LISTED> const char* row(int i) const { return data + (LISTED ? at[i] : i) * stride; }
    Rows after(int count) const { return at ? Rows{data, stride, at + count} : Rows{data + count * stride, stride}; }
};

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
// Rows of two tensors that lie alike, `other` bytes apart.
struct FetchBoth {
    Fetch first;
    i64 other;

    void fetch() {
        if (first.rows <= 0) return;
        __builtin_prefetch(first.row + first.line * CACHE_LINE + other, 0, 2);
        first.fetch();
    }
};
struct NoFetch { void fetch() const {} };

// The same for listed rows of two tensors, some ahead of a register tile: a line of each at every other step.
struct FetchListed {
    Rows first, second;
    int listed, lines, at = 0, line = 0;
    static constexpr int AHEAD = 24; // rows
    void start(int row) { at = row + AHEAD; line = 0; }
    void fetch() {
        if (at >= listed) return;
        __builtin_prefetch(first.row<true>(at) + line * CACHE_LINE, 0, 3);
        __builtin_prefetch(second.row<true>(at) + line * CACHE_LINE, 0, 2);
        if (++line < lines) return;
        line = 0;
        at++;
    }
};

// Three matrix products. `lanes` is [., pitch] with queries along the lanes; multiply() computes the vectors [from, to) of
// the tile.

// scores[i][lane] = sum_d rows[i][d] * lanes[d][lane]
template <class Op, class Ahead = NoFetch, bool LISTED = false> struct Dot {
    Rows rows;
    int depth, pitch;
    const void* lanes;
    float* scores;
    mutable Ahead ahead = {};
    bool invariant = false; // whether each score is PARTIAL_SUMS sums, whatever the number of lanes
    static constexpr int TALL = TALL_ROWS;
    static constexpr bool ALL_TALL = true; // the last rows too: equal keys get equal scores, added in one order

    template <int M, int N> void tile(int i0, int n0) const {
        const int parts = invariant ? PARTIAL_SUMS : 1;
        for (int part = 0; part < parts; part++) tile_part<M, N>(i0, n0, part, parts);
    }
    template <int M, int N> void tile_part(int i0, int n0, int part, int parts) const {
        vec sum[M][N] = {};
        const char* row[LISTED ? M : 1];
        UNROLL for (int i = 0; i < (LISTED ? M : 1); i++) row[i] = rows.row<LISTED>(i0 + i);
        const i64 size = pitch; // a member would be read again after each store
        const float* x = (const float*)lanes + n0 * W;
        Ahead next = ahead;
        if constexpr (LISTED) next.start(i0);
        for (int d = part; d < depth; d += parts) {
            if (!LISTED || d % 2) next.fetch();
            vec lane[N];
            UNROLL for (int n = 0; n < N; n++) lane[n] = load(x + d * size + n * W);
            UNROLL for (int i = 0; i < M; i++) {
                vec scalar = Op::spread((LISTED ? row[i] : row[0] + i * rows.stride) + d * 4);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = Op::add(sum[i][n], scalar, lane[n]);
            }
        }
        if constexpr (!LISTED) ahead = next;
        float* to = scores + i0 * size + n0 * W;
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) {
                if (part) sum[i][n] += load(to + i * size + n * W);
                store(to + i * size + n * W, sum[i][n]);
            }
    }
    // Up to TALL rows for one vector of lanes; even and odd entries have sums of their own, unless `invariant`. More rows that
    // lie a power of two apart would share one set of the L1 cache.
    template <int M> void tall(int i0, int n0) const {
        if (!invariant) return tall_part<M, 2>(i0, n0, 0, 1);
        for (int part = 0; part < PARTIAL_SUMS; part++) tall_part<M, 1>(i0, n0, part, PARTIAL_SUMS);
    }
    template <int M, int EACH> void tall_part(int i0, int n0, int part, int parts) const {
        constexpr int NEAR = LISTED ? 1 : 3; // an address has a register and up to twice another one
        vec sum[EACH][M] = {};
        const i64 step = rows.stride, size = (i64)pitch * parts;
        const char* row[(M + NEAR - 1) / NEAR];
        UNROLL for (int i = 0; i < M; i += NEAR) row[i / NEAR] = rows.row<LISTED>(i0 + i) + part * 4;
        const float* x = (const float*)lanes + n0 * W + part * pitch;
        Ahead next = ahead; // in registers
        if constexpr (LISTED) next.start(i0);
        for (int d = part; d < depth; d += EACH * parts) {
            UNROLL for (int e = 0; e < EACH; e++) {
                if (e > 0 && d + e == depth) break;
                if (!LISTED || e == 0) next.fetch();
                vec lane = load(x);
                x += size;
                UNROLL for (int i = 0; i < M; i++)
                    sum[e][i] = Op::add(sum[e][i], Op::spread(row[i / NEAR] + i % NEAR * step + e * 4), lane);
            }
            UNROLL for (int i = 0; i < M; i += NEAR) row[i / NEAR] += EACH * 4 * parts;
        }
        ahead = next;
        const i64 width = pitch;
        float* to = scores + i0 * width + n0 * W;
        UNROLL for (int i = 0; i < M; i++, to += width) {
            if (EACH > 1) sum[0][i] += sum[EACH - 1][i];
            if (part) sum[0][i] += load(to);
            store(to, sum[0][i]);
        }
    }
};

// sums[i][lane] += sum_t rows[t][i] * lanes[t][lane]
template <class Op, class Ahead = NoFetch> struct Mix {
    Rows rows;
    int keys, pitch;
    const void* lanes;
    float* sums;
    mutable Ahead ahead = {};
    static constexpr int TALL = TALL_SUMS;
    static constexpr bool ALL_TALL = false;

    template <int M, int N> void tile(int i0, int n0) const {
        vec sum[M][N];
        const i64 size = pitch;
        float* to = sums + i0 * size + n0 * W;
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = load(to + i * size + n * W);
        const float* x = (const float*)lanes + n0 * W;
        Ahead next = ahead;
        for (int t = 0; t < keys; t++) {
            next.fetch();
            const char* row = rows.row<false>(t) + i0 * 4;
            vec lane[N];
            UNROLL for (int n = 0; n < N; n++) lane[n] = load(x + t * size + n * W);
            UNROLL for (int i = 0; i < M; i++) {
                vec scalar = Op::spread(row + i * 4);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = Op::add(sum[i][n], scalar, lane[n]);
            }
        }
        ahead = next;
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) store(to + i * size + n * W, sum[i][n]);
    }
    // The same for one vector of lanes.
    template <int M> void tall(int i0, int n0) const {
        vec sum[M];
        const i64 size = pitch;
        float* to = sums + i0 * size + n0 * W;
        UNROLL for (int i = 0; i < M; i++) sum[i] = load(to + i * size);
        const float* x = (const float*)lanes + n0 * W;
        Ahead next = ahead;
        for (int t = 0; t < keys; t++) {
            next.fetch();
            const char* row = rows.row<false>(t) + i0 * 4;
            vec lane = load(x);
            UNROLL for (int i = 0; i < M; i++) sum[i] = Op::add(sum[i], Op::spread(row + i * 4), lane);
            x += size;
        }
        ahead = next;
        UNROLL for (int i = 0; i < M; i++) store(to + i * size, sum[i]);
    }
};

// rows[t][d] += sum_lane lanes[t][lane] * others[lane][d], with vectors along d; `first` and `last` count lanes, or pairs
// of lanes
template <class Op, bool LISTED = false> struct Spread {
    Rows rows;
    const float* lanes;
    int first, last;
    const float* others;
    i64 width;
    static constexpr int TALL = 0;
    static constexpr bool ALL_TALL = false;

    template <int M, int N> void tile(int i0, int n0) const {
        vec sum[M][N];
        float* to[M];
        UNROLL for (int i = 0; i < M; i++) to[i] = (float*)rows.row<LISTED>(i0 + i) + n0 * W;
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = load(to[i] + n * W);
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
            UNROLL for (int n = 0; n < N; n++) store(to[i] + n * W, sum[i][n]);
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
        for (; to - from == 1 && i + P::TALL <= count; i += P::TALL) product.template tall<P::TALL>(i, from);
    if constexpr (P::ALL_TALL)
        if (to - from == 1) {
            if (count - i >= 4) { product.template tall<4>(i, from); i += 4; }
            if (count - i >= 2) { product.template tall<2>(i, from); i += 2; }
            if (i < count) product.template tall<1>(i++, from);
        }
    for (; i + MR <= count; i += MR) row_of_tiles<MR>(product, i, from, to);
    if (count - i >= 4) { row_of_tiles<4>(product, i, from, to); i += 4; }
    if (count - i >= 2) { row_of_tiles<2>(product, i, from, to); i += 2; }
    if (i < count) row_of_tiles<1>(product, i, from, to);
}

// Scores of keys; `next` are their values, which are read after them.
template <class Op>
void dot(Rows rows, Rows next, int listed, int depth, int pitch, const void* lanes, float* scores, int keys, int from, int to,
         bool invariant) {
    if (!rows.at) return multiply(Dot<Op>{rows, depth, pitch, lanes, scores, {}, invariant}, keys, from, to);
    FetchListed ahead{rows, next, listed, (depth * 4 + CACHE_LINE - 1) / CACHE_LINE};
    multiply(Dot<Op, FetchListed, true>{rows, depth, pitch, lanes, scores, ahead, invariant}, keys, from, to);
}

template <class Op>
void spread(Rows rows, const float* lanes, int first, int last, const float* others, int width, int keys) {
    if (rows.at) multiply(Spread<Op, true>{rows, lanes, first, last, others, width}, keys, 0, width / W);
    else multiply(Spread<Op>{rows, lanes, first, last, others, width}, keys, 0, width / W);
}

} // namespace
