// Attention over the positions of a frame in bfloat16; llm/kernels/frames.py compiles and launches it.
//
// Given: PARTS of the projected sums, HEADS of keys, GROUP of queries that share one, SIZE of a head,
// BEFORE (a power of two, 1 to 32, not below the positions before) and GAINS (heads are normalised).
//
// A warp processes a KV head of one row, a lane DIMS of its numbers. The scores of a query are added
// over lanes so that each lane ends with that of one position.

#define DIMS (SIZE / 32)  // 2 or 4
#define SHARE (32 / BEFORE)  // lanes with the same position
#define NONE __int_as_float(0xff800000)  // minus infinity

struct Arguments {
    const float* projected;  // [PARTS, rows, (HEADS * (GROUP + 2)) * SIZE]
    const float* rotations;  // [positions, SIZE]
    const float* gain;  // [HEADS * (GROUP + 1), SIZE]
    u16* cache;  // [2, rows, positions, HEADS, SIZE]
    u16* out;  // [rows, HEADS * GROUP * SIZE]
    long long part_size, cache_part;
    int position, num_positions, num_rows;
    float epsilon, scale;
    int level;  // of the launch
};

struct Numbers {
    float of[DIMS];
};

__device__ __forceinline__ Numbers load_floats(const float* source) {
    Numbers found;
#if DIMS == 4
    *(float4*)found.of = *(const float4*)source;
#else
    *(float2*)found.of = *(const float2*)source;
#endif
    return found;
}

struct Pairs {
    u32 of[DIMS / 2];
};

__device__ __forceinline__ Pairs load_pairs(const u16* source) {
    Pairs found;
#if DIMS == 4
    *(uint2*)found.of = *(const uint2*)source;
#else
    found.of[0] = *(const u32*)source;
#endif
    return found;
}

__device__ __forceinline__ void store_pairs(u16* target, const Numbers& x) {
#pragma unroll
    for (int i = 0; i < DIMS; i += 2) ((u32*)target)[i / 2] = narrow(x.of[i], x.of[i + 1]);
}

__device__ __forceinline__ float number(const Pairs& pairs, int i) {
    const u32 pair = pairs.of[i / 2];
    return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
}

__device__ __forceinline__ void round_all(Numbers& x) {
    Pairs found;
#pragma unroll
    for (int i = 0; i < DIMS; i += 2) found.of[i / 2] = narrow(x.of[i], x.of[i + 1]);
#pragma unroll
    for (int i = 0; i < DIMS; i++) x.of[i] = number(found, i);
}

__device__ __forceinline__ float add_lanes(float x, int first_step) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        if (step >= first_step) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ float dot(const Numbers& x, const Numbers& y) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS; i++) sum += x.of[i] * y.of[i];
    return sum;
}

// The sum over some lanes of one of N positions, that of the lane.
template <int N>
__device__ __forceinline__ float add_positions(const float (&scores)[N], int lane) {
    if constexpr (N == 1) {
        return scores[0];
    } else {
        constexpr int step = 16 * N / BEFORE;
        const bool is_upper = lane & step;
        float found[N / 2];
#pragma unroll
        for (int p = 0; p < N / 2; p++) {
            const float kept = is_upper ? scores[p + N / 2] : scores[p];
            const float sent = is_upper ? scores[p] : scores[p + N / 2];
            found[p] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
        }
        return add_positions(found, lane);
    }
}

