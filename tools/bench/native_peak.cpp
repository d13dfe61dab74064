// What a processor can do at most: multiply-adds, and products of bfloat16 in pairs or tiles, on sums that stay in registers.
// tools/bench/native.py compiles it as the native kernel is compiled, and calls it between the kernel's calls.

#include "attention/amx.h"

// Of the OpenMP library that PyTorch has loaded, as the kernel calls it.
extern "C" void GOMP_parallel(void (*work)(void*), void* given, unsigned threads, unsigned flags);

namespace {

// Independent sums: enough that none waits for the one before, and few enough for the registers.
constexpr int SUMS = TALL_SUMS;

#if defined(__x86_64__)
#define OPAQUE(x) asm volatile("" : "+x"(x)) // so that no product is taken out of the loop
#else
#define OPAQUE(x) asm volatile("" : "+w"(x))
#endif

volatile float sink;

template <class Op> __attribute__((noinline)) void add_products(i64 steps) {
    float start = sink;
    vec sum[SUMS], scalar = splat(start), lanes = splat(start);
    UNROLL for (int i = 0; i < SUMS; i++) sum[i] = splat(start + i);
    for (i64 n = 0; n < steps; n++) {
        OPAQUE(lanes);
        UNROLL for (int i = 0; i < SUMS; i++) sum[i] = Op::add(sum[i], scalar, lanes);
    }
    for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
    sink = total(sum[0]);
}

struct Shared { i64 threads, count; };

template <void (*work)(const Shared&)> void in_each(Shared shared) {
    auto each = [](void* given) { work(*(const Shared*)given); };
    GOMP_parallel(each, &shared, (unsigned)shared.threads, 0);
}

void adds(const Shared& shared) { add_products<Single>(shared.count); }
#if defined(HAS_PAIRS)
void dots(const Shared& shared) { add_products<Pair>(shared.count); }
#endif
#if defined(HAS_AMX)
void tiles(const Shared& shared) {
    TileSizes(SIDE).load();
    for (i64 n = 0; n < shared.count; n++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}
#endif

} // namespace

extern "C" {

// In each thread `steps` times as many multiply-adds as sum_lanes() says.
void multiply_add(i64 threads, i64 steps) { in_each<adds>({threads, steps}); }

#if defined(HAS_PAIRS)
void dot_product(i64 threads, i64 steps) { in_each<dots>({threads, steps}); }
int dot_product_terms() { return 2; }
#else
int dot_product_terms() { return 0; } // the processor has none
#endif

int sum_lanes() { return SUMS * W; }

#if defined(HAS_AMX)
void tile_product(i64 threads, i64 steps) { in_each<tiles>({threads, steps}); }
int tile_terms() { return has_amx ? 4 * SIDE * SIDE * 2 * SIDE : 0; }
#else
int tile_terms() { return 0; }
#endif
}
