// Problems small enough for plain loops, and their tables as attn_dispatch/kernels/native builds them in Python.

#pragma once

#include <map>
#include <vector>

#include "attention/tiles.h"
#include "native_checks.h"

namespace {

constexpr i64 FAR = (i64)1 << 40;

struct Branch { i64 length, rate; };

struct Problem {
    const char* name;
    i64 batch, heads, group, q_len, k_len, depth;
    // A window lo <= key - query <= hi, counted in tokens, and the first keys; or branches, or a grid of two axes.
    i64 lo = -FAR, hi = FAR, sinks = 0;
    std::vector<Branch> branches = {};
    i64 rows = 0, columns = 0, near = 0;
    bool masked = false, padded = false;
    double softcap = 0.0;
    bool slopes = false, bias = false;
    i64 packed_heads = 1, together = 1, splits = 1, parts = 1;
    bool few = false; // one tile of all queries and heads that share keys: forward only

    i64 ahead() const { return k_len - q_len; }
    // How often a query sees a key.
    int times(i64 h, i64 q, i64 k) const {
        q += ahead();
        if (rows) return std::abs(q / columns - k / columns) <= near && std::abs(q % columns - k % columns) <= near;
        if (branches.empty()) return k - q <= hi && (lo <= k - q || k < sinks);
        int found = 0;
        for (const Branch& x : branches) {
            i64 offset = h % x.rate, begin = q / x.length * x.length;
            bool selected = (q - begin) % x.rate == offset && (k - begin) % x.rate == offset;
            found += selected && k / x.length * x.length == begin && k - q <= hi;
        }
        return found;
    }
};

struct Tables {
    std::vector<Tile> tiles;
    std::vector<Run> runs;
    std::vector<i64> first_tile{0}, head_class;
    std::vector<i32> order, listed;
    std::vector<u64> lanes, run_lanes;
};

Tables banded(const Problem& p) {
    Tables t;
    for (i64 first = 0; first < p.q_len; first += T) {
        t.tiles.push_back({first, 1, std::min<i64>(T, p.q_len - first), (i64)t.runs.size(), p.sinks ? 2 : 1});
        auto bound = [&](i64 x) { return x == FAR || x == -FAR ? x : x + p.ahead(); };
        if (p.sinks) t.runs.push_back({0, 1, p.sinks, -FAR, bound(p.lo) - 1});
        t.runs.push_back({0, 1, p.k_len, bound(p.lo), bound(p.hi)});
    }
    t.first_tile.push_back((i64)t.tiles.size());
    t.head_class.assign(p.heads, 0);
    return t;
}

// The runs of keys that a token sees.
std::vector<Run> runs_of(const Problem& p, i64 h, i64 token) {
    std::vector<Run> found;
    const i64 hi = p.hi == FAR ? FAR : p.ahead();
    for (const Branch& x : p.branches) {
        i64 begin = token / x.length * x.length, end = std::min(p.k_len, begin + x.length), offset = h % x.rate;
        if ((token - begin) % x.rate == offset)
            found.push_back({begin + offset, x.rate, (end - begin - offset + x.rate - 1) / x.rate, -FAR, hi});
    }
    return found;
}

Tables dilated(const Problem& p) {
    Tables t;
    i64 period = 1, shortest = p.k_len; // rates are powers of 2, and lengths multiples of the shortest one and of all rates
    for (const Branch& x : p.branches) period = std::max(period, x.rate), shortest = std::min(shortest, x.length);
    for (i64 h = 0; h < p.heads; h++) t.head_class.push_back(h % period);
    for (i64 kind = 0; kind < std::min(period, p.heads); kind++) {
        for (i64 begin = 0; begin < p.k_len; begin += shortest)
            for (i64 residue = 0; residue < period; residue++) {
                i64 end = std::min(p.k_len, begin + shortest);
                std::vector<i64> tokens;
                for (i64 token = begin + residue; token < end; token += period)
                    if (token >= p.ahead()) tokens.push_back(token);
                for (i64 i = 0; i < (i64)tokens.size(); i += T) {
                    std::vector<Run> runs = runs_of(p, kind, tokens[i]);
                    i64 count = std::min<i64>(T, (i64)tokens.size() - i);
                    t.tiles.push_back({tokens[i] - p.ahead(), period, count, (i64)t.runs.size(), (i64)runs.size()});
                    t.runs.insert(t.runs.end(), runs.begin(), runs.end());
                }
            }
        t.first_tile.push_back((i64)t.tiles.size());
    }
    return t;
}

// One tile of all queries of `group` heads, with the lanes that see each run.
Tables few(const Problem& p) {
    Tables t;
    std::map<std::vector<i64>, i64> kinds; // the offsets of grouped heads
    for (i64 h = 0; h < p.heads; h += p.group) {
        std::map<std::vector<i64>, u64> lanes;
        for (i64 lane = 0; lane < p.q_len * p.group; lane++) {
            std::map<std::vector<i64>, i64> alike; // branches with the same keys each count
            for (const Run& x : runs_of(p, h + lane % p.group, p.ahead() + lane / p.group)) {
                std::vector<i64> key{x.key, x.step, x.count, x.lo, x.hi};
                i64 number = alike[key]++;
                key.push_back(number);
                lanes[key] |= (u64)1 << lane;
            }
        }
        t.tiles.push_back({0, 1, p.q_len, (i64)t.runs.size(), (i64)lanes.size()});
        for (const auto& each : lanes) {
            const std::vector<i64>& x = each.first;
            t.runs.push_back({x[0], x[1], x[2], x[3], x[4]});
            t.run_lanes.push_back(each.second);
        }
        t.first_tile.push_back((i64)t.tiles.size());
        for (i64 i = 0; i < p.group; i++) t.head_class.push_back((i64)t.tiles.size() - 1);
    }
    return t;
}

// Tiles of queries in any order, whose keys are listed: those that all see, and by the first 32 lanes those that some see.
Tables listed(const Problem& p, Random random) {
    Tables t;
    for (i64 i = 0; i < p.q_len; i++) t.order.insert(t.order.begin() + random.below((int)i + 1), (i32)i);
    for (i64 first = 0; first < p.q_len; first += T) {
        i64 count = std::min<i64>(T, p.q_len - first), begin = (i64)t.runs.size();
        std::vector<std::pair<i32, u64>> full, first_half, both;
        for (i64 k = 0; k < p.k_len; k++) {
            u64 bits = 0, all = count < 64 ? ((u64)1 << count) - 1 : ~(u64)0;
            for (i64 i = 0; i < count; i++) bits |= (u64)p.times(0, t.order[first + i], k) << i;
            if (bits) (bits == all ? full : bits >> 32 ? both : first_half).push_back({(i32)k, bits});
        }
        auto add = [&](const std::vector<std::pair<i32, u64>>& keys, i64 lanes) {
            if (keys.empty()) return;
            t.runs.push_back({(i64)t.listed.size(), 0, (i64)keys.size(), 0, lanes});
            for (const auto& key : keys) t.listed.push_back(key.first), t.lanes.push_back(key.second);
        };
        add(full, T);
        add(both, T);
        add(first_half, 32);
        t.tiles.push_back({first, 0, count, begin, (i64)t.runs.size() - begin});
    }
    t.first_tile.push_back((i64)t.tiles.size());
    t.head_class.assign(p.heads, 0);
    return t;
}

} // namespace
