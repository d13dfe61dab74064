// The products of very few queries.

#pragma once

#include <type_traits>

#include "key_head.h"

namespace {

// The products of very few queries, with vectors along d: of most lanes of a vector of queries, nothing would be used.
#if defined(__AVX512F__)
// Inside, denormal numbers are 0, as for tile registers.
struct NoDenormals {
    unsigned before = _mm_getcsr();

    NoDenormals() { _mm_setcsr(before | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before); }
};
#endif
constexpr int GROUP = 4; // queries and keys of a register tile, and its vectors of V
template <class E, bool PAIRS = false> struct Rowwise : KeyHead<E> {
    using Weights = std::conditional_t<PAIRS, RowPairs, FloatRows>;
    using Product = std::conditional_t<PAIRS, RowProduct, Single>;
    using KeyHead<E>::a, KeyHead<E>::s, KeyHead<E>::k, KeyHead<E>::v, KeyHead<E>::depth, KeyHead<E>::unit;
    const int groups;
    const bool apart; // whether sums are those of tile registers

    // Whether what is added here, and in which order, is what key_head.h adds.
    static bool has_order(const Args& a) {
#if defined(__AVX512F__)
        const bool paired = HAS_ROW_PAIRS && std::is_same_v<E, Bf16> && a.head_dim % 2 == 0;
        return paired == PAIRS;
#else
        return false;
#endif
    }
    static bool as_tiles(const Args& a) { return PAIRS && Amx::fits((int)a.head_dim); }
    static bool fits(const Args& a, const Scratch& s) {
        const int step = PAIRS && !(a.invariant && as_tiles(a)) ? 2 * W : W;
        return s.lanes <= 2 * GROUP && a.head_dim % step == 0 && !a.order && (!a.invariant || has_order(a));
    }
    Rowwise(const Args& a, Scratch& s) : KeyHead<E>(a, s), groups((s.lanes + GROUP - 1) / GROUP), apart(as_tiles(a)) {}
    void begin(i64 b, i64 h) {
        const E* q = head_of<E>(a.q, b, h);
        float factor = (float)(a.scale * LOG2_E);
#if defined(HAS_AMX)
        if constexpr (PAIRS)
            if (apart) {
                unit = pack_pairs(a.q, q, s, depth, factor, s.q);
                return;
            }
#endif
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
        std::memset(s.scores + t * s.pitch, 0, sizeof(float) * keys * s.pitch); // of unused lanes
        for (int lane = 0; lane < groups * GROUP; lane += GROUP, next = 0)
            if (keys == GROUP) dot<GROUP>(rows, t, lane, next);
            else for (int i = 0; i < keys; i++) dot<1>(rows + i, t + i, lane, next);
    }
#if defined(__AVX512F__)
    // Scores of the keys of a block for N lanes, each added as by Dot: four sums of each of four keys in a vector.
    template <int N> void in_order(const Block& block, i64 next) const {
        constexpr int EACH = PAIRS ? 2 : 1, GROUPS = N == 1 ? 4 : 8 / N;
        for (int t = 0; t < block.keys; t += 4 * GROUPS) {
            const E* rows[4 * GROUPS];
            for (int i = 0; i < 4 * GROUPS; i++) rows[i] = row(a.k, k, block, std::min(t + i, block.keys - 1));
            vec sum[GROUPS][N] = {};
            for (int d = 0; d < depth; d += W * EACH)
                UNROLL for (int g = 0; g < GROUPS; g++) {
                    __m512 keys[4];
                    UNROLL for (int i = 0; i < 4; i++) {
                        const E* from = rows[4 * g + i] + d;
                        if (d * sizeof(E) % CACHE_LINE == 0) fetch((const char*)from + next);
                        if constexpr (PAIRS) keys[i] = (__m512)load(from);
                        else keys[i] = (__m512)wide(from);
                    }
                    gather_quarters(keys);
                    UNROLL for (int i = 0; i < 4; i++)
                        UNROLL for (int n = 0; n < N; n++) {
                            const float* query = s.q + (n * depth + d) / EACH + 4 * i;
                            sum[g][n] = Product::add(sum[g][n], (vec)_mm512_broadcast_f32x4(load<__m128>(query)), (vec)keys[i]);
                        }
                }
            for (int g = 0; g < GROUPS; g++) put_scores<N>(sum[g], t + 4 * g, block.keys);
        }
    }
    // Of four keys from t on, of which `keys` are there.
    template <int N> void put_scores(const vec (&sum)[N], int t, int keys) const {
        for (int first = 0; first < N; first += 4) {
            __m512 parts[4] = {};
            for (int n = 0; n < std::min(4, N - first); n++) parts[n] = (__m512)sum[first + n];
            transpose_quarters(parts);
            const vec scores = (vec)parts[0] + (vec)parts[1] + (vec)parts[2] + (vec)parts[3];
            for (int i = 0; i < std::min(4, keys - t); i++) {
                float* to = s.scores + (t + i) * s.pitch;
                if (first == 0) store(to, vec{}); // unused lanes
                std::memcpy(to + first, (const float*)&scores + 4 * i, 16);
            }
        }
    }
    // The floats of pairs.
    static vec first_of(vec x) { return (vec)((ivec)x << 16); }
    static vec second_of(vec x) { return (vec)((ivec)x & -65536); }

    // Adds the values of a part of a block as tile registers do: those of even and odd keys apart.
    template <int L, int N> void add_apart(const Block& block, int lane, int d, i64 next) const {
        vec even[L][N] = {}, odd[L][N] = {};
        for (int t = 0; t < block.keys; t += 2) {
            const E *first = row(a.v, v, block, t) + d, *second = row(a.v, v, block, t + 1) + d;
            bool one = !block.hidden || block.sees(t), other = t + 1 < block.keys && (!block.hidden || block.sees(t + 1));
            UNROLL for (int n = 0; n < N; n++) {
                if (next && n % 2 == 0)
                    for (const E* x : {first, second}) fetch((const char*)(x + n * W) + next);
                vec x = one ? wide(first + n * W) : vec{}, y = other ? wide(second + n * W) : vec{};
                UNROLL for (int i = 0; i < L; i++) {
                    vec weights = splat(s.other[t / 2 * s.pitch + lane + i]);
                    even[i][n] += x * first_of(weights);
                    odd[i][n] += y * second_of(weights);
                }
            }
        }
        UNROLL for (int i = 0; i < L; i++)
            UNROLL for (int n = 0; n < N; n++) {
                float* to = s.sums + (lane + i) * depth + d + n * W;
                store(to, load(to) + (even[i][n] + odd[i][n]));
            }
    }
    void mix_apart(const Block& block, i64 next) const {
        for (int lane = 0; lane < groups * GROUP; lane += GROUP, next = 0)
            for (int d = 0; d < depth; d += 2 * W) {
                const bool one = s.lanes == 1, two = d + W < depth;
                if (one && two) add_apart<1, 2>(block, lane, d, next);
                else if (one) add_apart<1, 1>(block, lane, d, next);
                else if (two) add_apart<GROUP, 2>(block, lane, d, next);
                else add_apart<GROUP, 1>(block, lane, d, next);
            }
    }
#endif
    void score(const Block& block) const {
        const i64 next = ahead(a.k, block);
#if defined(__AVX512F__)
        if (apart) {
            const Rows rows = own_rows(a.k, k, block);
            Fetch after = rows_after(block, rows, depth * sizeof(E), FEW_KEYS);
            return s.amx.dot(rows, depth / 2, s.pitch, s.q, s.scores, block.keys, block.from, block.to, &after);
        }
        if (s.lanes == 1) return in_order<1>(block, next);
        if (a.invariant) return s.lanes <= GROUP ? in_order<GROUP>(block, next) : in_order<2 * GROUP>(block, next);
#endif
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
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "arm/few_queries.h"
#else // __ARM_
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
#endif // __ARM_
    void mix(const Block& block) const {
        const i64 next = ahead(a.v, block);
#if defined(__AVX512F__)
        if (apart && a.invariant) {
            NoDenormals here;
            return mix_apart(block, next);
        }
#endif
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
template <class E> bool is_rowwise_pairs(const Args& a, const Scratch& s) {
    return HAS_ROW_PAIRS && std::is_same_v<E, Bf16> && Rowwise<E, true>::fits(a, s);
}
template <class E> bool is_rowwise(const Args& a, const Scratch& s) {
    return Rowwise<E>::fits(a, s) || is_rowwise_pairs<E>(a, s);
}

} // namespace
