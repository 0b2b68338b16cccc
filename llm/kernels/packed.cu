// Products with packed matrices on tensor cores; llm/kernels/packed.py compiles and launches them.
//
// Given: BITS of a number (4 or 8), GROUPS of a block (1, 2 or 4), WIDE (scales are float32, else
// float16), LOWS (there are minimums), PARTS (matrices whose tiles one program multiplies), ROWS
// (of x, at most 2; 0: any number), TILES of 8 rows of x that a program multiplies if ROWS is 0,
// STAGES of the blocks in flight, HEADS (queries, keys and values are rotated and stored), and
// PROGRAMS that should fit on a processor; 0: the function is `expand`, not `product`.
//
// A block of 16 outputs and 512 / BITS inputs is 1,024 bytes (see llm/kernels/words.py): lane
// 4 g + t of a warp reads words of the outputs g and g + 8. One number of 4 bits as the lowest
// mantissa bits of a bfloat16 is 128 + u, so that two numbers need a shift and an operation of
// bits; the 128 is taken off the sums again. Numbers of 8 bits are two of 4.

typedef unsigned int u32;
typedef unsigned short u16;

#define WARPS 8
#define THREADS (32 * WARPS)
#define UNIT (128 / BITS)
#define BLOCK (4 * UNIT)
#define HALF_BYTES 512
#define SCALE_BYTES (32 * GROUPS * (WIDE ? 2 : 1))
#define PART_BYTES (2 * HALF_BYTES + SCALE_BYTES * (1 + LOWS))
#define INPUT_BYTES (ROWS ? 0 : TILES * 32 * BLOCK / 2)
#define SLOT_BYTES (PARTS * PART_BYTES + INPUT_BYTES)
#define COLUMNS (ROWS ? ROWS : 8 * TILES)
#define X_PADDING 32
// What the sums of the expanded numbers have too much of, in sums of x.
#define EXCESS (BITS == 8 ? 2304.0f : LOWS ? 128.0f : 136.0f)

struct Arguments {
    const u16* x;  // bfloat16 [rows, num_in]
    const u16* gain;  // [num_in], or null
    const char* values;
    const char* scales;
    const char* lows;
    void* out;
    const u16* bias;  // [num_out], or null
    const float* rotations;
    u16* keys;
    u16* kv_values;
    const long long* slots;
    long long by_page, by_offset, by_head;
    int num_rows, num_out, num_in, num_blocks;
    float epsilon;
    int level;  // of the launch
    int adds, is_float;  // of the result: bfloat16 or float32
    int heads, kv_heads, head_size, page_size;
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void copy16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_some(u32 target, const void* source, int bytes, bool exists) {
    int count = exists ? bytes : 0;
    if (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                     "r"(count) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source),
                     "r"(count) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float wide(u16 number) { return __uint_as_float((u32)number << 16); }

__device__ __forceinline__ u32 narrow(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ float2 halves(u32 pair) {
    float2 found;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(found.x), "=f"(found.y) : "r"(pair));
    return found;
}

__device__ __forceinline__ void multiply(float* sums, const u32* a, const u32* b, u32 x, u32 y) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(b[0]), "r"(a[1]), "r"(b[1]), "r"(x), "r"(y));
}

// The eight numbers of a word, each 128 more, in pairs.
__device__ __forceinline__ void expand_word(u32* pairs, u32 word) {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = (word >> (4 * i) & 0x000f000fu) | 0x43004300u;
}

// The scales or minimums of the outputs g and g + 8, of each group of a block.
__device__ __forceinline__ void load_scales(float2* found, const char* scales, int g) {
#if WIDE
    const float2* own = (const float2*)scales + g * GROUPS;
#pragma unroll
    for (int k = 0; k < GROUPS; k++) found[k] = own[k];
#else
    u32 pairs[GROUPS];
    const char* own = scales + g * GROUPS * 4;
#if GROUPS == 4
    *(uint4*)pairs = *(const uint4*)own;
#elif GROUPS == 2
    *(uint2*)pairs = *(const uint2*)own;
#else
    pairs[0] = *(const u32*)own;
#endif
#pragma unroll
    for (int k = 0; k < GROUPS; k++) found[k] = halves(pairs[k]);
#endif
}

#if PROGRAMS
struct Numbers {
    u32 first[4], second[4];  // words of the outputs g and g + 8
    float2 scales[GROUPS], lows[GROUPS];
};

