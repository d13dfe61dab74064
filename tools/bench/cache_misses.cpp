// The native kernel alone, one head, forward, so that a cache simulator sees little else. Reads what cache_misses.py wrote.

#include "attention.cpp"

#include <cstdio>
#include <vector>

template <class X> std::vector<X> read(std::FILE* file) {
    i64 count = 0;
    if (std::fread(&count, sizeof count, 1, file) != 1) std::exit(1);
    std::vector<X> found(count);
    if (std::fread(found.data(), sizeof(X), count, file) != (size_t)count) std::exit(1);
    return found;
}

void GOMP_parallel(void (*work)(void*), void* given, unsigned, unsigned) { work(given); }

int main(int, char** names) {
    std::FILE* file = std::fopen(names[1], "rb");
    if (!file) return 1;
    auto sizes = read<i64>(file); // tokens, heads in memory, head_dim
    auto tiles = read<Tile>(file);
    auto runs = read<Run>(file);
    auto order = read<i32>(file);
    auto listed = read<i32>(file);
    auto lanes = read<u64>(file);
    const i64 tokens = sizes[0], heads = sizes[1], depth = sizes[2], row = heads * depth;
    std::vector<float> q(tokens * row, 0.5f), k(q), v(q), out(tokens * row), lse(tokens);
    const i64 first_tile[] = {0, (i64)tiles.size()}, head_class[] = {0};
    Args a{};
    View* views[] = {&a.q, &a.k, &a.v, &a.out};
    std::vector<float>* data[] = {&q, &k, &v, &out};
    for (int i = 0; i < 4; i++) *views[i] = {data[i]->data(), tokens * row, row, depth};
    a.lse = lse.data();
    a.tiles = tiles.data();
    a.runs = runs.data();
    a.first_tile = first_tile;
    a.head_class = head_class;
    a.order = order.data();
    a.listed = listed.data();
    a.lanes = lanes.data();
    a.batch = a.heads = a.group = a.threads = a.parts = a.packed_heads = a.together = a.splits = 1;
    a.q_len = a.k_len = tokens;
    a.head_dim = depth;
    a.scale = 0.125;
    if (names[2][0] == '0') return 0; // all that is there besides
    attention_forward(&a);
    for (i64 token = 0; token < tokens; token++) // the mean of equal values
        for (i64 i = 0; i < depth; i++)
            if (!(std::abs(out[token * row + i] - 0.5f) < 1e-6f)) return 2;
    return 0;
}
