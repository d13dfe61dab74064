// Holds whole forward and backward passes of the native kernel, in threads that a sanitizer knows, to plain loops in double.
// tests/kernels/test_native_sanitized.py builds and runs it.

#include "attention.cpp"

#include <thread>

#include "native_problems.h"

namespace { std::atomic<int> parallel_calls{0}; }

extern "C" void GOMP_parallel(void (*work)(void*), void* given, unsigned threads, unsigned) {
    parallel_calls++;
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back(work, given);
    work(given);
    for (std::thread& each : others) each.join();
}

namespace {

template <class E> const E* exactly(const std::vector<E>& from, std::vector<Exact<E>>& kept) {
    if (from.empty()) return nullptr;
    kept.emplace_back((i64)from.size());
    std::copy(from.begin(), from.end(), kept.back().data());
    return kept.back().data();
}

// --- one problem in one element type ----------------------------------------------------------------------------------

// Relative error of a rounded result; the smallest number above 0.
template <class E> constexpr double UNIT = 0x1p-24;
template <> constexpr double UNIT<Bf16> = 0x1p-9;
template <> constexpr double UNIT<Half> = 0x1p-11;
template <class E> constexpr double LEAST = 0x1p-149;
template <> constexpr double LEAST<Half> = 0x1p-24;
// Of a product of bfloat16, which rounds weights too.
template <class E> constexpr double WEIGHT_UNIT = 0.0;
template <> constexpr double WEIGHT_UNIT<Bf16> = 0x1p-9;

template <class E> struct Pass;
template <> struct Pass<float> { using Forward = Wide<float>; using Backward = WideBack<float>; };
template <> struct Pass<Half> { using Forward = Wide<Half>; using Backward = WideBack<Half>; };
template <> struct Pass<Bf16> { using Forward = Wide<Bf16>; using Backward = WideBack<Bf16>; };

// The scratch memory of a thread with its parts apart from each other: one that is written beyond its end is seen.
struct Apart : Scratch {
    std::vector<Exact<float>> kept;

