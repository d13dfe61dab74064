// The forward pass.

#pragma once

#include "few_queries.h"
#include "threads.h"

namespace {

// Results of queries without keys.
template <class E> void forward_nothing(const Args& a, const Tile& tile, i64 b, i64 h) {
    E* out = head_of<E>(a.out, b, h);
    float* lse = a.lse ? a.lse + a.lse_row(b, h) : nullptr;
    for (i64 i = 0; i < tile.count; i++) {
        i64 p = a.query(tile, i);
        std::fill_n(out + p * a.out.row, a.head_dim, narrow<E>(0.0f));
        if (lse) lse[p] = NONE;
    }
}

// -0 as 0: keys of weight 0 may turn one into the other.
inline float unsigned_zero(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits == 0x80000000u ? 0.0f : x;
}
inline vec unsigned_zeros(vec x) {
    const ivec bits = (ivec)x;
    return (vec)(bits == ivec{} + std::numeric_limits<int>::min() ? ivec{} : bits);
}

// `sums` are [d][lane], or [lane][d] if `rows`.
template <class E> void write_results(const Args& a, i64 b, i64 h, float unit, bool rows, const Scratch& s) {
    const int depth = (int)a.head_dim, lane_step = rows ? depth : 1, step = rows ? 1 : s.pitch;
    E* out = head_of<E>(a.out, b, h);
    const float gain = a.gain();
    int written = 0;
#if defined(__AVX512F__)
    if (!rows) written = depth / W * W;
    for (int i = 0; i < s.lanes; i += W)
        for (int d = 0; d < written; d += W) {
            vec square[W];
            UNROLL for (int l = 0; l < W; l++) square[l] = load(s.sums + (d + l) * s.pitch + i);
            transpose(square);
            for (int l = 0; l < W && i + l < s.lanes; l++) {
                bool any = s.total[i + l] != 0.0f && s.at[i + l] < a.queries_of(b);
                put(out + s.row(a.out, i + l) + d, any ? unsigned_zeros(square[l] * (gain / s.total[i + l])) : vec{});
            }
        }
#endif
    for (int i = 0; i < s.lanes; i++) {
        i64 p = s.at[i];
        bool any = s.total[i] != 0.0f && p < a.queries_of(b);
        float share = any ? gain / s.total[i] : 0.0f;
        E* row = out + s.row(a.out, i);
        for (int d = written; d < depth; d++)
            row[d] = narrow<E>(any ? unsigned_zero(s.sums[d * step + i * lane_step] * share) : 0.0f);
        if (!a.lse) continue;
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
    if (heads == 1) s.select_shared();
    for (int i = 0; i < heads; i++) {
        select(i);
        products.begin(b, h + i * a.packed_heads);
        s.clear(depth);
    }
    i64 chunk = 0;
    auto kept = [&](int i) { return Sums(s.kept + i * s.kept_size(depth, heads)); };
    auto keep = [&](int i) { // the chunk that ends here, with those before
        if (chunk) kept(i).add(s, s.pitch, depth, is_rowwise<E>(a, s), products.unit);
        else kept(i).copy(s, s.pitch, depth);
    };
    // A few queries read a block in parts: all heads, which lie side by side, score one before the next one begins.
    const bool few = s.pitch <= FEW;
    auto in_turns = [&](const Block& block, const auto& visit) {
        for (int from = 0; from < block.keys; from += FEW_KEYS)
            for (int i = 0; i < heads; i++) {
                select(i);
                s.select_scores(i, depth, heads, from);
                visit(block.part(from));
            }
    };
    each_block(a, tile, b, s.pitch, split, a.splits, [&](const Block& block) {
        const bool ends = !state && block.chunk != chunk, in_parts = few && !block.positions;
        if (in_parts) in_turns(block, [&](const Block& part) { products.score(part); });
        for (int i = 0; i < heads; i++) {
            select(i);
            if (ends) {
                keep(i);
                s.clear(depth);
            }
            s.select_scores(i, depth, heads, 0);
            if (!in_parts) products.score(block);
            change_scores(a, s, block, b, h + i * a.packed_heads, products.unit);
            block.hide(s.scores);
            draw_kept(a, s, block, b, h + i * a.packed_heads);
            if (a.dropped) weigh<typename Products::Weights, true>(block, products.unit, depth, s);
            else weigh<typename Products::Weights>(block, products.unit, depth, s);
            if (!in_parts) products.mix(block);
        }
        if (in_parts) in_turns(block, [&](const Block& part) { products.mix(part); });
        if (!state) chunk = block.chunk;
    });
    for (int i = 0; i < heads; i++) {
        select(i);
        if (chunk) {
            keep(i);
            kept(i).select(s);
        }
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
void join_splits(const Args& a, const Tile& tile, i64 b, i64 h, float* states, i64 step, Scratch& s) {
    if (!tile.runs) return;
    s.place(a, tile, a.packed_heads);
    s.pitch = (s.lanes + W - 1) / W * W;
    const bool rows = is_rowwise<E>(a, s);
    if (a.invariant) {
        const float unit = states[a.state_size() - 1];
        Sums all(states);
        for (i64 i = 1; i < a.splits; i++) all.add(states + i * step, s.pitch, (int)a.head_dim, rows, unit);
        all.select(s);
        return write_results<E>(a, b, h, unit, rows, s);
    }
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

// Whether there was memory for it.
template <class E, class Products> bool forward(const Args& a) {
    const i64 size = a.together * a.state_size();
    bool able = each_tile(a, a.splits, [&](i64 unit, const Tile& tile, i64 b, i64 h, i64 split, Scratch& s) {
        forward_tile<E, Products>(a, tile, b, h, split, a.splits > 1 ? a.states + unit * size : nullptr, s);
    });
    if (a.splits == 1 || !able) return able;
    i64 row = 0; // tiles of all heads of a batch row: from one split's states to the next one's
    for (i64 h = 0; h < a.heads; h += a.packed_heads * a.together) row += a.first_tile[a.head_class[h] + 1] - a.first_tile[a.head_class[h]];
    return each_tile(a, 1, [&](i64 unit, const Tile& tile, i64 b, i64 h, i64, Scratch& s) {
        float* first = a.states + (b * row * a.splits + unit - b * row) * size;
        for (i64 i = 0; i < a.together; i++)
            join_splits<E>(a, tile, b, h + i * a.packed_heads, first + i * a.state_size(), row * size, s);
    });
}

} // namespace
