// The memory of one thread, and rows of q, k and v as the products take them.

#pragma once

#include <type_traits>

#include "amx.h"

namespace {

// The memory of one thread; `memory` is null where there is none left.
struct Scratch {
    float *q, *grad, *sums, *scores, *other, *keys, *values, *q_rows, *grad_rows, *memory;
    float peaks[T], totals[T], delta[T];
    float *peak = peaks, *total = totals;
    float *own = nullptr, *shared_q, *shared_sums; // `own`: of each of several heads that read blocks in turns, q, sums, peak and total
    i64 at[T];   // positions of the queries; unused lanes repeat the last query, and their results are dropped
    i64 head[T]; // heads, counted from the tile's first
    bool dead[T]; // unused lanes, and queries without keys
    u64 drawn[KEYS]; // with dropout, of each key of a block the lanes that keep its weight
    float* kept = nullptr; // of each head, the softmax over the chunks before: peaks, totals and sums
    float* shared_scores, *shared_other; // of one head
    float* caps = nullptr; // of each score that terms are added to, how it changes with what was capped
    int width; // of a padded row
    int pitch = T; // lanes from one row of lanes to the next
    int lanes = 0; // that are used
    Amx amx;

    Scratch(int depth, int heads, bool keeps = false, bool caps_scores = false) : width((depth + W - 1) / W * W) {
        i64 lanes = (i64)width * T, block = (i64)KEYS * std::max(T, width);
        i64 sizes[] = {lanes, lanes, lanes, block, block, block, block, lanes, lanes, caps_scores ? (i64)KEYS * T : 0};
        float** parts[] = {&q, &grad, &sums, &scores, &other, &keys, &values, &q_rows, &grad_rows, &caps};
        i64 all = 0;
        for (i64 size : sizes) all += size;
        memory = (float*)std::aligned_alloc(CACHE_LINE, sizeof(float) * all);
        if (heads > 1) own = (float*)std::aligned_alloc(CACHE_LINE, sizeof(float) * heads * own_size(depth));
        if (keeps) kept = (float*)std::aligned_alloc(CACHE_LINE, sizeof(float) * heads * kept_size(depth, heads));
        if (!memory || (heads > 1 && !own) || (keeps && !kept)) {
            std::free(memory);
            memory = nullptr;
            return;
        }
        float* next = memory;
        for (int i = 0; i < 9 + caps_scores; i++) { *parts[i] = next; next += sizes[i]; }
        shared_q = q;
        shared_sums = sums;
        shared_scores = scores;
        shared_other = other;
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
    // Tile registers write whole ones.
    static i64 own_size(int depth) { return 2 * FEW * ((depth + FEW - 1) / FEW * FEW + 1); }
    static constexpr i64 FEW_SCORES = (KEYS + FEW) * FEW; // of a head that reads blocks in turns
    static i64 kept_size(int depth, int heads) { return 2 * T + (heads > 1 ? depth * FEW + 2 * FEW_SCORES : depth * T); }
    void select(int head, int depth) {
        q = own + head * own_size(depth);
        sums = q + FEW * depth;
        peak = own + (head + 1) * own_size(depth) - 2 * FEW;
        total = peak + FEW;
    }
    // The scores and weights of a head, of keys from one of a block on.
    void select_scores(int head, int depth, int heads, int from) {
        float* some = heads > 1 ? kept + (head + 1) * kept_size(depth, heads) - 2 * FEW_SCORES : nullptr;
        scores = (some ? some : shared_scores) + from * pitch;
        other = (some ? some + FEW_SCORES : shared_other) + from / 2 * pitch;
    }
    void clear(int depth) {
        std::fill_n(peak, pitch, NONE);
        std::fill_n(total, pitch, 0.0f);
        std::memset(sums, 0, sizeof(float) * depth * pitch);
    }
    void select_shared() {
        q = shared_q;
        sums = shared_sums;
        peak = peaks;
        total = totals;
        scores = shared_scores;
        other = shared_other;
    }
    ~Scratch() {
        std::free(memory);
        std::free(own);
        std::free(kept);
    }
};

// Packs rows of queries into lanes.
template <class E>
void pack(const View& x, const E* rows, const Scratch& s, int depth, float factor, float* lanes, const bool* dead = nullptr) {
    int whole = (s.lanes + W - 1) / W * W, packed = 0;
#if defined(__AVX512F__)
    packed = depth / W * W;
    for (int i = 0; i < whole; i += W)
        for (int d = 0; d < packed; d += W) {
            vec square[W];
            UNROLL for (int l = 0; l < W; l++)
                square[l] = dead && dead[i + l] ? vec{} : wide(rows + s.row(x, i + l) + d) * factor;
            transpose(square);
            UNROLL for (int l = 0; l < W; l++) store(lanes + (d + l) * s.pitch + i, square[l]);
        }
#endif
    for (int i = 0; i < whole; i++) {
        const E* row = rows + s.row(x, i);
        bool none = dead && dead[i];
        for (int d = packed; d < depth; d++) lanes[d * s.pitch + i] = none ? 0.0f : widen(row[d]) * factor;
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
    int whole = (s.lanes + W - 1) / W * W, packed = depth / (2 * W) * 2 * W;
    const ivec signs = ivec{} + (int)(sign | (u32)sign << 16), masks = ivec{} + (int)(mask | (u32)mask << 16);
    for (int i = 0; i < whole; i += W)
        for (int d = 0; d < packed; d += 2 * W) {
            vec square[W];
            UNROLL for (int l = 0; l < W; l++)
                square[l] = dead && dead[i + l] ? vec{} : (vec)((load<ivec>(rows + s.row(x, i + l) + d) ^ signs) & masks);
            transpose(square);
            UNROLL for (int l = 0; l < W; l++) store(lanes + (d / 2 + l) * s.pitch + i, square[l]);
        }
    for (int i = 0; i < whole; i++) {
        const Bf16* row = rows + s.row(x, i);
        u32 kept = dead && dead[i] ? 0 : 0xffffffff;
        for (int d = packed; d < depth; d += 2)
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
        u32* pairs = to + t / 2 * depth;
        int d = 0;
        for (; d + 2 * W <= depth; d += 2 * W) {
            __m512i some[2], masks = _mm512_set1_epi32((int)mask);
            interleave(first + d, other + d, some);
            store(pairs + d, some[0] & masks);
            store(pairs + d + W, some[1] & masks);
        }
        for (; d < depth; d++) pairs[d] = pair_of(first[d], other[d]) & mask;
    }
}
#endif

// The rows of a block where they are.
template <class E> Rows own_rows(const View& x, const E* head, const Block& block) {
    i64 size = (i64)sizeof(E) * x.row;
    if (block.positions) return {(const char*)head, size, block.positions};
    return {(const char*)(head + block.key(0) * x.row), size * block.run.step};
}

// Whether the rows of a tile's next block are worth fetching while one is computed; listed rows are fetched otherwise.
template <class E> bool is_ahead(const Args& a, const Block& block) {
    return !block.positions && 2 * a.k_len * a.head_dim * (i64)sizeof(E) > NEAR_BYTES;
}
// The rows after those of a block, of `bytes` each.
Fetch rows_after(const Block& block, Rows rows, i64 bytes, int count = KEYS) {
    return {rows.data + block.keys * rows.stride, rows.stride, count, (int)((bytes + CACHE_LINE - 1) / CACHE_LINE)};
}

// The rows of a block as floats. Hidden keys become zeros, even if they hold NaN.
template <class E> Rows copied_rows(const View& x, const E* head, const Block& block, int depth, float* to) {
    for (int i = 0; i < block.keys; i++)
        if (block.sees(i)) widen_row(head + block.key(i) * x.row, to + i * depth, depth);
        else std::fill_n(to + i * depth, depth, 0.0f);
    return {(const char*)to, (i64)sizeof(float) * depth};
}
template <class E> bool are_floats(const Block& block) { return std::is_same_v<E, float> && !block.hidden; }

// The same for products that read a row once: floats are not copied.
template <class E> Rows rows_once(const View& x, const E* head, const Block& block, int depth, float* to) {
    return are_floats<E>(block) ? own_rows(x, head, block) : copied_rows(x, head, block, depth, to);
}

// The same for products that read a row often: floats in an arithmetic progression are not copied. Rows that lie a power of
// two apart share a few sets of the L1 cache.
template <class E> Rows rows_often(const View& x, const E* head, const Block& block, int depth, float* to) {
    return are_floats<E>(block) && !block.positions ? own_rows(x, head, block) : copied_rows(x, head, block, depth, to);
}

} // namespace
