// Attention on a CPU in one pass over the keys. A tile of queries is packed once, with queries along the vector lanes;
// keys and values are read in place. Lanes never exchange data: neither K nor V is transposed, the softmax is a maximum
// and a sum over registers, and all dilated branches of a tile share one softmax. A few queries at long keys (decoding)
// are bound by memory instead: see Fetch in products.h, and few_queries.h.
//
// Source: Milakov & Gimelshein 2018, online softmax; Dao 2023, FlashAttention-2, for the backward pass; Dao et al. 2023,
// Flash-Decoding, for keys that are split between threads.
//
// In attention/, in reading order: vectors.h, products.h, tiles.h, amx.h, rows.h, dropout.h, softmax.h, key_head.h, few_queries.h,
// threads.h, forward.h, backward.h.

#include "attention/backward.h"
#include "attention/forward.h"

extern "C" {

// All return 0, or 1 where no thread had memory for it. dtype: 0 float, 1 bfloat16, 2 half.
int attention_forward(const Args* args) {
    if (args->dtype == 0) return !forward<float, Wide<float>>(*args);
    if (args->dtype == 2) return !forward<Half, Wide<Half>>(*args);
#if defined(HAS_PAIRS)
    if (args->head_dim % 2 == 0) return !forward<Bf16, Paired>(*args);
#endif
    return !forward<Bf16, Wide<Bf16>>(*args);
}

// With the addresses of one call; those of `fixed` are not read.
int attention_forward_on(const Args* fixed, void* q, void* k, void* v, void* out, float* lse, float* states) {
    Args a = *fixed;
    a.q.data = q, a.k.data = k, a.v.data = v, a.out.data = out, a.lse = lse, a.states = states;
    return attention_forward(&a);
}

int attention_backward(const Args* args) {
    if (args->dtype == 0) return !backward<float, WideBack<float>>(*args);
    if (args->dtype == 2) return !backward<Half, WideBack<Half>>(*args);
#if defined(HAS_PAIRS)
    if (args->head_dim % 2 == 0) return !backward<Bf16, PairedBack>(*args);
#endif
    return !backward<Bf16, WideBack<Bf16>>(*args);
}

int attention_vector_floats() { return W; }
}