__device__ __forceinline__ void load_numbers(Numbers& found, const char* slot, int part, int lane) {
    const char* own = slot + part * PART_BYTES;
    *(uint4*)found.first = *(const uint4*)(own + lane * 16);
    *(uint4*)found.second = *(const uint4*)(own + HALF_BYTES + lane * 16);
    load_scales(found.scales, own + 2 * HALF_BYTES, lane / 4);
    if (LOWS) load_scales(found.lows, own + 2 * HALF_BYTES + SCALE_BYTES, lane / 4);
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) product(Arguments given) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.x, first_row = blockIdx.y * COLUMNS;
    const int num_blocks = given.num_blocks, own_blocks = (num_blocks - warp + WARPS - 1) / WARPS;
    if (given.level == 2) launch_dependents();

    char* slots = shared + warp * STAGES * SLOT_BYTES;
    auto load_matrix = [&](int i) {
        if (i < own_blocks) {
            const u32 slot = shared_address(slots) + i % STAGES * SLOT_BYTES;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const long long block =
                    (long long)(tile + part * gridDim.x) * num_blocks + warp + i * WARPS;
                const u32 target = slot + part * PART_BYTES + lane * 16;
                const char* values = given.values + block * (2 * HALF_BYTES) + lane * 16;
                copy16(target, values);
                copy16(target + HALF_BYTES, values + HALF_BYTES);
                if (lane < SCALE_BYTES / 16) {
                    const long long offset = block * SCALE_BYTES + lane * 16;
                    copy16(target + 2 * HALF_BYTES, given.scales + offset);
                    if (LOWS) copy16(target + 2 * HALF_BYTES + SCALE_BYTES, given.lows + offset);
                }
            }
        }
    };
#if ROWS == 0
    // Each lane copies what it multiplies with: no other one waits for it.
    auto load_inputs = [&](int i) {
        if (i < own_blocks) {
            const int width = UNIT / 2;  // bytes of a lane's inputs of a unit
            const u32 slot = shared_address(slots) + i % STAGES * SLOT_BYTES + PARTS * PART_BYTES;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const int row = first_row + 8 * n + g;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int input = (warp + i * WARPS) * BLOCK + c * UNIT + t * (UNIT / 4);
                    const bool exists = row < given.num_rows && input < given.num_in;
                    const u16* source = given.x + (exists ? (long long)row * given.num_in + input : 0);
                    copy_some(slot + (n * 4 + c) * 32 * width + lane * width, source, width, exists);
                }
            }
        }
    };
#endif
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        load_matrix(i);
        commit();
    }

#if ROWS
    // x, normalised but for the root, and its sums by unit.
    const int stride = num_blocks * BLOCK + X_PADDING, num_units = num_blocks * 4;
    u16* inputs = (u16*)(shared + WARPS * STAGES * SLOT_BYTES);
    float* unit_sums = (float*)(inputs + ROWS * stride);
    float* squares = unit_sums + ROWS * num_units;
    const int num_chunks = num_blocks * (BLOCK / 8);
    uint4 gains[2];
    if (given.gain) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int chunk = threadIdx.x + i * THREADS;
            if (chunk * 8 < given.num_in) gains[i] = ((const uint4*)given.gain)[chunk];
        }
    }
    if (given.level > 0) wait_for_predecessor();
    if (given.level == 1) launch_dependents();
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
        float square = 0;
        auto load_chunk = [&](int chunk, const uint4* gain) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (chunk * 8 < given.num_in)
                x = ((const uint4*)(given.x + (long long)n * given.num_in))[chunk];
            u32* pairs = (u32*)&x;
            float sum = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float first = low(pairs[k]), second = high(pairs[k]);
                if (gain) {
                    square += first * first + second * second;
                    const u32 pair = ((const u32*)gain)[k];
                    pairs[k] = narrow(first * low(pair), second * high(pair));
                    first = low(pairs[k]);
                    second = high(pairs[k]);
                }
                sum += first + second;
            }
#pragma unroll
            for (int step = 1; step < UNIT / 8; step *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (chunk < num_chunks) {
                ((uint4*)(inputs + n * stride))[chunk] = x;
                if (chunk % (UNIT / 8) == 0) unit_sums[n * num_units + chunk / (UNIT / 8)] = sum;
            }
        };
        if (given.gain) {
#pragma unroll
            for (int i = 0; i < 2; i++) load_chunk(threadIdx.x + i * THREADS, &gains[i]);
            for (int i = 2; i * THREADS < num_chunks; i++) {
                const int chunk = threadIdx.x + i * THREADS;
                uint4 gain = make_uint4(0, 0, 0, 0);
                if (chunk * 8 < given.num_in) gain = ((const uint4*)given.gain)[chunk];
                load_chunk(chunk, &gain);
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                square += __shfl_xor_sync(0xffffffffu, square, step);
            if (lane == 0) squares[n * WARPS + warp] = square;
        } else {
            for (int i = 0; i * THREADS < num_chunks; i++)
                load_chunk(threadIdx.x + i * THREADS, nullptr);
        }
    }
    __syncthreads();
