// Conversions and sums of vectors by NEON. Included in vectors.h.

template <> inline vec wide<Bf16>(const Bf16* p) { return (vec)vshll_n_u16(load<uint16x4_t>(p), 16); }
template <> inline vec wide<Half>(const Half* p) { return (vec)vcvt_f32_f16(load<float16x4_t>(p)); }

template <> INLINE void put_totals<4, 4>(const vec (&x)[4][4], float* to, int pitch) {
    for (int i = 0; i < 4; i++) {
        float32x4_t first = vpaddq_f32((float32x4_t)x[i][0], (float32x4_t)x[i][1]);
        float32x4_t last = vpaddq_f32((float32x4_t)x[i][2], (float32x4_t)x[i][3]);
        store(to + i * pitch, vpaddq_f32(first, last));
    }
}
