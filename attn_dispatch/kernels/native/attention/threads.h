// Units of work, in the threads of the OpenMP library that PyTorch has loaded.

#pragma once

#include <atomic>

#include <pthread.h> // and not <thread>, <chrono>: the library needs no C++ library, see variants.py
#include <time.h>

#include "rows.h"

// Two pools would compete for the cores. GCC's, LLVM's and Intel's all have this function, and it is called by name, since
// clang's pragmas need one of the latter two.
extern "C" void GOMP_parallel(void (*work)(void*), void* given, unsigned threads, unsigned flags);

namespace {

// Where other programs take the cores, a call may wait for a thread that does not run far longer than it works, and
// spins meanwhile. After such a wait calls run in one thread for some time, longer if it happens again soon.
struct Waits {
    static constexpr i64 LEAST = 200'000, OVER_WORK = 2; // of a wait that is too long: ns, and caller's own times of work
    static constexpr i64 UNIT = 16, MOST = 256 * UNIT, LONGEST = 1'000'000'000; // time in one thread: waits / UNIT, and ns
    std::atomic<i64> until{0}, length{UNIT};

    static i64 now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1'000'000'000 + t.tv_nsec;
    }

    void note(i64 start, i64 worked, i64 end) {
        i64 waited = end - worked, units = length.load(std::memory_order_relaxed);
        bool too_long = waited > LEAST && waited > OVER_WORK * (worked - start);
        if (too_long) until.store(end + std::min(units * waited / UNIT, LONGEST), std::memory_order_relaxed);
        units = too_long ? std::min(4 * units, MOST) : std::max(units - units / UNIT, UNIT);
        length.store(units, std::memory_order_relaxed);
    }
};
Waits waits;

// Calls work(next) in each thread; the threads take units of work in turns by next++. Which thread has which unit does not
// matter to the results.
template <class Work> void in_threads(i64 threads, const Work& work) {
    struct Shared {
        const Work& work;
        pthread_t caller;
        std::atomic<i64> next;
        i64 worked;
    } shared{work, pthread_self(), {0}, 0};
    // A thread's first call makes its pool: threads that begin may be waited for on an idle machine too.
    static thread_local bool pooled = false;
    i64 start = Waits::now();
    if (threads == 1 || start < waits.until.load(std::memory_order_relaxed)) return work(shared.next);
    GOMP_parallel([](void* given) {
        Shared& s = *(Shared*)given;
        s.work(s.next);
        if (pthread_equal(pthread_self(), s.caller)) s.worked = Waits::now();
    }, &shared, (unsigned)threads, 0);
    if (pooled) waits.note(start, shared.worked, Waits::now());
    pooled = true;
}

// Calls visit(unit, tile, b, h, split, scratch) for every split of every tile, or of `together` tiles, from head h on.
// Whether a thread had memory for it: those that have none take no unit, which the others then do.
template <class F> bool each_tile(const Args& a, i64 splits, const F& visit) {
    std::atomic<bool> able{false};
    in_threads(a.threads, [&](std::atomic<i64>& next) {
        Scratch s((int)a.head_dim, (int)a.together, a.invariant || a.together > 1);
        if (!s.memory) return;
        able = true;
        // A head's tiles in this split begin with unit `first`. Rows of the heads lie side by side in memory: all heads
        // read a split before the next one begins.
        i64 unit = next++, first = 0;
        for (i64 b = 0; b < a.batch; b++)
            for (i64 split = 0; split < splits; split++)
                for (i64 h = 0; h < a.heads; h += a.packed_heads * a.together) {
                    i64 tile = a.first_tile[a.head_class[h]], last = first + a.first_tile[a.head_class[h] + 1] - tile;
                    for (; unit < last; unit = next++) visit(unit, a.tiles[tile + unit - first], b, h, split, s);
                    first = last;
                }
    });
    return able;
}

} // namespace
