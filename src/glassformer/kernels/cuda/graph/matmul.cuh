// What the two kernels of matmuls share (linear.cu, step.cu): their arguments, weights as operands of the tensor cores, and
// what follows a matmul. Part 3.
//
// WEIGHTS: 0: 16 bits, 1: int8, 2: float8.

#if WEIGHTS
typedef u8 Weight;
#else
typedef u16 Weight;
#endif

struct Arguments {
    const void* x;             // (B, INNER): operands or, with a norm, the float32 stream
    const Weight* weight[3];   // (ROWSi, INNER); with EXPERTS a table of the addresses of each expert's matrix
    const float* scale[3];     // (ROWSi), of quantised weights; with EXPERTS a table of addresses
    const float* bias[3];      // (ROWSi) or null; with EXPERTS a table of addresses
    const float *norm_weight, *norm_bias;  // (INNER); null: ones, zeros
    void* out;                 // (B, ROWS): float32, or Stored for OUT 1 and 2; OUT 3: the stream
    u64* best;                 // OUT 4: (B) largest logit and its row, see ordered()
    const long long* choice;   // EXPERTS: (pairs) the expert of each pair of a vector and a slot
    const float* squares;      // NORM 3: (B, PRODUCERS) sums of squares of the stream, by the blocks that wrote it
    const float* next_weight;  // BEFORE_NORM: (ROWS) of the norm that follows; null: ones
    u16* normed;               // BEFORE_NORM: (B, ROWS) the stream times next_weight, as operands
    float* squares_out;        // BEFORE_NORM: (B, gridDim.x)
    float eps, factor, softcap, limit, up_offset;
    int slots;                 // EXPERTS: pairs that share a vector x
};

// A float and its row as a number that is larger for a larger float and, of equal floats, for the lower row. NaN is lowest.
__device__ inline u64 ordered(float f, u32 row) {
    u32 b = __float_as_uint(f);
    b = f != f ? 0 : b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)b << 32 | (0xffffffffu - row);
}

// 16 bytes of weights as operands of the tensor cores, two numbers in a register.
__device__ inline void operands(const Pack& p, u32* out) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if WEIGHTS == 0
        out[i] = p.word[i];
#elif WEIGHTS == 1  // bytes n + 128: 0x6400 + byte is the float16 number 1024 + byte, and 1152 less is n
        out[2 * i] = subtract_half(pick_bytes(p.word[i], 0x64646464u, 0x5150), 0x64806480u);
        out[2 * i + 1] = subtract_half(pick_bytes(p.word[i], 0x64646464u, 0x5352), 0x64806480u);
#else
        out[2 * i] = float8_to_half(p.word[i]);
        out[2 * i + 1] = float8_to_half(p.word[i] >> 16);
#endif
    }
}

// Write one output: `value` of row `row` at index `at`. out: 0: float32; 1: activation; 2: gated, `up` is the second factor;
// 3: added to `old`; 4: logits, of which the largest is kept in `best`.
__device__ inline void put(
    const Arguments& a, int out, int activation, long long at, u32 row, float value, float up, float old, u64* best
) {
    if (out == 0) ((float*)a.out)[at] = value;
    if (out == 1) ((u16*)a.out)[at] = to_operand(activate(activation, value));
    if (out == 2) {
        if (a.limit > 0) value = fminf(value, a.limit), up = fminf(fmaxf(up, -a.limit), a.limit);
        ((u16*)a.out)[at] = to_operand(activate(activation, value) * (up + a.up_offset));
    }
    if (out == 3) ((float*)a.out)[at] = old + a.factor * value;
    if (out == 4) {
        value *= a.factor;
        if (a.softcap > 0) value = a.softcap * tanhf(value / a.softcap);
        ((float*)a.out)[at] = value;
        u64 key = ordered(value, row);
        if (key > *best) atomicMax(best, key);
    }
}
