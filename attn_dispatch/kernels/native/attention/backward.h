// The backward pass.

#pragma once

#include "softmax.h"
#include "threads.h"

namespace {

// Scores, and the products of v and the gradient, from rows of keys and values; the next block's are fetched.
template <class E, class Op>
void dots(const Args& a, const Block& block, const E* k, const E* v, Rows kr, Rows vr, int steps, Scratch& s) {
    if (is_ahead<E>(a, block)) {
        Fetch next_k = rows_after(block, own_rows(a.k, k, block), a.head_dim * sizeof(E));
        Fetch next_v = rows_after(block, own_rows(a.v, v, block), a.head_dim * sizeof(E));
        const bool same = a.invariant != 0;
        multiply(Dot<Op, Fetch>{kr, steps, T, s.q, s.scores, next_k, same}, block.keys, block.from, block.to);
        multiply(Dot<Op, Fetch>{vr, steps, T, s.grad, s.other, next_v, same}, block.keys, block.from, block.to);
    } else {
        dot<Op>(kr, vr, block.listed, steps, T, s.q, s.scores, block.keys, block.from, block.to, a.invariant != 0);
        dot<Op>(vr, vr, 0, steps, T, s.grad, s.other, block.keys, block.from, block.to, a.invariant != 0);
    }
}
// Adds to dq; the next block's rows of dk and dv are fetched.
template <class E, class Op>
void mix(const Args& a, const Block& block, Rows dk, Rows dv, Rows rows, int steps, const float* slopes, Scratch& s) {
    const int depth = (int)a.head_dim;
    if (is_ahead<E>(a, block)) {
        FetchBoth next{rows_after(block, dk, depth * sizeof(float)), dv.data - dk.data};
        multiply(Mix<Op, FetchBoth>{rows, steps, T, slopes, s.sums, next}, depth, block.from, block.to);
    } else multiply(Mix<Op>{rows, steps, T, slopes, s.sums}, depth, block.from, block.to);
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
        Rows kr = rows_once(a.k, k, block, depth, s.keys), vr = rows_once(a.v, v, block, depth, s.values);
        dots<E, Single>(a, block, k, v, kr, vr, depth, s);
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
    void add(const Block& block, int count, Rows dk, Rows dv) {
        int depth = (int)a.head_dim, first = block.from * W, last = std::min(block.to * W, count);
        // score() has copied what are not floats.
        Rows kr = are_floats<E>(block) ? rows_often(a.k, k, block, depth, s.keys) : Rows{(const char*)s.keys, (i64)sizeof(float) * depth};
        mix<E, Single>(a, block, dk, dv, kr, block.keys, s.other, s);
        spread<Single>(dk, s.other, first, last, s.q_rows, s.width, block.keys);
        spread<Single>(dv, s.scores, first, last, s.grad_rows, s.width, block.keys);
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
        // Hidden keys may hold NaN: their scores are overwritten.
        Rows kr = own_rows(a.k, k, block), vr = own_rows(a.v, v, block);
        if (Amx::fits(depth)) {
            s.amx.dot(kr, depth / 2, T, s.q, s.scores, block.keys, block.from, block.to);
            return s.amx.dot(vr, depth / 2, T, s.grad, s.other, block.keys, block.from, block.to);
        }
        dots<Bf16, Pair>(a, block, k, v, kr, vr, depth / 2, s);
    }
    template <class Slope> void weigh(const Block& block, const Slope& slope) {
        for (int t = 0; t < block.keys; t += 2)
            for (int n = block.from; n < block.to; n++) {
                __m512i first = put(t, n, slope), second = _mm512_setzero_si512();
                if (t + 1 < block.keys) second = put(t + 1, n, slope);
                store(s.values + t / 2 * T + n * W, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
            }
        if (!Amx::fits((int)a.head_dim)) return;
        auto clear = [&](int n) {
            for (int t = 0; t < block.keys; t++)
                for (float* x : {s.scores, s.other}) store((u16*)(x + t * T) + n * W, __m256i{});
        };
        if (block.from % 2) clear(block.from - 1); // tile registers read pairs of vectors
        if (block.to % 2) clear(block.to);
    }
    template <class Slope> __m512i put(int t, int n, const Slope& slope) {
        vec p, ds;
        slope(t, n, p, ds);
        ivec used;
        for (int i = 0; i < W; i++) used[i] = n * W + i < s.lanes ? -1 : 0; // unused lanes may hold NaN
        __m256i slopes = (__m256i)_mm512_cvtneps_pbh((__m512)((ivec)ds & used));
        store((u16*)(s.scores + t * T) + n * W, (__m256i)_mm512_cvtneps_pbh((__m512)((ivec)p & used)));
        store((u16*)(s.other + t * T) + n * W, slopes);
        return _mm512_cvtepu16_epi32(slopes);
    }
    void add(const Block& block, int count, Rows dk, Rows dv) {
        int depth = (int)a.head_dim, pairs = (block.keys + 1) / 2, done = 0;
        if (Amx::fits(depth)) {
            s.amx.mix(a.k, k, block, depth, s.keys, T, s.values, s.sums);
            done = s.amx.spread(dk, s.other, block, s.q_rows, s.width);
            s.amx.spread(dv, s.scores, block, s.grad_rows, s.width);
        } else {
            key_pairs(a.k, k, block, depth, (u32*)s.keys);
            mix<Bf16, Pair>(a, block, dk, dv, {(const char*)s.keys, 4 * depth}, pairs, s.values, s);
        }
        int first = block.from * W / 2, last = (std::min(block.to * W, count) + 1) / 2;
        spread<Pair>(dk.after(done), s.other + done * T, first, last, s.q_rows, s.width, block.keys - done);
        spread<Pair>(dv.after(done), s.scores + done * T, first, last, s.grad_rows, s.width, block.keys - done);
    }
};
#endif

// From scores of about a hundred thousand on, rounding of lse is seen in the weights; at a billion nothing else is left of
// them. Then they are taken from the scores' own maximum and sum. Where lse is that of more keys, it says which share is
// theirs, if it is more than rounded: the forward pass adds the products of a score in another order. Sets the maximum,
// `peak`, and what else is subtracted from scores as powers of 2, `total`.
template <class Products> void weigh_again(const Args& a, const Tile& tile, i64 b, i64 h, Products& products, Scratch& s) {
    std::fill_n(s.peak, T, NONE);
    std::fill_n(s.total, T, 0.0f);
    each_block(a, tile, b, T, 0, 1, [&](const Block& block) {
        products.score(block);
        change_scores(a, s, block, b, h, products.unit);
        block.hide(s.scores);
        weigh<NoSums>(block, products.unit, 0, s);
    });
    const double slack = (4 + std::sqrt((double)a.head_dim)) * ROUNDING;
    for (int i = 0; i < T; i++) {
        double own = (double)s.peak[i] * products.unit + std::log2(s.total[i]), all = a.lse[a.lse_row(b, h) + s.at[i]] * LOG2_E;
        if (!(std::fabs(all) > ROUGH * LOG2_E)) { // as in a tile without such scores
            s.peak[i] = 0.0f;
            s.total[i] = s.dead[i] ? NEVER : (float)all;
            continue;
        }
        bool keyless = s.dead[i] || s.total[i] == 0.0f, rounded = !a.more_keys || all - own < std::fabs(all) * slack;
        if (keyless) s.peak[i] = 0.0f;
        s.total[i] = keyless ? NEVER : (float)(std::log2(s.total[i]) + (rounded ? 0.0 : all - own));
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
    bool rough = false;
    for (int i = 0; i < T; i++) {
        i64 p = s.at[i];
        float lse = a.lse[a.lse_row(b, h) + p], delta = 0.0f;
        for (int d = 0; d < depth; d++) delta += widen(out[p * a.out.row + d]) * widen(grad[p * a.grad.row + d]);
        // Unused lanes and queries without keys have weight 0, even if their gradient is NaN.
        s.dead[i] = i >= count || std::isinf(lse);
        s.peak[i] = 0.0f;
        s.total[i] = s.dead[i] ? NEVER : (float)(lse * LOG2_E);
        s.delta[i] = s.dead[i] ? 0.0f : delta - (a.grad_lse ? a.grad_lse[a.lse_row(b, h) + p] : 0.0f);
        rough |= !s.dead[i] && std::fabs(lse) > ROUGH;
    }
    Products products(a, s, tile, b, h);
    if (rough) weigh_again(a, tile, b, h, products, s);
    const float unit = products.unit, scale = (float)a.scale;
    const float share = a.softcap == 0.0 ? 0.0f : (float)(unit * LN_2 / a.softcap);
    const float gain = a.gain();
    each_block(a, tile, b, T, 0, 1, [&](const Block& block) {
        auto slope = [&](int t, int n, vec& p, vec& ds) {
            vec x = load(s.scores + t * T + n * W);
            p = exp2_((x - load(s.peak + n * W)) * unit - load(s.total + n * W));
            vec dp = load(s.other + t * T + n * W);
            if (a.dropped) dp = kept(s.drawn[t], n, dp * gain);
            ds = p * (dp - load(s.delta + n * W));
            if (a.dropped) p = kept(s.drawn[t], n, p * gain);
            if (a.dbias) add_dbias(a, s, block, b, h, t, n, count, ds);
            if (s.caps) ds *= load(s.caps + t * T + n * W);
            else if (share != 0.0f) ds *= larger(splat(1.0f) - x * share * (x * share), vec{}); // 0 where x is -inf
            ds *= scale;
        };
        products.score(block);
        change_scores(a, s, block, b, h, unit);
        block.hide(s.scores);
        block.fill_hidden(s.other, 0.0f); // hidden values may hold NaN
        draw_kept(a, s, block, b, h);
        products.weigh(block, slope);
        products.add(block, count, own_rows(a.dk, dk, block), own_rows(a.dv, dv, block));
    });
    for (int i = 0; i < count; i++)
        for (int d = 0; d < depth; d++) dq[s.at[i] * a.dq.row + d] = narrow<E>(s.sums[d * T + i]);
}

// Sums of a head's keys, rounded.
template <class E> void write_sums(const Args& a, const View& to, i64 b, i64 kv, const float* sums, int width) {
    E* rows = head_of<E>(to, b, kv);
    for (i64 key = a.first_key; key < a.last_key; key++, sums += width) {
        E* row = rows + key * to.row;
        int d = 0;
#if defined(__AVX512F__)
        for (; d + W <= a.head_dim; d += W) put(row + d, load(sums + d));
#endif
        for (; d < a.head_dim; d++) row[d] = narrow<E>(sums[d]);
    }
}

// A thread sums dk and dv of a key head, or of one part of its queries. Where they are no floats, it sums in a memory of
// its own, which has the rows of one head side by side, and rounds them when all queries have been added.
// Whether there was memory for it: see each_tile.
template <class E, class Products> bool backward(const Args& a) {
    const i64 kv_heads = a.heads / a.group, keys = a.last_key - a.first_key;
    std::atomic<i64> begun{0};
    std::atomic<bool> able{false};
    in_threads(a.threads, [&](std::atomic<i64>& next) {
        Scratch s((int)a.head_dim, 1, false, a.softcap != 0.0 && (a.slopes || a.bias));
        if (!s.memory) return;
        able = true;
        float* own = nullptr;
        Args sums = a;
        for (i64 unit = next++; unit < a.batch * kv_heads * a.parts; unit = next++) {
            i64 part = unit % a.parts, kv = unit / a.parts % kv_heads, b = unit / a.parts / kv_heads;
            float *dk, *dv;
            if (a.sums) {
                // Threads without a unit have no memory.
                if (!own) own = a.sums + begun++ * 2 * keys * s.width;
                sums.dk = sums.dv = View{nullptr, 0, s.width, 0};
                std::memset(own, 0, sizeof(float) * 2 * keys * s.width);
                dk = own - a.first_key * s.width;
                dv = dk + keys * s.width;
            } else {
                dk = head_of<float>(a.dk, b, kv) + part * a.part_stride;
                dv = head_of<float>(a.dv, b, kv) + part * a.part_stride;
            }
            for (i64 h = kv * a.group; h < (kv + 1) * a.group; h++) {
                i64 kind = a.head_class[h];
                for (i64 i = a.first_tile[kind] + part; i < a.first_tile[kind + 1]; i += a.parts)
                    backward_tile<E, Products>(sums, a.tiles[i], b, h, dk, dv, s);
            }
            if (!a.sums) continue;
            write_sums<E>(a, a.dk, b, kv, own, s.width);
            write_sums<E>(a, a.dv, b, kv, own + keys * s.width, s.width);
        }
    });
    return able;
}

} // namespace
