// Products of pairs of bfloat16 by tile registers (Intel AMX), of 16 rows of 16 floats or pairs each. The operands lie as
// they do for vectors of pairs; only values, and the keys of dq, are laid out by columns.
//
// Source: Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.

#pragma once

#include "products.h"
#include "tiles.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__linux__) // clang names it otherwise
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int SIDE = 16; // rows of a tile register, and floats or pairs in one of them

#if defined(HAS_AMX)
// A program must ask the system for these registers (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
const bool has_amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// Of tile registers 0 to 3 for sums, 4 and 5 for rows of A with this many pairs, and 6 and 7 for as many rows of B.
struct TileSizes {
    u8 palette = 1, other[15] = {};
    u16 bytes[16] = {};
    u8 rows[16] = {};

    TileSizes(int pairs) {
        for (int i = 0; i < 8; i++) {
            bytes[i] = (u16)(i == 4 || i == 5 ? pairs * 4 : CACHE_LINE);
            rows[i] = (u8)(i < 6 ? SIDE : pairs);
        }
    }
    void load() const {
        asm volatile("" : : "r"(this) : "memory"); // g++ would store the first 8 bytes alone
        _tile_loadconfig(this);
    }
};

// The products of a thread. Other code in the thread sets its own sizes.
class Amx {
    static constexpr int COLUMNS = KEYS / 2; // pairs in a row of by_columns
    static constexpr int DEEPEST = 256;      // head_dim, of the copies of a few keys
    int width = 0; // pairs in a row of A, and rows of B

    void resize(int pairs) {
        if (pairs == width) return;
        width = pairs;
        TileSizes(pairs).load();
    }

    // c[i][n] = or += the sum over l of a[i][l] * b[l][n], for M x N tile registers; strides in bytes, `steps` of `width` pairs
    template <int M, int N, bool ADD>
    void few(const char* a, i64 a_row, const char* b, i64 b_row, char* c, i64 c_row, int steps) const {
        char *lower = c + SIDE * c_row;
        if (ADD) {
            _tile_loadd(0, c, c_row);
            if (N == 2) _tile_loadd(1, c + CACHE_LINE, c_row);
            if (M == 2) _tile_loadd(2, lower, c_row);
            if (M == 2 && N == 2) _tile_loadd(3, lower + CACHE_LINE, c_row);
        } else {
            _tile_zero(0);
            if (N == 2) _tile_zero(1);
            if (M == 2) _tile_zero(2);
            if (M == 2 && N == 2) _tile_zero(3);
        }
        for (int i = 0; i < steps; i++, a += width * 4, b += width * b_row) {
            _tile_loadd(6, b, b_row);
            _tile_loadd(4, a, a_row);
            _tile_dpbf16ps(0, 4, 6);
            if (N == 2) _tile_loadd(7, b + CACHE_LINE, b_row);
            if (N == 2) _tile_dpbf16ps(1, 4, 7);
            if (M == 2) _tile_loadd(5, a + SIDE * a_row, a_row);
            if (M == 2) _tile_dpbf16ps(2, 5, 6);
            if (M == 2 && N == 2) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, c_row);
        if (N == 2) _tile_stored(1, c + CACHE_LINE, c_row);
        if (M == 2) _tile_stored(2, lower, c_row);
        if (M == 2 && N == 2) _tile_stored(3, lower + CACHE_LINE, c_row);
    }
    // The same for whole tile registers: `rows` and `columns` of c. The next rows, if any, are fetched meanwhile.
    template <bool ADD>
    void product(const void* a, i64 a_row, const void* b, i64 b_row, void* c, i64 c_row, int rows, int columns, int steps,
                 Fetch* next = nullptr) const {
        asm volatile("" ::: "memory"); // compilers do not know that tile registers read and write memory
        for (int i = 0; i < rows; i += 2 * SIDE) {
            fetch(next);
            for (int n = 0; n < columns; n += 2 * SIDE) {
                const char *from = (const char*)a + i * a_row, *other = (const char*)b + n * 4;
                char* to = (char*)c + i * c_row + n * 4;
                const bool tall = rows - i > SIDE, wide = columns - n > SIDE;
                if (tall && wide) few<2, 2, ADD>(from, a_row, other, b_row, to, c_row, steps);
                else if (tall) few<2, 1, ADD>(from, a_row, other, b_row, to, c_row, steps);
                else if (wide) few<1, 2, ADD>(from, a_row, other, b_row, to, c_row, steps);
                else few<1, 1, ADD>(from, a_row, other, b_row, to, c_row, steps);
            }
        }
        asm volatile("" ::: "memory");
    }
    static int whole(int count) { return (count + SIDE - 1) / SIDE * SIDE; }
    // As many rows as tile registers hold.
    static void fetch(Fetch* next) {
        for (int line = 0; next && line < 2 * SIDE * next->lines; line++) next->fetch();
    }

public:
    Amx() = default;
    Amx(const Amx&) = delete;
    ~Amx() { if (width) _tile_release(); }

    // Pairs in a row of A: as many as fit and divide the pairs of a head's row; 0 if those are too few to be worth it.
    static int divisor(int pairs) {
        for (int size = SIDE; size >= SIDE / 2; size--)
            if (pairs % size == 0) return size;
        return 0;
    }

