// Warp sums, activations and norms. Part 3.

__device__ inline float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

__device__ inline float activate(float y) {
    if (ACTIVATION == 0) return fmaxf(y, 0.f);
    if (ACTIVATION == 1) return 0.5f * y * (1 + erff(y * 0.70710678f));
    if (ACTIVATION == 2) return y / (1 + expf(-1.59576912f * (y + 0.044715f * y * y * y)));
    if (ACTIVATION == 3) return y / (1 + expf(-y));
    if (ACTIVATION == 4) return fmaxf(y, 0.f) * fmaxf(y, 0.f);
    return tanhf(y);
}

__device__ inline void unpack(const Pack& pack, float* out) {
#if HALF
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(pack.word[i] << 16);
        out[2 * i + 1] = __uint_as_float(pack.word[i] & 0xffff0000u);
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __uint_as_float(pack.word[i]);
#endif
}

// Weight and bias of a norm, for the elements of the residual stream that a thread holds.
struct NormWeights { float weight[HELD], bias[HELD]; };

__device__ inline NormWeights load_norm(const float* weight, const float* bias) {
    NormWeights g;
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = column(n);
        g.weight[n] = i < D ? weight[i] : 0.f;
        g.bias[n] = SHIFTED && i < D ? bias[i] : 0.f;
    }
    return g;
}

// Normalize the residual stream x and call put(i, value) for each element. The sums of x - centre and of its square are
// computed in one pass: `centre` is a value near the mean, so little cancels, and becomes the mean. `moments` is shared
// memory: 32 partial sums, then 32 partial sums of squares, one per warp.
template <typename Put>
__device__ inline void normalize(
    const float* x, const NormWeights& g, float eps, float factor, float* moments, float& centre, Put put
) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float sum = 0, squares = 0;
#pragma unroll
    for (int n = 0; n < HELD; n++)
        if (column(n) < D) {
            sum += x[n] - centre;
            squares += (x[n] - centre) * (x[n] - centre);
        }
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (lane == 0) moments[warp] = sum, moments[32 + warp] = squares;
    sync_compute_threads();
    sum = squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += moments[w], squares += moments[32 + w];
    sum /= D, squares /= D;
    if (CENTRED) {
        squares -= sum * sum;
        centre += sum;
    }
    float inverse = rsqrtf(squares + eps);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = column(n);
        if (i < D) put(i, ((x[n] - centre) * inverse * g.weight[n] + g.bias[n]) * factor);
    }
}
