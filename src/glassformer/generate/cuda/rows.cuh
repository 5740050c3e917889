// Meeting, rows of matrices times a vector, and norms. Third of the parts.

struct Share { int first, last; };  // rows of a matrix

__device__ inline Share share(int rows) {
    int each = (rows + gridDim.x - 1) / gridDim.x, first = min((int)blockIdx.x * each, rows);
    return {first, min(first + each, rows)};
}

// No block goes on from `wait` before all have come to `leave` `times` times. What is asked for between the two does
// not hold up the leaving: making its writes known waits for all that a thread has asked for before.
__device__ inline void leave(int* counter) {
    __syncthreads();
    if (threadIdx.x == 0) arrive(counter);
}
__device__ inline void wait(const int* counter, int times) {
    if (threadIdx.x == 0)
        while (arrived(counter) < times * (int)gridDim.x) {}
    __syncthreads();
}

__device__ inline float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(EVERYONE, x, step);
    return x;
}

__device__ inline float activated(float y) {
    if (ACTIVATION == 0) return fmaxf(y, 0.f);
    if (ACTIVATION == 1) return 0.5f * y * (1 + erff(y * 0.70710678f));
    if (ACTIVATION == 2) return y / (1 + expf(-1.59576912f * (y + 0.044715f * y * y * y)));
    if (ACTIVATION == 3) return y / (1 + expf(-y));
    if (ACTIVATION == 4) return fmaxf(y, 0.f) * fmaxf(y, 0.f);
    return tanhf(y);
}

// A part of a row of a matrix in a warp's registers.
struct Held { Pack pack[LOADS]; };

__device__ inline void fetch(Held& held, const Stored* row, int width, int chunk) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < LOADS; n++) {
        int at = chunk * CHUNK + n * SPAN + lane * PACK;
        if (at < width) held.pack[n] = read16(row + at);
    }
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

// A lane's part of the held part of a row times the same part of a vector.
__device__ inline float dot(const Held& held, const float* vector, int width, int chunk) {
    int lane = threadIdx.x & 31;
    float total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < LOADS; n++) {
        int at = chunk * CHUNK + n * SPAN + lane * PACK;
        if (at < width) {
            float w[PACK];
            unpack(held.pack[n], w);
#pragma unroll
            for (int i = 0; i < PACK; i++) total[i % 4] += w[i] * vector[at + i];
        }
    }
    return (total[0] + total[1]) + (total[2] + total[3]);
}

// Rows of a matrix, `width` numbers each, that a block multiplies: `count` from `first` on, and as many again `apart`.
// A warp's tasks are parts of rows.
struct Work {
    const Stored* weights;
    const float* bias;
    int width, first, count, apart, all;
};

__device__ inline Work work(const Stored* weights, const float* bias, int width, Share s, int apart) {
    int count = s.last - s.first;
    return {weights, bias, width, s.first, count, apart, count * CHUNKS(width) * (apart ? 2 : 1)};
}

#define AHEAD 2  // tasks that a warp asks for before it can begin

struct Begun {
    Held held[AHEAD];
    float shift[AHEAD];
};

__device__ inline void ask(Held& held, float& shift, const Work& w, int task) {
    int r = task / CHUNKS(w.width), chunk = task % CHUNKS(w.width);
    long long row = r < w.count ? w.first + r : w.apart + w.first + r - w.count;
    fetch(held, w.weights + row * w.width, w.width, chunk);
    shift = BIASED && chunk == 0 && r < w.count ? w.bias[row] : 0.f;
}

__device__ inline void begin(Begun& begun, const Work& w) {
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
        int task = (threadIdx.x >> 5) + n * WARPS;
        if (task < w.all) ask(begun.held[n], begun.shift[n], w, task);
    }
}

// Rows times a vector; finish(row of the share, sum, sum of the row apart) is called once for each.
template <typename Finish>
__device__ inline void multiply(Begun& begun, const Work& w, const float* vector, float* partial, Finish finish) {
    const int parts = CHUNKS(w.width), lane = threadIdx.x & 31;
    const bool whole = parts == 1 && !w.apart;
    for (int base = threadIdx.x >> 5; base < w.all; base += AHEAD * WARPS) {
        float y[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            int task = base + n * WARPS;
            y[n] = task < w.all ? dot(begun.held[n], vector, w.width, task % parts) : 0.f;
        }
#pragma unroll
        for (int n = 0; n < AHEAD; n++) y[n] = warp_sum(y[n]);
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            int task = base + n * WARPS;
            if (task >= w.all) break;
            y[n] += begun.shift[n];
            if (task + AHEAD * WARPS < w.all) ask(begun.held[n], begun.shift[n], w, task + AHEAD * WARPS);
            if (lane == 0) {
                if (whole) finish(task, y[n], 0.f);
                else partial[task] = y[n];
            }
        }
    }
    if (whole) return;
    __syncthreads();
    for (int r = threadIdx.x; r < w.count; r += THREADS) {
        float y = 0, other = 0;
        for (int i = 0; i < parts; i++) {
            y += partial[r * parts + i];
            if (w.apart) other += partial[(w.count + r) * parts + i];
        }
        finish(r, y, other);
    }
}

// Norm of the stream x, of which a thread holds numbers threadIdx.x + n THREADS, into a shared vector. Sums of x - c
// and of its square are taken at once: c, the mean of the time before, is near enough that little cancels.
__device__ inline void normalise(
    const float* x, const float* weight, const float* bias, float eps, float factor, float* vector, float* moments,
    float& centre
) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float sum = 0, squares = 0;
#pragma unroll
    for (int n = 0; n < EACH(D); n++)
        if ((int)threadIdx.x + n * THREADS < D) {
            sum += x[n] - centre;
            squares += (x[n] - centre) * (x[n] - centre);
        }
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (lane == 0) moments[warp] = sum, moments[32 + warp] = squares;
    __syncthreads();
    sum = warp_sum(lane < WARPS ? moments[lane] : 0.f) / D;
    squares = warp_sum(lane < WARPS ? moments[32 + lane] : 0.f) / D;
    if (CENTRED) {
        squares -= sum * sum;
        centre += sum;
    }
    float inverse = rsqrtf(squares + eps);
#pragma unroll
    for (int n = 0; n < EACH(D); n++) {
        int i = threadIdx.x + n * THREADS;
        if (i < D) vector[i] = ((x[n] - centre) * inverse * weight[n] + bias[n]) * factor;
    }
    __syncthreads();
}

__device__ inline void gain(float* weight, float* bias, const float* given, const float* given_bias) {
#pragma unroll
    for (int n = 0; n < EACH(D); n++) {
        int i = threadIdx.x + n * THREADS;
        weight[n] = i < D ? given[i] : 0.f;
        bias[n] = SHIFTED && i < D ? given_bias[i] : 0.f;
    }
}

__device__ inline void add(float* x, const float* given) {
#pragma unroll
    for (int n = 0; n < EACH(D); n++) {
        int i = threadIdx.x + n * THREADS;
        if (i < D) x[n] += fresh(given + i);
    }
}
