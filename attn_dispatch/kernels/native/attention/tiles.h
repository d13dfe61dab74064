// The arguments: tiles of queries, their runs of keys, and the blocks in which a tile reads them.

#pragma once

#include "vectors.h"

namespace {

// The arguments. tables.py describes the tables.

// A tile with step 0 reads its queries from `order`; its runs are listed. A listed run, with step 0, reads its keys from
// `listed`; some of the lanes [lo, hi) see each, those of its bit mask.
struct Run {
    i64 key, step, count, lo, hi;
    bool is_listed() const { return step == 0; }
};
struct Tile { i64 query, step, count, run, runs; };
struct View { void* data; i64 batch, row, head; }; // strides in elements; rows are contiguous

struct Args {
    View q, k, v, out, grad, dq;
    View dk, dv; // without `sums`: `parts` float sums each, rows padded to whole vectors
    float* sums; // of a key head's dk and dv, for each thread that has one; or null
    float* lse;                          // [batch, heads, q_len]; forward: or null
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
    i64 first_key, last_key; // of the keys that the tables name, with `sums`: [first_key, last_key)
    // Forward: heads in a tile, which share keys; tiles of neighbouring key heads that read their blocks in turns; splits of
    // each run, each a unit of work.
    i64 packed_heads, together, splits;
    float* states; // with more than one split: state_size() for each tile of a split
    double scale, softcap;      // no softcap: 0
    const float *slopes, *bias; // of ALiBi [., heads], and [., ., q_len, k_len]; or null
    float* dbias;               // [batch, heads, q_len, k_len], or null
    i64 slopes_batch, bias_batch, bias_head, bias_row, bias_key; // strides
    i64 more_keys; // backward: whether lse is that of more keys than the tables name
    // Dropout: of 65536 numbers those below `dropped` drop a weight; the batch row of the first one here, in the whole call.
    i64 dropped, first_row;
    u64 seed;
    i64 invariant; // whether the results of a row have the same bits whatever is computed with it: see each_block

    // Floats of what a split leaves: peaks, totals and sums by lane, and the unit of scores.
    i64 state_size() const { return 2 * T + head_dim * std::min<i64>(T, (packed_heads * q_len + W - 1) / W * W) + 1; }

    float gain() const { return 65536.0f / (float)(65536 - dropped); } // of what is kept
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
    i64 first = 0, full_first = 0, full_last = 0; // keys of the run from which on some lane sees them, and that all do
    i64 chunk = 0; // of the keys that the tile reads, with `invariant`
    const u8* seen;        // by position, or null
    const i32* positions;  // of the keys, or null where they are an arithmetic progression
    const u64* lanes;      // bit mask of the lanes that see each key, or null
    u64 run_lanes;         // bit mask of the lanes that see any key of the run
    i64 packed_heads;              // lanes per query
    int listed = 0; // keys of the tile that are listed from the block's first one on
    int keys, from, to, pitch;
    bool partial, hidden;

    Block(const Args& a, const Tile& tile, const Run& run, const Span& span, i64 t, i64 end, i64 b, int pitch)
        : tile(tile), run(run), t(t), limit(a.keys_of(b)), seen(a.seen_in(b)), positions(nullptr), lanes(nullptr),
          run_lanes(a.run_lanes ? a.run_lanes[&run - a.runs] : ~(u64)0), packed_heads(a.packed_heads),
          keys((int)(a.invariant ? end - t : std::min<i64>(span.block(t), end - t))),
          from(0),
          to((int)(tile.count * packed_heads + W - 1) / W), pitch(pitch), partial(span.partial(t, keys)), hidden(false) {
        first = span.first, full_first = span.full_first, full_last = span.full_last;
        find_hidden();
        if (!partial || pitch <= FEW) return; // of a few queries, all are weighed
        // Lanes' bounds increase with the key: the first key has the lowest lane, the last key the highest.
        from = Lanes(tile, run, t, packed_heads).from / W;
        to = std::min(to, (Lanes(tile, run, t + keys - 1, packed_heads).to + W - 1) / W);
    }
    Block(const Args& a, const Tile& tile, const Run& run, i64 t, i64 b, int pitch)
        : tile(tile), run(run), t(t), limit(a.keys_of(b)), seen(a.seen_in(b)), positions(a.listed + run.key + t),
          lanes(a.lanes + run.key + t), run_lanes(~(u64)0), packed_heads(1),
          keys((int)std::min<i64>(KEYS, run.count - t)), from((int)run.lo / W),
          to((int)(std::min(run.hi, tile.count) + W - 1) / W), pitch(pitch), partial(false), hidden(false) {
        const Run& last = a.runs[tile.run + tile.runs - 1];
        listed = (int)(last.key + last.count - run.key - t);
        find_hidden();
    }
    // Some of its keys, of one that is not listed.
    Block part(int from) const {
        Block some = *this;
        some.t += from;
        some.keys = std::min(keys - from, FEW_KEYS);
        return some;
    }
    i64 key(int i) const { return positions ? positions[i] : run.key + (t + i) * run.step; }

    bool sees(int i) const { return t + i >= first && key(i) < limit && (!seen || seen[key(i)]); }
    void find_hidden() {
        hidden = t < first; // as a block may, to begin at its place
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
            if (t + i >= full_first && t + i < full_last) continue;
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
        if (from >= to) return;
        const u64 all = ~(u64)0 >> (64 - (to - from) * W);
        for (int i = 0; i < keys; i++) {
            u64 see = (lanes ? lanes[i] : run_lanes) >> from * W;
            if ((see & all) == all) continue;
            for (int n = from; n < to; n++) {
                float* p = scores + i * pitch + n * W;
                store(p, ((bit & (int)(see >> (n - from) * W)) != 0) ? load(p) : splat(NONE));
            }
        }
    }
};

// The first key of a run that the mask does not hide: keys before it, as of padding, do not move blocks.
inline i64 first_seen(const Args& a, const Run& run, i64 b) {
    const u8* seen = a.seen_in(b);
    if (!seen || run.step != 1) return 0;
    const void* found = std::memchr(seen + run.key, 1, run.count);
    return found ? (const u8*)found - (seen + run.key) : 0;
}

// Calls `visit` with every block of keys that a tile reads, in one of the splits of each run. With `invariant`, blocks
// and chunks begin at places of a run that do not depend on the tile: the keys of a query are added in one order,
// whatever others see. A split is a chunk then.
template <class F>
void each_block(const Args& a, const Tile& tile, i64 b, int pitch, i64 split, i64 splits, const F& visit) {
    i64 chunk = -1;
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
        if (a.invariant) {
            const i64 origin = first_seen(a, run, b), first = std::max(span.first, origin);
            i64 before = -1, end;
            for (i64 t = first - (a.dtype == 1 ? (first - origin) % TILE_KEYS : 0); t < span.last; t = end) {
                end = std::min(span.last, t + KEYS - (t - origin) % KEYS);
                if (i64 own = (t - origin) / CHUNK; own != before) {
                    chunk++;
                    before = own;
                }
                if (splits > 1 && std::min(chunk, splits - 1) != split) continue;
                Block block(a, tile, run, span, t, end, b, pitch);
                block.chunk = chunk;
                visit(block);
            }
            continue;
        }
        i64 all = std::max<i64>(0, span.last - span.first), end = span.first + all * (split + 1) / splits;
        for (i64 t = span.first + all * split / splits; t < end;) {
            Block block(a, tile, run, span, t, end, b, pitch);
            t += block.keys;
            visit(block);
        }
    }
}

} // namespace
