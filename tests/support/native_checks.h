// What the test programs of the native kernel share: memory of exact size, random numbers, and checks.

#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <memory>

namespace {

// An array that ends where its memory ends, so that AddressSanitizer sees an access beyond it.
template <class E> struct Exact {
    std::int64_t size;
    std::unique_ptr<E[]> memory;

    explicit Exact(std::int64_t size) : size(size), memory(new E[size]()) {}
    template <class F> Exact(std::int64_t size, const F& next) : Exact(size) {
        for (std::int64_t i = 0; i < size; i++) memory[i] = next();
    }
    E* data() const { return memory.get(); }
    E& operator[](std::int64_t i) const { return memory[i]; }
};

struct Random {
    std::uint64_t state;

    std::uint64_t bits() { // Source: Steele et al. 2014, SplitMix
        std::uint64_t x = state += 0x9e3779b97f4a7c15;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return x ^ x >> 31;
    }
    int below(int end) { return (int)(bits() % end); }
    float uniform() { return (float)((bits() >> 40) * 0x1p-23 - 1.0); } // from -1 to 1
};

int failures = 0;

__attribute__((format(printf, 2, 3))) void expect(bool holds, const char* format, ...) {
    if (holds || failures++ >= 20) return;
    va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
    std::printf("\n");
}

// The exit status of a program: 0 if every expectation held.
int ended() {
    std::printf("%d failures\n", failures);
    return failures != 0;
}

} // namespace
