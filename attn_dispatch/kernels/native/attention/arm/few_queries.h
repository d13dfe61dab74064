    // The same by pairs of keys. A hidden key may hold NaN: its weight is 0. Included in the struct Rowwise.
    template <int N> void add_pairs(const Block& block, int lane, int d, i64 next) const {
        vec sum[GROUP][N];
        float* to = s.sums + lane * depth + d;
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = load(to + i * depth + n * W);
        const int pitch = s.pitch;
        for (int t = 0; t < block.keys; t += 2) {
            const E *first = row(a.v, v, block, t) + d, *second = row(a.v, v, block, t + 1) + d;
            bool one = !block.hidden || block.sees(t), other = t + 1 < block.keys && (!block.hidden || block.sees(t + 1));
            vec value[N];
            UNROLL for (int n = 0; n < N; n += 2) {
                if (next) fetch((const char*)(first + n * W) + next);
                if (next) fetch((const char*)(second + n * W) + next);
                ivec some[2], none = {};
                interleave(one ? (const void*)(first + n * W) : &none, other ? (const void*)(second + n * W) : &none, some);
                value[n] = (vec)some[0];
                value[n + 1] = (vec)some[1];
            }
            const float* weights = s.other + t / 2 * pitch + lane;
            UNROLL for (int i = 0; i < GROUP; i++) {
                vec weight = Pair::spread(weights + i);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = Pair::add(sum[i][n], weight, value[n]);
            }
        }
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int n = 0; n < N; n++) store(to + i * depth + n * W, sum[i][n]);
    }
