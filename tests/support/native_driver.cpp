// Calls the native kernel in another program, for another processor or under a sanitizer: reads the arguments and the
// memory that they point to from a file, and writes the memory back. tests/support/native_driver.py is the other side.

#include "attention.cpp"

#include <cstdio>
#include <thread>
#include <vector>

#if defined(OWN_THREADS) // which a sanitizer knows
extern "C" void GOMP_parallel(void (*work)(void*), void* given, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back(work, given);
    work(given);
    for (std::thread& each : others) each.join();
}
#endif

struct Region { u64 address; i64 bytes; };

static void each(void* to, size_t size, std::FILE* file, bool back) {
    if ((back ? std::fwrite(to, 1, size, file) : std::fread(to, 1, size, file)) != size) std::exit(1);
}

int main(int, char** names) {
    std::FILE* file = std::fopen(names[1], "r+b");
    if (!file) return 1;
    i64 backward = 0, count = 0;
    Args a{};
    each(&backward, sizeof backward, file, false);
    each(&a, sizeof a, file, false);
    each(&count, sizeof count, file, false);
    std::vector<Region> regions(count);
    each(regions.data(), count * sizeof(Region), file, false);
    const long start = std::ftell(file);
    std::vector<std::vector<char>> memory;
    for (const Region& region : regions) {
        memory.emplace_back(region.bytes);
        each(memory.back().data(), region.bytes, file, false);
    }
    auto moved = [&](auto*& pointer) {
        for (i64 i = 0; i < count; i++) {
            u64 offset = (u64)pointer - regions[i].address;
            if (pointer && offset < (u64)regions[i].bytes) {
                pointer = (std::remove_reference_t<decltype(pointer)>)(memory[i].data() + offset);
                return;
            }
        }
        if (pointer) std::exit(2);
    };
    for (View* view : {&a.q, &a.k, &a.v, &a.out, &a.grad, &a.dq, &a.dk, &a.dv}) moved(view->data);
    moved(a.sums), moved(a.lse), moved(a.grad_lse), moved(a.tiles), moved(a.runs), moved(a.first_tile), moved(a.head_class);
    moved(a.seen), moved(a.seq_lens), moved(a.order), moved(a.listed), moved(a.lanes), moved(a.run_lanes);
    moved(a.states), moved(a.slopes), moved(a.bias), moved(a.dbias);
    backward ? attention_backward(&a) : attention_forward(&a);
    std::fseek(file, start, SEEK_SET);
    for (i64 i = 0; i < count; i++) each(memory[i].data(), regions[i].bytes, file, true);
    return std::fclose(file);
}