    Apart(int depth, int heads) : Scratch(depth, heads) {
        const i64 lanes = (i64)width * T, block = (i64)KEYS * std::max(T, width);
        auto apart = [&](float*& part, i64 size) {
            kept.emplace_back(size);
            part = kept.back().data();
        };
        for (float** part : {&q, &grad, &sums, &q_rows, &grad_rows}) apart(*part, lanes);
        for (float** part : {&scores, &other, &keys, &values}) apart(*part, block);
        shared_q = q;
        shared_sums = sums;
    }
};

template <class E> struct Case {
    const Problem& p;
    Random random{11};
    Tables t;
    i64 kv_heads = p.heads / p.group, width = (p.depth + W - 1) / W * W, pairs = p.batch * p.heads * p.q_len * p.k_len;
    Exact<E> q = drawn(p.q_len, p.heads), k = drawn(p.k_len, kv_heads), v = drawn(p.k_len, kv_heads);
    Exact<E> out = drawn(p.q_len, p.heads), grad = drawn(p.q_len, p.heads), dq = drawn(p.q_len, p.heads);
    Exact<float> lse{p.batch * p.heads * p.q_len}, grad_lse{lse.size, [&] { return random.uniform(); }};
    Exact<float> slopes{p.heads, [&] { return 0.1f + 0.05f * random.uniform(); }};
    Exact<float> bias{p.bias ? pairs : 0, [&] { return random.below(9) ? random.uniform() : NONE; }}, dbias{bias.size};
    Exact<float> dk{p.parts * p.batch * p.k_len * kv_heads * width}, dv{dk.size};
    Exact<u8> seen{p.batch * p.k_len, [&] { return (u8)(random.below(5) > 0); }};
    Exact<i64> seq_lens{p.batch, [&] { return p.k_len - random.below((int)p.k_len / 2); }};
    std::vector<Exact<Tile>> tiles;
    std::vector<Exact<Run>> runs;
    std::vector<Exact<i64>> numbers;
    std::vector<Exact<i32>> places;
    std::vector<Exact<u64>> bits;
    std::vector<Exact<float>> states;
    Args a{};

    static Tables tables_of(const Problem& p) {
        if (p.rows) return listed(p, {12});
        return p.few ? few(p) : p.branches.empty() ? banded(p) : dilated(p);
    }
    explicit Case(const Problem& p) : p(p), t(tables_of(p)) {
        put_nan();
        auto view = [](void* data, i64 length, i64 heads, i64 row) {
            return View{data, length * heads * row, heads * row, row};
        };
        a.q = view(q.data(), p.q_len, p.heads, p.depth), a.out = view(out.data(), p.q_len, p.heads, p.depth);
        a.k = view(k.data(), p.k_len, kv_heads, p.depth), a.v = view(v.data(), p.k_len, kv_heads, p.depth);
        a.grad = view(grad.data(), p.q_len, p.heads, p.depth), a.dq = view(dq.data(), p.q_len, p.heads, p.depth);
        a.dk = view(dk.data(), p.k_len, kv_heads, width), a.dv = view(dv.data(), p.k_len, kv_heads, width);
        a.lse = lse.data(), a.grad_lse = grad_lse.data();
        numbers.reserve(2);
        a.tiles = exactly(t.tiles, tiles), a.runs = exactly(t.runs, runs);
        a.first_tile = exactly(t.first_tile, numbers), a.head_class = exactly(t.head_class, numbers);
        bits.reserve(2), places.reserve(2);
        a.order = exactly(t.order, places), a.listed = exactly(t.listed, places);
        a.lanes = exactly(t.lanes, bits), a.run_lanes = exactly(t.run_lanes, bits);
        a.seen = p.masked ? seen.data() : nullptr, a.seq_lens = p.padded ? seq_lens.data() : nullptr;
        a.batch = p.batch, a.heads = p.heads, a.group = p.group;
        a.q_len = p.q_len, a.k_len = p.k_len, a.head_dim = p.depth;
        a.dtype = std::is_same_v<E, float> ? 0 : std::is_same_v<E, Bf16> ? 1 : 2;
        a.parts = p.parts, a.part_stride = dk.size / p.parts;
        a.packed_heads = p.packed_heads, a.together = p.together, a.splits = p.splits;
        a.scale = 1.0 / std::sqrt((double)p.depth), a.softcap = p.softcap;
        a.slopes = p.slopes ? slopes.data() : nullptr;
        if (p.bias) a.bias = bias.data(), a.dbias = dbias.data();
        a.bias_batch = p.heads * p.q_len * p.k_len, a.bias_head = p.q_len * p.k_len, a.bias_row = p.k_len, a.bias_key = 1;
        if (p.splits > 1) {
            i64 units = 0;
            for (i64 h = 0; h < p.heads; h += p.packed_heads * p.together)
                units += t.first_tile[t.head_class[h] + 1] - t.first_tile[t.head_class[h]];
            states.emplace_back(p.batch * p.splits * units * p.together * a.state_size());
            a.states = states[0].data();
        }
    }
    Exact<E> drawn(i64 length, i64 heads) {
        return Exact<E>(p.batch * length * heads * p.depth, [&] { return narrow<E>(random.uniform()); });
    }
    bool sees(i64 b, i64 key) const { return (!p.masked || seen[b * p.k_len + key]) && (!p.padded || key < seq_lens[b]); }
    // Keys and values that masks hide may hold NaN.
    void put_nan() {
        for (i64 b = 0; b < p.batch; b++)
            for (i64 key = 0; key < p.k_len; key++) {
                i64 first = at(b, key, p.k_len, 0, kv_heads), row = sees(b, key) ? 0 : kv_heads * p.depth;
                for (const Exact<E>* x : {&k, &v}) std::fill_n(x->data() + first, row, narrow<E>(std::nanf("")));
            }
    }
    i64 at(i64 b, i64 row, i64 length, i64 h, i64 heads) const { return ((b * length + row) * heads + h) * p.depth; }
    double dot(const Exact<E>& x, i64 i, const Exact<E>& y, i64 j, bool sizes = false) const {
        double sum = 0.0;
        for (i64 d = 0; d < p.depth; d++) {
            double one = (double)widen(x[i + d]) * widen(y[j + d]);
            sum += sizes ? std::fabs(one) : one;
        }
        return sum;
    }

    // Errors of float sums and of exp, relative to the sum of absolute values.
    double float_error() const { return (double)(p.depth + p.k_len + 32) * 0x1p-23; }

    // A key that a query sees: how often, its score, and the score's derivative by the dot product.
    struct Pair { i64 key; int times; double score, slope; };
    std::vector<Pair> pairs_of(i64 b, i64 h, i64 row) const {
        std::vector<Pair> found;
        for (i64 key = 0; key < p.k_len && !(p.padded && row >= seq_lens[b]); key++) {
            int times = p.times(h, row, key);
            if (!times || !sees(b, key)) continue;
            i64 own = at(b, row, p.q_len, h, p.heads), other = at(b, key, p.k_len, h / p.group, kv_heads);
            double x = a.scale * dot(q, own, k, other), slope = 1.0;
            if (p.softcap) {
                double share = std::tanh(x / p.softcap);
                x = share * p.softcap, slope = 1.0 - share * share;
            }
            if (p.slopes) x -= slopes[h] * std::fabs((double)(row + p.ahead() - key));
            if (p.bias) x += bias[((b * p.heads + h) * p.q_len + row) * p.k_len + key];
            if (x != -INFINITY) found.push_back({key, times, x, slope});
        }
        return found;
    }
    void check(const char* what, i64 b, i64 h, i64 row, double found, double wanted, double bound) const {
        expect(std::fabs(found - wanted) <= bound, "%s, dtype %d: %s[%d, %d, %d] is %.9g, not %.9g within %.2g", p.name,
               (int)a.dtype, what, (int)b, (int)row, (int)h, found, wanted, bound);
    }

    void check_forward() const {
        for (i64 b = 0; b < p.batch; b++)
            for (i64 h = 0; h < p.heads; h++)
                for (i64 row = 0; row < p.q_len; row++) {
                    std::vector<Pair> pairs = pairs_of(b, h, row);
                    double total = 0.0, found_lse = lse[(b * p.heads + h) * p.q_len + row];
                    for (const Pair& x : pairs) total += x.times * std::exp(x.score);
                    if (total == 0.0) expect(found_lse == NONE, "%s: lse of no key is %g", p.name, found_lse);
                    else check("lse", b, h, row, found_lse, std::log(total), float_error());
                    for (i64 d = 0; d < p.depth; d++) {
                        double sum = 0.0, size = 0.0;
                        for (const Pair& x : pairs) {
                            double value = widen(v[at(b, x.key, p.k_len, h / p.group, kv_heads) + d]);
                            double share = x.times * std::exp(x.score) / total;
                            sum += share * value, size += share * std::fabs(value);
                        }
                        double bound = (UNIT<E> + WEIGHT_UNIT<E> + float_error()) * size + LEAST<E>;
                        check("out", b, h, row, widen(out[at(b, row, p.q_len, h, p.heads) + d]), sum, bound);
                    }
                }
    }

    // With the kernel's own out and lse, which are inputs of a backward pass.
    void check_backward() const {
        std::vector<double> wanted[2], sizes[2]; // of dk and dv, and the sums of absolute values
        for (auto* each : {wanted, sizes}) each[0].assign(k.size, 0.0), each[1].assign(k.size, 0.0);
        const double rounded = 2 * WEIGHT_UNIT<E> + 4 * float_error();
        for (i64 b = 0; b < p.batch; b++)
            for (i64 h = 0; h < p.heads; h++)
                for (i64 row = 0; row < p.q_len; row++) {
                    const i64 own = at(b, row, p.q_len, h, p.heads), of_lse = (b * p.heads + h) * p.q_len + row;
                    const double delta = dot(out, own, grad, own) - grad_lse[of_lse];
                    const double delta_size = dot(out, own, grad, own, true) + std::fabs(grad_lse[of_lse]);
                    std::vector<double> sum(p.depth), size(p.depth), of_bias(p.bias ? p.k_len : 0);
                    std::vector<double> bias_size(of_bias.size());
                    for (const Pair& x : pairs_of(b, h, row)) {
                        const i64 key = at(b, x.key, p.k_len, h / p.group, kv_heads);
                        const double weight = x.times * std::exp(x.score - lse[of_lse]);
                        const double slope = weight * (dot(grad, own, v, key) - delta);
                        const double slope_size = weight * (dot(grad, own, v, key, true) + delta_size);
                        const double ds = slope * x.slope * a.scale, ds_size = slope_size * a.scale;
                        if (p.bias) of_bias[x.key] = slope, bias_size[x.key] = slope_size;
                        for (i64 d = 0; d < p.depth; d++) {
                            double kd = widen(k[key + d]), qd = widen(q[own + d]), gd = widen(grad[own + d]);
                            sum[d] += ds * kd, size[d] += ds_size * std::fabs(kd);
                            wanted[0][key + d] += ds * qd, sizes[0][key + d] += ds_size * std::fabs(qd);
                            wanted[1][key + d] += weight * gd, sizes[1][key + d] += weight * std::fabs(gd);
                        }
                    }
                    for (i64 d = 0; d < p.depth; d++)
                        check("dq", b, h, row, widen(dq[own + d]), sum[d], (UNIT<E> + rounded) * size[d] + LEAST<E>);
                    for (i64 key = 0; key < (i64)of_bias.size(); key++)
                        check("dbias", b, h, row, dbias[of_lse * p.k_len + key], of_bias[key],
                              4 * float_error() * bias_size[key]);
                }
        for (int which = 0; which < 2; which++)
            for (i64 i = 0; i < k.size; i++) {
                double sum = 0.0;
                for (i64 part = 0; part < p.parts; part++)
                    sum += (which ? dv : dk)[part * a.part_stride + i / p.depth * width + i % p.depth];
                i64 row = i / p.depth / kv_heads;
                check(which ? "dv" : "dk", row / p.k_len, i / p.depth % kv_heads, row % p.k_len, sum, wanted[which][i],
                      rounded * sizes[which][i]);
            }
    }

    // With sums in a memory of each thread: the same as dk and dv, rounded.
    void check_rounded() {
        Exact<float> sums(2 * std::min(a.threads, p.batch * kv_heads) * p.k_len * width);
        Exact<E> to_k(k.size), to_v(k.size);
        Args own = a;
        own.sums = sums.data(), own.last_key = p.k_len;
        own.dk = own.dv = View{to_k.data(), p.k_len * kv_heads * p.depth, kv_heads * p.depth, p.depth};
        own.dv.data = to_v.data();
        waits.until = 0;
        attention_backward(&own);
        for (int which = 0; which < 2; which++)
            for (i64 i = 0; i < k.size; i++) {
                E wanted = narrow<E>((which ? dv : dk)[i / p.depth * width + i % p.depth]), found = (which ? to_v : to_k)[i];
                expect(!std::memcmp(&found, &wanted, sizeof(E)), "%s: d%c[%d] is not its sum", p.name, "kv"[which], (int)i);
            }
    }

    // In this thread, tile by tile.
    void forward_apart() {
        Apart s((int)p.depth, (int)p.together);
        for (i64 b = 0; b < p.batch; b++)
            for (i64 h = 0; h < p.heads; h += p.packed_heads * p.together)
                for (i64 i = t.first_tile[t.head_class[h]]; i < t.first_tile[t.head_class[h] + 1]; i++) {
#if defined(HAS_PAIRS)
                    if constexpr (std::is_same_v<E, Bf16>)
                        if (p.depth % 2 == 0) { forward_tile<E, Paired>(a, a.tiles[i], b, h, 0, nullptr, s); continue; }
#endif
                    forward_tile<E, typename Pass<E>::Forward>(a, a.tiles[i], b, h, 0, nullptr, s);
                }
    }
    void backward_apart() {
        Apart s((int)p.depth, 1);
        for (i64 b = 0; b < p.batch; b++)
            for (i64 h = 0; h < p.heads; h++)
                for (i64 i = t.first_tile[t.head_class[h]]; i < t.first_tile[t.head_class[h] + 1]; i++) {
                    float *to_k = head_of<float>(a.dk, b, h / p.group), *to_v = head_of<float>(a.dv, b, h / p.group);
#if defined(HAS_PAIRS)
                    if constexpr (std::is_same_v<E, Bf16>)
                        if (p.depth % 2 == 0) { backward_tile<E, PairedBack>(a, a.tiles[i], b, h, to_k, to_v, s); continue; }
#endif
                    backward_tile<E, typename Pass<E>::Backward>(a, a.tiles[i], b, h, to_k, to_v, s);
                }
    }
    void clear() {
        for (const Exact<float>* x : {&dk, &dv, &dbias, &lse}) std::fill_n(x->data(), x->size, 0.0f);
        for (const Exact<E>* x : {&out, &dq}) std::fill_n(x->data(), x->size, narrow<E>(NEVER));
    }

    void run(bool in_threads_alone) {
        for (i64 threads : {3, 1}) {
            if (in_threads_alone && threads == 1) continue;
            a.threads = threads;
            clear();
            auto call = [&](int (*pass)(const Args*)) {
                waits.until = 0; // a machine whose cores are busy shall not make it use one thread
                int before = parallel_calls;
                pass(&a);
                expect((parallel_calls > before) == (threads > 1), "%s: not in %d threads", p.name, (int)threads);
            };
            call(attention_forward);
            check_forward();
            if (p.few || p.packed_heads > 1) continue;
            call(attention_backward);
            check_backward();
            if (p.parts == 1) check_rounded();
        }
        if (in_threads_alone || p.splits > 1) return;
        clear();
        forward_apart();
        check_forward();
        if (p.few || p.packed_heads > 1) return;
        backward_apart();
        check_backward();
    }
};

} // namespace

