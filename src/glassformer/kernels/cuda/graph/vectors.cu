// The small kernels of a step, one block per sequence: embedding, norms, the choice of the next token. Part 3.

struct Arguments {
    const int* token;                   // (B)
    int *next, *history;                // (B); (B, columns) tokens by slot
    long long* slot;                    // of the token that the step reads
    const int* start;                   // (B) first slot of each sequence
    const Stored* table;                // (V, D)
    const float* positions;             // (positions, D) or null
    float* stream;                      // (B, D)
    const float* branch;                // (B, D) output of attention or feed-forward
    const float *weight, *bias;         // (D) of the norm, or null
    u16* normed;                        // (B, D)
    u64* best;                          // (B), see ordered() in linear.cu
    const float *gates, *experts;       // (B, slots); (B, slots, D)
    float scale, eps;
    int width, columns, centred, slots, is_last;
};

// stream = scale * table[token] + positions[position]
__device__ inline void embed_one(const Arguments& a, long long sequence) {
    const long long row = sequence, token = load_fresh(a.token + row), position = load_fresh(a.slot) - a.start[row];
    for (int i = threadIdx.x; i < a.width; i += THREADS)
        a.stream[row * a.width + i] = to_float(a.table[token * a.width + i]) * a.scale +
                                      (a.positions ? a.positions[position * a.width + i] : 0.f);
}

// Sums of a vector for a norm, then mean and inverse deviation.
template <typename Read>
__device__ inline void measure(const Arguments& a, float* room, float& mean, float& inverse, Read read) {
    float centre = a.centred ? read(0) : 0.f;
    mean = inverse = 0;
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        float d = read(i) - centre;
        mean += d, inverse += d * d;
    }
    block_sums(mean, inverse, room);
    moments(mean, inverse, centre, a.width, a.eps, a.centred);
}
__device__ inline float scaled(const Arguments& a, float x, float mean, float inverse, int i) {
    return (x - mean) * inverse * (a.weight ? a.weight[i] : 1.f) + (a.bias ? a.bias[i] : 0.f);
}

// normed = norm(stream), as operands
__device__ inline void normalize_one(const Arguments& a, long long sequence) {
    __shared__ float room[2 * WARPS];
    const long long row = sequence * a.width;
    float mean, inverse;
    measure(a, room, mean, inverse, [&](int i) { return load_fresh(a.stream + row + i); });
    for (int i = threadIdx.x; i < a.width; i += THREADS)
        a.normed[row + i] = to_operand(scaled(a, load_fresh(a.stream + row + i), mean, inverse, i));
}

// stream += scale * norm(branch) or, if is_last, stream = norm(stream + scale * branch)
__device__ inline void add_norm_one(const Arguments& a, long long sequence) {
    __shared__ float room[2 * WARPS];
    const long long row = sequence * a.width;
    auto read = [&](int i) {
        float x = load_fresh(a.branch + row + i);
        return a.is_last ? load_fresh(a.stream + row + i) + a.scale * x : x;
    };
    float mean, inverse;
    measure(a, room, mean, inverse, read);
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        float y = scaled(a, read(i), mean, inverse, i);
        a.stream[row + i] = a.is_last ? y : load_fresh(a.stream + row + i) + a.scale * y;
    }
}

// stream += scale * sum over slots of gate * expert output
__device__ inline void add_experts_one(const Arguments& a, long long sequence) {
    const long long row = sequence;
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        float sum = 0;
        for (int n = 0; n < a.slots; n++)
            sum += load_fresh(a.gates + row * a.slots + n) * load_fresh(a.experts + (row * a.slots + n) * a.width + i);
        a.stream[row * a.width + i] = load_fresh(a.stream + row * a.width + i) + a.scale * sum;
    }
}

// One block for all: the most likely token of each sequence is the next one, and the step is over.
__device__ inline void choose_one(const Arguments& a, long long sequence) {
    const long long slot = load_fresh(a.slot);
    for (int row = threadIdx.x; row < a.slots; row += THREADS) {
        const u64 best = load_fresh(a.best + row);
        int token = best ? (int)(0xffffffffu - (u32)best) : 0;
        a.next[row] = token;
        a.history[(long long)row * a.columns + slot + 1] = token;
        a.best[row] = 0;
    }
    sync_block();
    if (threadIdx.x == 0) *a.slot = slot + 1;
}

#ifndef WHOLE_STEP
#define KERNEL(name)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const Arguments a) { \
        wait_for_previous_kernel();                                                 \
        name##_one(a, blockIdx.x);                                                  \
    }
KERNEL(embed)
KERNEL(normalize)
KERNEL(add_norm)
KERNEL(add_experts)
KERNEL(choose)
#endif
