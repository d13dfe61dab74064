// The products of a forward pass, for one key head at a time.

#pragma once

#include "softmax.h"

namespace {

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
    bool is_ahead(const Block& block) const {
        return s.pitch > FEW ? ::is_ahead<E>(a, block) : !block.positions;
    }
    Fetch next_rows(const View& x, const E* head, const Block& block) const {
        return rows_after(block, own_rows(x, head, block), depth * sizeof(E), s.pitch > FEW ? KEYS : FEW_KEYS);
    }
    template <class Op> void dot(const Block& block, Rows rows, int steps) const {
        if (!is_ahead(block))
            ::dot<Op>(rows, own_rows(a.v, v, block), block.listed, steps, s.pitch, s.q, s.scores, block.keys, block.from,
                      block.to, a.invariant != 0);
        else {
            Fetch next = next_rows(a.k, k, block);
            Dot<Op, Fetch> product{rows, steps, s.pitch, s.q, s.scores, next, a.invariant != 0};
            multiply(product, block.keys, block.from, block.to);
        }
    }
    template <class Op> void add(const Block& block, Rows rows, int steps, const float* weights) const {
        if (!is_ahead(block)) multiply(Mix<Op>{rows, steps, s.pitch, weights, s.sums}, depth, block.from, block.to);
        else multiply(Mix<Op, Fetch>{rows, steps, s.pitch, weights, s.sums, next_rows(a.v, v, block)}, depth, block.from, block.to);
    }
};

// The products of a tile's forward pass in floats, for any input type.
template <class E> struct Wide : KeyHead<E> {
    using Weights = Floats;
    using KeyHead<E>::KeyHead, KeyHead<E>::a, KeyHead<E>::s, KeyHead<E>::k, KeyHead<E>::v, KeyHead<E>::depth;

    void begin(i64 b, i64 h) { pack(a.q, head_of<E>(a.q, b, h), s, depth, (float)(a.scale * LOG2_E), s.q); }
    void score(const Block& block) { this->template dot<Single>(block, rows_once(a.k, k, block, depth, s.keys), depth); }
    void mix(const Block& block) {
        this->template add<Single>(block, rows_often(a.v, v, block, depth, s.values), block.keys, s.scores);
    }
};

#if defined(HAS_PAIRS)
// The same with pairs of bfloat16, summed in floats: adjacent entries of a row of K, adjacent rows of V.
struct Paired : KeyHead<Bf16> {
    using Weights = Pairs;
    using KeyHead<Bf16>::KeyHead;

    bool uses_amx() const { return Amx::fits(depth); }
    void begin(i64 b, i64 h) {
        unit = pack_pairs(a.q, head_of<Bf16>(a.q, b, h), s, depth, (float)(a.scale * LOG2_E), s.q);
    }
    void score(const Block& block) {
        Rows rows = own_rows(a.k, k, block);
        if (!uses_amx()) return dot<Pair>(block, rows, depth / 2);
        Fetch after = next_rows(a.k, k, block), *next = s.pitch > FEW ? nullptr : &after;
        s.amx.dot(rows, depth / 2, s.pitch, s.q, s.scores, block.keys, block.from, block.to, next);
    }
    void mix(const Block& block) {
        if (uses_amx()) {
            Fetch after = next_rows(a.v, v, block), *next = s.pitch > FEW ? nullptr : &after;
            return s.amx.mix(a.v, v, block, depth, s.values, s.pitch, s.other, s.sums, next);
        }
        key_pairs(a.v, v, block, depth, (u32*)s.values);
        add<Pair>(block, {(const char*)s.values, 4 * depth}, (block.keys + 1) / 2, s.other);
    }
};
#endif

} // namespace
