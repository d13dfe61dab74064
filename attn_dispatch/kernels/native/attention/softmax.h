// What is done to scores before the softmax, and the softmax over blocks.

#pragma once

#include "dropout.h"

namespace {

// Caps the scores of a block, and adds ALiBi's terms and the bias. Lanes hold heads from h on; `unit` scales scores to
// powers of 2.
void change_scores(const Args& a, const Scratch& s, const Block& block, i64 b, i64 h, float unit) {
    if (a.softcap == 0.0 && !a.slopes && !a.bias) return;
    const float to_share = a.softcap == 0.0 ? 0.0f : (float)(unit * LN_2 / a.softcap), from_natural = (float)(LOG2_E / unit);
    const float cap = (float)a.softcap * from_natural;
    for (int n = block.from; n < block.to; n++) {
        float* x = s.scores + n * W;
        if (a.softcap != 0.0)
            for (int i = 0; i < block.keys; i++) {
                vec share = tanh_(load(x + i * s.pitch) * to_share);
                store(x + i * s.pitch, share * cap);
                if (s.caps) store(s.caps + i * T + n * W, larger(splat(1.0f) - share * share, vec{})); // 0 of NaN
            }
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
            vec first = weight(t), second = weight(t + 1);
            store(s.other + t / 2 * s.pitch + n * W, rounded(first, second));
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

// For their total alone.
struct NoSums {
    template <class Weight> static void put(const Scratch&, const Block& block, int, const Weight& weight) {
        for (int t = 0; t < block.keys; t++) weight(t);
    }
    static void scale_sums(const Scratch&, int, vec, int) {}
};

// The softmax over some keys: for each lane the maximum, the sum of the weights, and that of the weighed values, [d][lane] or
// [lane][d] if `rows`.
struct Sums {
    float *peak, *total, *values;

    Sums(float* state) : peak(state), total(state + T), values(state + 2 * T) {}
    Sums(const Scratch& s) : peak(s.peak), total(s.total), values(s.sums) {}
    void select(Scratch& s) const { s.peak = peak, s.total = total, s.sums = values; }

    void copy(const Sums& other, int pitch, int depth) {
        std::memcpy(peak, other.peak, sizeof(float) * pitch);
        std::memcpy(total, other.total, sizeof(float) * pitch);
        std::memcpy(values, other.values, sizeof(float) * depth * pitch);
    }
    // Adds those of later keys.
    void add(const Sums& other, int pitch, int depth, bool rows, float unit) {
        float fade[2][T];
        for (int n = 0; n < pitch; n += W) {
            vec old = load(peak + n), own = load(other.peak + n), most = larger(old, own);
            vec base = most == splat(NONE) ? vec{} : most;
            store(fade[0] + n, exp2_((old - base) * unit));
            store(fade[1] + n, exp2_((own - base) * unit));
            store(peak + n, most);
        }
        for (int i = 0; i < 2; i++) { // products first, so that compilers fuse the same ones everywhere
            add_scaled(total, i ? other.total : nullptr, fade[i], pitch, 1, false);
            add_scaled(values, i ? other.values : nullptr, fade[i], pitch, depth, rows);
        }
    }

private:
    // to = to * factor, or to + other * factor
    static void add_scaled(float* to, const float* other, const float* factor, int pitch, int depth, bool rows) {
        for (int i = 0; i < (rows ? pitch : depth); i++)
            for (int n = 0; n < (rows ? depth : pitch); n += W) {
                const i64 at = (i64)i * (rows ? depth : pitch) + n;
                const vec by = rows ? splat(factor[i]) : load(factor + n);
                store(to + at, other ? load(to + at) + load(other + at) * by : load(to + at) * by);
            }
    }
};

// Turns scores into weights relative to the running maximum, and rescales earlier sums. `unit` scales scores to powers of 2.
// DROPS: weights that are dropped count in the total.
template <class Form, bool DROPS = false> void weigh(const Block& block, float unit, int depth, Scratch& s) {
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
            return DROPS ? kept(s.drawn[t], n, p) : p;
        });
        store(s.peak + n * W, peak);
        store(s.total + n * W, total);
        bool same = true;
        for (int i = 0; i < W; i++) same &= fade[i] == 1.0f;
        if (!same) Form::scale_sums(s, n, fade, depth);
    }
}

} // namespace