#else
    if (given.level > 0) wait_for_predecessor();
    if (given.level == 1) launch_dependents();
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        load_inputs(i);
        commit();
    }
    const u32 ones[2] = {0x3f803f80u, 0x3f803f80u};
#endif

    const int tiles_of_x = ROWS ? 1 : TILES;
    float totals[PARTS][ROWS ? 1 : TILES][4] = {};
    for (int i = 0; i < own_blocks; i++) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        const char* slot = slots + i % STAGES * SLOT_BYTES;
        Numbers numbers[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; part++) load_numbers(numbers[part], slot, part, lane);
#if ROWS
        const int block = warp + i * WARPS;
        float sums_of_x[ROWS][4];
#pragma unroll
        for (int n = 0; n < ROWS; n++)
            *(float4*)sums_of_x[n] = *(const float4*)(unit_sums + n * num_units + block * 4);
#endif
#pragma unroll
        for (int n = 0; n < tiles_of_x; n++) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float sums[PARTS][BITS / 4][4];
                float ofx[4] = {0, 0, 0, 0};
#if ROWS
#pragma unroll
                for (int c = group * (4 / GROUPS); c < (group + 1) * (4 / GROUPS); c++) {
                    ofx[0] += sums_of_x[0][c];
                    if (ROWS == 2) ofx[1] += sums_of_x[ROWS - 1][c];
                }
                ofx[2] = ofx[0];
                ofx[3] = ofx[1];
#endif
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        // Taken off before the products are added, which loses less.
                        sums[part][0][k] = ROWS ? ofx[k] * (BITS == 4 ? -EXCESS : -128.0f) : 0.0f;
                        if (BITS == 8) sums[part][BITS / 4 - 1][k] = ROWS ? ofx[k] * -136.0f : 0.0f;
                    }
                }
#pragma unroll
                for (int c = group * (4 / GROUPS); c < (group + 1) * (4 / GROUPS); c++) {
                    u32 x[4] = {0, 0, 0, 0};
#if ROWS
                    if (g < ROWS) {
                        const u16* own = inputs + g * stride + block * BLOCK + c * UNIT + t * (UNIT / 4);
                        if (BITS == 4)
                            *(uint4*)x = *(const uint4*)own;
                        else
                            *(uint2*)x = *(const uint2*)own;
                    }
#else
                    const int width = UNIT / 2;
                    const char* own =
                        slot + PARTS * PART_BYTES + (n * 4 + c) * 32 * width + lane * width;
                    if (BITS == 4)
                        *(uint4*)x = *(const uint4*)own;
                    else
                        *(uint2*)x = *(const uint2*)own;
                    multiply(ofx, ones, ones, x[0], x[1]);
                    if (BITS == 4) multiply(ofx, ones, ones, x[2], x[3]);
#endif
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        u32 first[4], second[4];
                        expand_word(first, numbers[part].first[c]);
                        expand_word(second, numbers[part].second[c]);
                        multiply(sums[part][0], first, second, x[0], x[1]);
                        if (BITS == 4)
                            multiply(sums[part][0], first + 2, second + 2, x[2], x[3]);
                        else
                            multiply(sums[part][BITS / 4 - 1], first + 2, second + 2, x[0], x[1]);
                    }
                }
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const float2 scale = numbers[part].scales[group];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        if (ROWS == 1 && k % 2) continue;
                        const float own = k < 2 ? scale.x : scale.y;
                        float sum = sums[part][0][k];
                        if (BITS == 8) sum += 16.0f * sums[part][BITS / 4 - 1][k];
                        if (ROWS == 0) sum -= EXCESS * ofx[k];
                        totals[part][n][k] += own * sum;
                        if (LOWS) {
                            const float2 lows = numbers[part].lows[group];
                            totals[part][n][k] += (k < 2 ? lows.x : lows.y) * ofx[k];
                        }
                    }
                }
            }
        }
        __syncwarp();
        load_matrix(i + STAGES);
#if ROWS == 0
        load_inputs(i + STAGES);
#endif
        commit();
    }

    // The sums of all warps, in their order.
#if ROWS
    float* partial = squares + ROWS * WARPS;
#else
    float* partial = (float*)shared;
    wait_copies<0>();
    __syncthreads();