extern "C" __global__ void attend(Arguments given) {
    const int lane = threadIdx.x % 32, head = blockIdx.y, position = given.position;
    const int row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (given.level == 2) launch_dependents();
    const bool exists = row < given.num_rows;
    const Numbers angles = load_floats(given.rotations + position * SIZE + lane * DIMS);
    Numbers gains[GROUP + 1];
#if GAINS
#pragma unroll
    for (int h = 0; h <= GROUP; h++) {
        const int own = h < GROUP ? head * GROUP + h : HEADS * GROUP + head;
        gains[h] = load_floats(given.gain + own * SIZE + lane * DIMS);
    }
#endif
    u16* own = given.cache + ((long long)row * given.num_positions * HEADS + head) * SIZE + lane * DIMS;
    Pairs keys[BEFORE], values[BEFORE];
#pragma unroll
    for (int p = 0; p < BEFORE; p++) {
        const bool is_before = exists && p < position;
        keys[p] = values[p] = Pairs{};
        if (is_before) {
            keys[p] = load_pairs(own + p * (HEADS * SIZE));
            values[p] = load_pairs(own + given.cache_part + p * (HEADS * SIZE));
        }
    }
    if (given.level > 0) wait_for_predecessor();
    if (given.level == 1) launch_dependents();
    if (!exists) return;

    Numbers x[GROUP + 2];
    const float* line = given.projected + (long long)row * (HEADS * (GROUP + 2) * SIZE) + lane * DIMS;
    Numbers parts[GROUP + 2][PARTS];
#pragma unroll
    for (int h = 0; h < GROUP + 2; h++) {
        const int place = h < GROUP ? head * GROUP + h : HEADS * h + head;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            parts[h][part] = load_floats(line + part * given.part_size + place * SIZE);
    }
#pragma unroll
    for (int h = 0; h < GROUP + 2; h++) {
        x[h] = parts[h][0];
#pragma unroll
        for (int part = 1; part < PARTS; part++)
#pragma unroll
            for (int i = 0; i < DIMS; i++) x[h].of[i] += parts[h][part].of[i];
        round_all(x[h]);
    }
#if GAINS
#pragma unroll
    for (int h = 0; h <= GROUP; h++) {
        const float factor = rsqrtf(add_lanes(dot(x[h], x[h]), 1) + given.epsilon);
#pragma unroll
        for (int i = 0; i < DIMS; i++) x[h].of[i] *= factor * gains[h].of[i];
        round_all(x[h]);
    }
#endif
#pragma unroll
    for (int h = 0; h <= GROUP; h++) {
#pragma unroll
        for (int i = 0; i < DIMS; i += 2) {
            const float real = x[h].of[i], imaginary = x[h].of[i + 1];
            x[h].of[i] = real * angles.of[i] - imaginary * angles.of[i + 1];
            x[h].of[i + 1] = real * angles.of[i + 1] + imaginary * angles.of[i];
        }
        round_all(x[h]);
    }
    const Numbers key = x[GROUP], value = x[GROUP + 1];
    store_pairs(own + position * (HEADS * SIZE), key);
    store_pairs(own + given.cache_part + position * (HEADS * SIZE), value);

    float scores[GROUP][BEFORE], own_weights[GROUP], weights[GROUP], totals[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int i = 0; i < DIMS; i++) x[g].of[i] *= given.scale;
#pragma unroll
        for (int p = 0; p < BEFORE; p++) {
            scores[g][p] = 0.0f;
#pragma unroll
            for (int i = 0; i < DIMS; i++) scores[g][p] += x[g].of[i] * number(keys[p], i);
        }
        float score = add_positions(scores[g], lane);
#pragma unroll
        for (int step = SHARE / 2; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
        if (lane / SHARE >= position) score = NONE;
        const float own_score = add_lanes(dot(x[g], key), 1);
        float largest = fmaxf(score, own_score);
#pragma unroll
        for (int step = 16; step >= SHARE; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        weights[g] = __expf(score - largest);
        own_weights[g] = __expf(own_score - largest);
        totals[g] = own_weights[g] + add_lanes(weights[g], SHARE);
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        Numbers sums;
#pragma unroll
        for (int i = 0; i < DIMS; i++) sums.of[i] = own_weights[g] * value.of[i];
#pragma unroll
        for (int p = 0; p < BEFORE; p++) {
            const float weight = __shfl_sync(0xffffffffu, weights[g], p * SHARE);
#pragma unroll
            for (int i = 0; i < DIMS; i++) sums.of[i] += weight * number(values[p], i);
        }
#pragma unroll
        for (int i = 0; i < DIMS; i++) sums.of[i] /= totals[g];
        store_pairs(given.out + ((long long)row * HEADS * GROUP + head * GROUP + g) * SIZE + lane * DIMS,
                    sums);
    }
}
