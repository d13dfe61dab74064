// Holds the parts of the native kernel to plain loops: conversions, functions of vectors, products of every size, and the
// lanes of every block of keys. tests/kernels/test_native_sanitized.py builds and runs it.

#include "attention/forward.h"

#include <vector>

#include "native_checks.h"

extern "C" void GOMP_parallel(void (*work)(void*), void* given, unsigned, unsigned) { work(given); }

namespace {

constexpr double ROUNDING = 0x1p-24; // of a float, relative
const float NaN = std::nanf("");

template <class F> vec each_lane(const F& value) {
    vec x;
    for (int i = 0; i < W; i++) x[i] = value(i);
    return x;
}

// --- functions of vectors ---------------------------------------------------------------------------------------------

void powers_of_2() {
    constexpr int STEPS = 200'000;
    for (int first = 0; first < STEPS; first += W) {
        vec x = each_lane([&](int i) { return -170.0f * (first + i) / STEPS; }), y = exp2_(x);
        for (int i = 0; i < W; i++) {
            double exact = std::exp2((double)x[i]);
            // The polynomial's error, six roundings that shrink by |f| <= 1/2 each, and what is too small for a float.
            double bound = exact * (2e-8 + 3 * ROUNDING) + (x[i] < -124.0f ? 0x1p-124 : 0.0);
            expect(std::fabs(y[i] - exact) <= bound, "2^%.9g is %.9g, not %.9g", x[i], y[i], exact);
        }
    }
    expect(exp2_(splat(NONE))[0] == 0.0f, "2^-inf is %g", exp2_(splat(NONE))[0]);
    expect(exp2_(vec{})[0] == 1.0f, "2^0 is %.9g", exp2_(vec{})[0]);
    expect(std::isnan(exp2_(splat(NaN))[0]), "2^NaN is %g", exp2_(splat(NaN))[0]);
}

void tangents() {
    constexpr int STEPS = 200'000;
    for (int first = -STEPS; first < STEPS; first += W) {
        vec x = each_lane([&](int i) { return 12.0f * (first + i) / STEPS; }), y = tanh_(x);
        for (int i = 0; i < W; i++) {
            double exact = std::tanh((double)x[i]), unit = std::fabs(std::nextafter((float)exact, 2.0f) - (float)exact);
            expect(std::fabs(y[i] - exact) <= 3 * unit, "tanh %.9g is %.9g, not %.9g", x[i], y[i], exact);
        }
    }
    expect(tanh_(splat(NEVER))[0] == 1.0f && tanh_(splat(NONE))[0] == -1.0f, "tanh of infinity");
    expect(tanh_(vec{})[0] == 0.0f, "tanh 0 is %g", tanh_(vec{})[0]);
    expect(std::isnan(tanh_(splat(NaN))[0]), "tanh NaN is %g", tanh_(splat(NaN))[0]);
}

// --- element types ----------------------------------------------------------------------------------------------------

// Every number of 16 bits, those halfway between two of them, and the floats beside these.
template <class E> void rounding(const char* name, u16 infinity) {
    for (int bits = 0; bits < infinity; bits++) {
        float low = widen(E{(u16)bits}), high = bits + 1 == infinity ? NEVER : widen(E{(u16)(bits + 1)});
        float step = bits + 1 == infinity ? low - widen(E{(u16)(bits - 1)}) : high - low, middle = low + step / 2;
        for (float sign : {1.0f, -1.0f}) {
            auto rounds = [&](float x, int to) {
                int found = narrow<E>(sign * x).bits, wanted = to | (sign < 0 ? 0x8000 : 0);
                expect(found == wanted, "%s of %.9g: %x, not %x", name, sign * x, found, wanted);
            };
            rounds(low, bits);
            rounds(middle, bits + (bits & 1));
            rounds(std::nextafter(middle, 0.0f), bits);
            rounds(std::nextafter(middle, NEVER), bits + 1);
        }
    }
    for (int bits = infinity + 1; bits < 0x8000; bits++) {
        float x = widen(E{(u16)bits});
        expect(std::isnan(x) && std::isnan(widen(narrow<E>(x))), "%s %x is no NaN", name, bits);
    }
    expect(widen(narrow<E>(NEVER)) == NEVER && widen(narrow<E>(NONE)) == NONE, "%s of infinity", name);
}

template <class E> void rows_of_floats(Random random) {
    for (int n = 0; n < 4 * W; n++) {
        Exact<E> from(n, [&] { return narrow<E>(random.uniform()); });
        Exact<float> to(n);
        widen_row(from.data(), to.data(), n);
        for (int i = 0; i < n; i++) expect(to[i] == widen(from[i]), "widen_row, %d of %d", i, n);
        for (int first = 0; first + W <= n; first++) {
            vec x = wide(from.data() + first);
            for (int i = 0; i < W; i++) expect(x[i] == widen(from[first + i]), "wide, lane %d", i);
        }
    }
}

template <int M, int N> void totals(Random random) {
    for (int pitch = N; pitch < N + 3; pitch++) {
        vec x[M][N];
        for (auto& row : x)
            for (vec& each : row) each = each_lane([&](int) { return (float)random.below(1000); });
        Exact<float> to((M - 1) * pitch + N);
        put_totals<M, N>(x, to.data(), pitch);
        for (int i = 0; i < M; i++)
            for (int n = 0; n < pitch && i * pitch + n < to.size; n++) {
                double sum = 0.0; // of whole numbers: exact
                for (int l = 0; l < W && n < N; l++) sum += x[i][n][l];
                float found = to[i * pitch + n];
                expect(found == sum, "put_totals<%d, %d>, %d %d: %g, not %g", M, N, i, n, found, sum);
            }
    }
}

// --- products ---------------------------------------------------------------------------------------------------------

// A word of an operand is one number, or two of bfloat16; a product of words is the sum of theirs. All are whole numbers, so
// that sums are exact in every order.
template <class Op> struct Word;
template <> struct Word<Single> {
    static float drawn(Random& random) { return (float)(random.below(17) - 8); }
    static double product(float x, float y) { return (double)x * y; }
};
#if defined(HAS_PAIRS)
template <> struct Word<Pair> {
    static float drawn(Random& random) {
        u32 bits = pair_of(narrow<Bf16>((float)(random.below(17) - 8)), narrow<Bf16>((float)(random.below(17) - 8)));
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }
    static double product(float x, float y) {
        u32 a, b;
        std::memcpy(&a, &x, sizeof a);
        std::memcpy(&b, &y, sizeof b);
        auto half = [](u32 bits, int place) { return (double)widen(Bf16{(u16)(bits >> 16 * place)}); };
        return half(a, 0) * half(b, 0) + half(a, 1) * half(b, 1);
    }
};
#endif

struct Size { int count, depth, pitch, from, to; };

template <class F> void each_size(int tall, const F& visit) {
    for (int pitch : {W, 2 * W, T})
        for (int from = 0; from < pitch / W; from++)
            for (int to = from + 1; to <= pitch / W; to++)
                for (int count = 1; count <= 2 * std::max(tall, MR) + 1; count += to - from > NV + 1 ? 3 : 1)
                    for (int depth : {1, 2, 5}) visit({count, depth, pitch, from, to});
}

// What lies outside of [from, to) vectors, and between rows, stays as it was.
void compare(const char* name, const Size& size, const Exact<float>& found, const std::vector<double>& wanted) {
    for (i64 i = 0; i < found.size; i++)
        expect(found[i] == wanted[i], "%s of %d by %d, pitch %d, vectors %d to %d: [%d] is %g, not %g", name, size.count,
               size.depth, size.pitch, size.from, size.to, (int)i, found[i], wanted[i]);
}

template <class Op, class Ahead> void dots(Random random) {
    each_size(Dot<Op>::TALL, [&](const Size& size) {
        const int stride = size.depth + 3;
        Exact<float> rows((size.count - 1) * stride + size.depth, [&] { return Word<Op>::drawn(random); });
        Exact<float> lanes(size.depth * size.pitch, [&] { return Word<Op>::drawn(random); });
        Exact<float> scores(size.count * size.pitch, [&] { return 1000.0f; });
        std::vector<double> wanted(scores.size, 1000.0);
        for (int i = 0; i < size.count; i++)
            for (int lane = size.from * W; lane < size.to * W; lane++) {
                double& sum = wanted[i * size.pitch + lane] = 0.0;
                for (int d = 0; d < size.depth; d++)
                    sum += Word<Op>::product(rows[i * stride + d], lanes[d * size.pitch + lane]);
            }
        Rows even{(const char*)rows.data(), 4 * stride};
        multiply(Dot<Op, Ahead>{even, size.depth, size.pitch, lanes.data(), scores.data()}, size.count, size.from, size.to);
        compare("Dot", size, scores, wanted);
        Exact<i32> at(size.count + 50, [&] { return (i32)random.below(size.count); }); // more are listed than are computed
        std::vector<double> listed(scores.size, 1000.0);
        for (int i = 0; i < size.count; i++)
            std::copy_n(&wanted[at[i] * size.pitch], size.pitch, &listed[i * size.pitch]);
        std::fill_n(scores.data(), scores.size, 1000.0f);
        dot<Op>({even.data, even.stride, at.data()}, {even.data, even.stride, at.data()}, (int)at.size, size.depth, size.pitch,
                lanes.data(), scores.data(), size.count, size.from, size.to);
        compare("Dot of listed rows", size, scores, listed);
    });
}

template <class Op, class Ahead> void mixes(Random random) {
    each_size(Mix<Op>::TALL, [&](const Size& size) {
        const int stride = size.count + 3;
        Exact<float> rows((size.depth - 1) * stride + size.count, [&] { return Word<Op>::drawn(random); });
        Exact<float> lanes(size.depth * size.pitch, [&] { return Word<Op>::drawn(random); });
        Exact<float> sums(size.count * size.pitch, [&] { return (float)random.below(10); });
        std::vector<double> wanted(sums.data(), sums.data() + sums.size);
        for (int i = 0; i < size.count; i++)
            for (int lane = size.from * W; lane < size.to * W; lane++)
                for (int t = 0; t < size.depth; t++)
                    wanted[i * size.pitch + lane] +=
                        Word<Op>::product(rows[t * stride + i], lanes[t * size.pitch + lane]);
        Rows even{(const char*)rows.data(), 4 * stride};
        multiply(Mix<Op, Ahead>{even, size.depth, size.pitch, lanes.data(), sums.data()}, size.count, size.from, size.to);
        compare("Mix", size, sums, wanted);
    });
}

template <class Op> void spreads(Random random) {
    each_size(MR, [&](const Size& size) {
        const int first = size.depth / 2, last = first + size.depth, stride = size.to * W + 3;
        Exact<float> lanes((size.count - 1) * T + last, [&] { return Word<Op>::drawn(random); });
        Exact<float> others(last * size.pitch, [&] { return Word<Op>::drawn(random); });
        Exact<float> rows((size.count - 1) * stride + size.to * W, [&] { return (float)random.below(10); });
        Exact<float> listed(rows.size);
        std::copy_n(rows.data(), rows.size, listed.data());
        std::vector<double> wanted(rows.data(), rows.data() + rows.size), wanted_listed = wanted;
        int next = size.count;
        Exact<i32> at(size.count, [&] { return --next; }); // in reverse
        for (int t = 0; t < size.count; t++)
            for (int d = size.from * W; d < size.to * W; d++)
                for (int l = first; l < last; l++) {
                    double product = Word<Op>::product(lanes[t * T + l], others[l * size.pitch + d]);
                    wanted[t * stride + d] += product;
                    wanted_listed[at[t] * stride + d] += product;
                }
        multiply(Spread<Op>{{(const char*)rows.data(), 4 * stride}, lanes.data(), first, last, others.data(), size.pitch},
                 size.count, size.from, size.to);
        compare("Spread", size, rows, wanted);
        multiply(Spread<Op, true>{{(const char*)listed.data(), 4 * stride, at.data()}, lanes.data(), first, last,
                                  others.data(), size.pitch}, size.count, size.from, size.to);
        compare("Spread to listed rows", size, listed, wanted_listed);
    });
}

template <class Op> void products(Random random) {
    dots<Op, NoFetch>(random);
    dots<Op, Fetch>(random);
    mixes<Op, NoFetch>(random);
    mixes<Op, Fetch>(random);
    spreads<Op>(random);
}

// --- blocks of keys ---------------------------------------------------------------------------------------------------

// How often each lane of a tile sees each key, by the blocks of all splits.
std::vector<int> seen_in_blocks(const Args& a, const Tile& tile, i64 splits) {
    const int lanes = (int)(tile.count * a.packed_heads), pitch = (lanes + W - 1) / W * W;
    std::vector<int> found(lanes * a.k_len);
    for (i64 split = 0; split < splits; split++)
        each_block(a, tile, 0, pitch, split, splits, [&](const Block& block) {
            Exact<float> scores(block.keys * pitch);
            block.hide(scores.data());
            expect(block.keys > 0 && block.to <= pitch / W, "a block of %d keys, vectors %d to %d", block.keys, block.from,
                   block.to);
            for (int i = 0; i < block.keys; i++)
                for (int lane = block.from * W; lane < std::min(lanes, block.to * W); lane++)
                    found[lane * a.k_len + block.key(i)] += scores[i * pitch + lane] != NONE;
        });
    return found;
}

void compare_seen(const char* name, const Args& a, const std::vector<int>& found, const std::vector<int>& wanted) {
    for (size_t i = 0; i < found.size(); i++)
        expect(found[i] == wanted[i], "%s: lane %d sees key %d %d times, not %d", name, (int)(i / a.k_len),
               (int)(i % a.k_len), found[i], wanted[i]);
}

// Tiles and runs of every step and bound.
void spans(Random random) {
    for (int round = 0; round < 400; round++) {
        Args a{};
        a.packed_heads = 1 + random.below(3);
        i64 query = random.below(200), step = 1 + random.below(5), count = 1 + random.below((int)(T / a.packed_heads));
        Tile tile{query, step, count, 0, 1 + random.below(3)};
        a.k_len = 100 + random.below(400);
        i64 length = random.below(3) ? a.k_len : random.below((int)a.k_len);
        Exact<u8> mask(a.k_len, [&] { return (u8)(random.below(8) > 0); });
        Exact<Run> runs(tile.runs);
        Exact<u64> run_lanes(tile.runs, [&] { return random.bits() | random.bits(); });
        for (int r = 0; r < tile.runs; r++) {
            i64 key = random.below((int)a.k_len), step = 1 + random.below(5), lo = random.below(300) - 200;
            runs[r] = {key, step, random.below((int)((a.k_len - key - 1) / step + 2)), lo, lo + random.below(300)};
            if (random.below(4) == 0) runs[r].lo = -((i64)1 << 40);
            if (random.below(4) == 0) runs[r].hi = (i64)1 << 40;
        }
        a.runs = runs.data();
        if (random.below(2)) a.seen = mask.data();
        if (random.below(2)) a.seq_lens = &length;
        if (random.below(2)) a.run_lanes = run_lanes.data();
        std::vector<int> wanted(tile.count * a.packed_heads * a.k_len);
        for (int r = 0; r < tile.runs; r++)
            for (int lane = 0; lane < tile.count * a.packed_heads; lane++)
                for (i64 t = 0; t < runs[r].count; t++) {
                    i64 key = runs[r].key + t * runs[r].step, far = key - a.query(tile, lane / a.packed_heads);
                    bool sees = runs[r].lo <= far && far <= runs[r].hi && (!a.run_lanes || a.run_lanes[r] >> lane & 1);
                    sees &= (!a.seen || mask[key]) && key < (a.seq_lens ? length : a.k_len);
                    wanted[lane * a.k_len + key] += sees;
                }
        compare_seen("a run", a, seen_in_blocks(a, tile, 1), wanted);
        compare_seen("splits of a run", a, seen_in_blocks(a, tile, 2 + random.below(3)), wanted);
    }
}

// Listed runs, of which many keys are seen by all lanes.
void lists(Random random) {
    for (int round = 0; round < 200; round++) {
        Args a{};
        a.packed_heads = 1;
        a.k_len = 500;
        Tile tile{0, 0, 1 + random.below(T), 0, 3};
        Exact<Run> runs(tile.runs);
        i64 total = 0;
        for (int r = 0; r < tile.runs; r++) {
            int low = random.below((int)(tile.count - 1) / 16 + 1), count = random.below(3 * KEYS / 2);
            runs[r] = {total, 0, count, 16 * low, 16 * (low + 1 + random.below(T / 16 - low))};
            total += count;
        }
        Exact<i32> listed(total, [&] { return (i32)random.below((int)a.k_len); });
        Exact<u64> lanes(total, [&] { return random.below(2) ? random.bits() : ~(u64)0; });
        Exact<u8> mask(a.k_len, [&] { return (u8)(random.below(8) > 0); });
        a.runs = runs.data(), a.listed = listed.data(), a.lanes = lanes.data();
        if (random.below(2)) a.seen = mask.data();
        std::vector<int> wanted(tile.count * a.k_len);
        for (int r = 0; r < tile.runs; r++)
            for (i64 i = runs[r].key; i < runs[r].key + runs[r].count; i++)
                for (i64 lane = runs[r].lo; lane < std::min(runs[r].hi, tile.count); lane++)
                    wanted[lane * a.k_len + listed[i]] +=
                        (lanes[i] >> lane & 1) && (!a.seen || mask[listed[i]]);
        compare_seen("a list", a, seen_in_blocks(a, tile, 1), wanted);
    }
}

} // namespace

int main() {
    powers_of_2();
    tangents();
    rounding<Bf16>("bfloat16", 0x7f80);
    rounding<Half>("half", 0x7c00);
    rows_of_floats<float>({1});
    rows_of_floats<Bf16>({2});
    rows_of_floats<Half>({3});
    totals<4, 4>({4});
    totals<1, 4>({5});
    products<Single>({6});
#if defined(HAS_PAIRS)
    products<Pair>({7});
#endif
    spans({8});
    lists({9});
    return ended();
}