#endif
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int n = 0; n < tiles_of_x; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int column = n * 8 + 2 * t + k % 2, row = g + k / 2 * 8;
                if (column < COLUMNS)
                    partial[((warp * PARTS + part) * COLUMNS + column) * 16 + row] = totals[part][n][k];
            }
    __syncthreads();
    for (int item = threadIdx.x; item < 16 * COLUMNS; item += THREADS) {
        const int column = item / 16, row = first_row + column, output = tile * 16 + item % 16;
        float products[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            products[part] = 0;
#pragma unroll
            for (int other = 0; other < WARPS; other++)
                products[part] += partial[(other * PARTS + part) * 16 * COLUMNS + item];
        }
#if ROWS
        if (given.gain) {
            float square = 0;
#pragma unroll
            for (int other = 0; other < WARPS; other++) square += squares[column * WARPS + other];
            const float root = rsqrtf(square + given.epsilon);
#pragma unroll
            for (int part = 0; part < PARTS; part++) products[part] *= root;
        }
#endif
        const bool exists = output < given.num_out && row < given.num_rows;
        float y = products[0];
        if (PARTS == 2) y = y / (1.0f + __expf(-y)) * products[PARTS - 1];
        if (given.bias && exists) y += wide(given.bias[output]);
        const long long place = (long long)row * given.num_out + output;
#if HEADS
        y = wide((u16)narrow(y, 0.0f));
        const float neighbour = __shfl_xor_sync(__activemask(), y, 1);
        if (!exists) continue;
        const int size = given.head_size, head = output / size, dim = output % size;
        if (head < given.heads + given.kv_heads) {
            const float* angle = given.rotations + row * size + dim / 2 * 2;
            y = y * angle[0] + (dim % 2 ? neighbour : -neighbour) * angle[1];
        }
        const u16 result = (u16)narrow(y, 0.0f);
        if (head < given.heads) {
            ((u16*)given.out)[(long long)row * given.heads * size + output] = result;
        } else {
            const long long slot = given.slots[row];
            const int key = head - given.heads, value = key - given.kv_heads;
            u16* target = value < 0 ? given.keys + key * given.by_head
                                    : given.kv_values + value * given.by_head;
            target[slot / given.page_size * given.by_page +
                   slot % given.page_size * given.by_offset + dim] = result;
        }
#else
        if (!exists) continue;
        if (given.is_float) {
            float* target = (float*)given.out + place;
            *target = given.adds ? *target + y : y;
        } else {
            u16* target = (u16*)given.out + place;
            *target = (u16)narrow(given.adds ? wide(*target) + y : y, 0.0f);
        }
#endif
    }
}

#else
// Write the matrix [num_out, num_in] in bfloat16, whose numbers are rounded once.
extern "C" __global__ void __launch_bounds__(THREADS) expand(Arguments given) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const long long block = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int num_blocks = given.num_blocks;
    if (block >= (long long)((given.num_out + 15) / 16) * num_blocks) return;
    float2 scales[GROUPS], lows[GROUPS];
    load_scales(scales, given.scales + block * SCALE_BYTES, g);
    if (LOWS) load_scales(lows, given.lows + block * SCALE_BYTES, g);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int output = (int)(block / num_blocks) * 16 + half * 8 + g;
        u32 words[4];
        *(uint4*)words = *(const uint4*)(given.values + (block * 2 + half) * HALF_BYTES + lane * 16);
        if (output >= given.num_out) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int input = (int)(block % num_blocks) * BLOCK + c * UNIT + t * (UNIT / 4);
            if (input >= given.num_in) continue;
            const float2 pair = scales[c / (4 / GROUPS)];
            const float scale = half ? pair.y : pair.x;
            float lowest = 0;
            if (LOWS) lowest = half ? lows[c / (4 / GROUPS)].y : lows[c / (4 / GROUPS)].x;
            u32 pairs[4];
            expand_word(pairs, words[c]);
            u32 result[4];
#pragma unroll
            for (int k = 0; k < UNIT / 8; k++) {
                float first = low(pairs[k]) - 128.0f, second = high(pairs[k]) - 128.0f;
                if (BITS == 8) {
                    first += 16.0f * (low(pairs[k + 2 * (BITS == 8)]) - 128.0f);
                    second += 16.0f * (high(pairs[k + 2 * (BITS == 8)]) - 128.0f);
                }
                const float zero = BITS == 8 ? 128.0f : LOWS ? 0.0f : 8.0f;
                // As on a CPU: two roundings where there are minimums.
                result[k] = narrow(__fadd_rn(__fmul_rn(first - zero, scale), lowest),
                                   __fadd_rn(__fmul_rn(second - zero, scale), lowest));
            }
            u16* target = (u16*)given.out + (long long)output * given.num_in + input;
            if (BITS == 4)
                *(uint4*)target = *(const uint4*)result;
            else
                *(uint2*)target = *(const uint2*)result;
        }
    }
}
#endif