    static bool fits(int depth) { return has_amx && depth <= DEEPEST && divisor(depth / 2) > 0; }

    // Dot: the scores of keys. Up to SIDE - 1 rows of `scores` past the last key are overwritten too.
    void dot(Rows rows, int pairs, int pitch, const void* lanes, float* scores, int keys, int from, int to,
             Fetch* next = nullptr) {
        resize(divisor(pairs));
        alignas(CACHE_LINE) char copies[SIDE * DEEPEST * 2];
        const int bytes = pairs * 4, in_place = rows.at ? 0 : keys / SIDE * SIDE;
        auto some = [&](int first, int count, const char* at, i64 row) {
            product<false>(at, row, (const float*)lanes + from * W, 4 * pitch, scores + first * pitch + from * W, 4 * pitch, count,
                           (to - from) * W, pairs / width, next);
        };
        some(0, in_place, rows.data, rows.stride);
        for (int i = in_place; i < keys; i += SIDE) {
            for (int t = i; t < std::min(keys, i + SIDE); t++)
                std::memcpy(copies + (t - i) * bytes, rows.at ? rows.row<true>(t) : rows.row<false>(t), bytes);
            some(i, SIDE, copies, bytes);
        }
    }

    // Mix: adds the block's rows of x, weighted by pairs of keys, to the sums. `weights` has room for a whole block.
    void mix(const View& x, const Bf16* head, const Block& block, int depth, float* columns, int pitch, float* weights,
             float* sums, Fetch* next = nullptr) {
        by_columns(x, head, block, depth, (u32*)columns, next);
        const int pairs = (block.keys + 1) / 2, size = (block.to - block.from) * W;
        for (int t = pairs; t < whole(pairs); t++) std::memset(weights + t * pitch + block.from * W, 0, sizeof(float) * size);
        resize(SIDE);
        product<true>(columns, 4 * COLUMNS, weights + block.from * W, 4 * pitch, sums + block.from * W, 4 * pitch, whole(depth), size,
                      whole(pairs) / SIDE);
    }

    // Spread: adds to rows of dk or dv, of which it leaves out the last few: how many it has done. Listed ones are added to
    // after the product. `lanes` holds bfloat16, T * 4 bytes from key to key, zeros in lanes that are not to be added.
    int spread(Rows rows, const float* lanes, const Block& block, const float* others, int width_of_rows) {
        const int first = block.from / 2 * SIDE, last = (block.to + 1) / 2 * SIDE, done = block.keys / SIDE * SIDE;
        const i64 row = 4 * width_of_rows;
        resize(SIDE);
        lanes += first;
        others += first * width_of_rows;
        if (!rows.at) product<true>(lanes, 4 * T, others, row, (char*)rows.data, rows.stride, done, width_of_rows, (last - first) / SIDE);
        alignas(CACHE_LINE) float sums[SIDE * DEEPEST];
        for (int i = 0; rows.at && i < done; i += SIDE) {
            product<false>(lanes + i * T, 4 * T, others, row, sums, row, SIDE, width_of_rows, (last - first) / SIDE);
            for (int t = 0; t < SIDE; t++) {
                float* to = (float*)rows.row<true>(i + t);
                for (int d = 0; d < width_of_rows; d += W) store(to + d, load(to + d) + load(sums + t * width_of_rows + d));
            }
        }
        return done;
    }

private:
    // Pairs of keys of a block, COLUMNS of them for each entry of a row; zeros of hidden keys, and past the last one.
    static void by_columns(const View& x, const Bf16* head, const Block& block, int depth, u32* to, Fetch* next) {
        static const Bf16 zeros[DEEPEST] = {};
        for (int t = 0; t < block.keys; t += 2 * SIDE) {
            fetch(next);
            const Bf16* rows[2 * SIDE];
            for (int i = 0; i < 2 * SIDE; i++)
                rows[i] = t + i < block.keys && block.sees(t + i) ? head + block.key(t + i) * x.row : zeros;
            for (int d = 0; d < depth; d += 2 * SIDE) {
                const u32 entries = ~(u32)0 >> std::max(0, d + 2 * SIDE - depth);
                vec low[SIDE], high[SIDE]; // each has every other four entries of rows
                UNROLL for (int i = 0; i < SIDE; i++) {
                    __m512i first = _mm512_maskz_loadu_epi16(entries, rows[2 * i] + d);
                    __m512i second = _mm512_maskz_loadu_epi16(entries, rows[2 * i + 1] + d);
                    low[i] = (vec)_mm512_unpacklo_epi16(first, second);
                    high[i] = (vec)_mm512_unpackhi_epi16(first, second);
                }
                transpose(low);
                transpose(high);
                for (int i = 0; i < SIDE; i++) {
                    u32* column = to + (d + i / 4 * 8 + i % 4) * COLUMNS + t / 2;
                    store(column, low[i]);
                    store(column + 4 * COLUMNS, high[i]);
                }
            }
        }
    }
};
#else
struct Amx {
    static bool fits(int) { return false; }
    static int divisor(int) { return 1; }
    template <class... X> void dot(const X&...) const {}
    template <class... X> void mix(const X&...) const {}
    template <class... X> int spread(const X&...) const { return 0; }
};
#endif

} // namespace