// With any argument, only what runs in several threads.
int main(int arguments, char**) {
    // batch, heads, group, q_len, k_len, depth
    Problem dense{"dense", 1, 2, 1, 70, 230, 40};
    dense.parts = 2;
    Problem odd{"odd head_dim, softcap", 1, 2, 2, 65, 65, 33};
    odd.hi = 0, odd.softcap = 0.5;
    Problem window{"window, masked", 2, 2, 2, 100, 130, 32};
    window.lo = -37, window.hi = 5, window.sinks = 3, window.masked = true, window.parts = 2;
    Problem terms{"slopes and bias", 1, 2, 1, 30, 75, 16};
    terms.hi = 0, terms.slopes = terms.bias = true;
    Problem longnet{"dilated", 1, 4, 1, 150, 150, 16};
    longnet.branches = {{32, 1}, {64, 2}, {128, 4}}, longnet.hi = 0;
    Problem ahead{"dilated, padded", 2, 2, 2, 256, 256, 64};
    ahead.branches = {{256, 2}}, ahead.padded = ahead.masked = true;
    Problem grid{"neighbours", 1, 2, 1, 14 * 15, 14 * 15, 32};
    grid.rows = 14, grid.columns = 15, grid.near = 4, grid.masked = true;
    Problem spread{"splits of packed heads", 1, 6, 3, 20, 500, 32};
    spread.hi = 0, spread.packed_heads = 3, spread.splits = 3;
    Problem one{"one query", 2, 4, 4, 1, 300, 64};
    one.hi = 0, one.packed_heads = 4, one.splits = 2, one.masked = one.slopes = true;
    Problem turns{"heads in turns", 1, 8, 2, 2, 130, 128};
    turns.hi = 0, turns.packed_heads = 2, turns.together = 4, turns.masked = true;
    Problem wide{"few lanes of an odd head_dim", 1, 4, 2, 6, 150, 24};
    wide.packed_heads = 2, wide.together = 2, wide.splits = 2;
    Problem decoded{"few queries of dilated branches", 1, 4, 2, 3, 250, 64};
    decoded.branches = {{64, 1}, {128, 2}, {256, 4}}, decoded.hi = 0;
    decoded.few = true, decoded.packed_heads = 2, decoded.splits = 2;
    for (const Problem& p : {dense, odd, window, terms, longnet, ahead, grid, spread, one, turns, wide, decoded}) {
        Case<float>(p).run(arguments > 1);
        Case<Bf16>(p).run(arguments > 1);
        Case<Half>(p).run(arguments > 1);
    }
    return ended();
}
