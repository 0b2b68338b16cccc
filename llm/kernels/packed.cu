// Products with packed matrices on tensor cores; llm/kernels/packed.py compiles and launches them.
//
// Given: BITS of a number (4 or 8), GROUPS of a block (1, 2 or 4), WIDE (scales are float32, else
// float16), LOWS (there are minimums). With ROWS of x (1 or 2) the function is `few_rows`, which
// gets PARTS (2: gate and up), HEADS (queries, keys and values are rotated and stored) and STAGES
// of each warp's blocks in flight; with TILES of 8 rows of x it is `rows`, which gets OUTS, tiles
// of outputs of a program, and STAGES; otherwise it is `expand`.
//
// A block of 16 outputs and 512 / BITS inputs is 1,024 bytes (see llm/kernels/words.py): lane
// 4 g + t of a warp reads words of the outputs g and g + 8. `few_rows` multiplies the numbers as
// bytes. For `rows` a number of 4 bits becomes the lowest mantissa bits of a bfloat16, which is
// 128 + u: two of them need a shift and one operation of bits. Numbers of 8 bits are two of 4.

#define WARPS (ROWS ? 16 : 8)
#define THREADS (32 * WARPS)
#define UNIT (128 / BITS)
#define BLOCK (4 * UNIT)
#define HALF_BYTES 512
#define SCALE_BYTES (32 * GROUPS * (WIDE ? 2 : 1))
#define BLOCK_BYTES (2 * HALF_BYTES + SCALE_BYTES * (1 + LOWS))
#define INPUT_BYTES (TILES * 16 * BLOCK)
#define SLOT_BYTES (OUTS * BLOCK_BYTES + INPUT_BYTES)
#define X_PADDING 32
#define MAGIC 12582912.0f  // 1.5 * 2^23
#define MAGIC_BITS 0x4b400000
#define ZERO (BITS == 8 ? 128.0f : LOWS ? 0.0f : 8.0f)

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
    int num_rows, num_out, num_in, num_tiles, num_blocks;  // of one part
    float epsilon;
    int level;  // of the launch
    int adds, is_float;  // of the result: bfloat16 or float32
    int heads, kv_heads, head_size, page_size;
    // Two numbers 128 in bfloat16. The compiler would make two operations of one with two constants.
    u32 pair_of_128;
};

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float wide(u16 number) { return __uint_as_float((u32)number << 16); }

// Bytes 2, 1 and 0 of four words: the digits from the highest on.
__device__ __forceinline__ void transpose(
    u32& first, u32& second, u32& third, u32 a, u32 b, u32 c, u32 d) {
    const u32 lower = __byte_perm(a, b, 0x5140), next = __byte_perm(c, d, 0x5140);
    third = __byte_perm(lower, next, 0x5410);
    second = __byte_perm(lower, next, 0x7632);
    first = __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

// The eight numbers of a word, each 128 more, in pairs.
__device__ __forceinline__ void expand_word(u32* pairs, u32 word, u32 added) {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = lowest_of_halves(word >> (4 * i), added);
}

// The scales or minimums of the outputs g and g + 8, of each group of a block.
struct Scales {
    u32 words[GROUPS * (1 + WIDE)];
};

__device__ __forceinline__ void load_scales(Scales& found, const char* scales, int g) {
    const char* own = scales + g * sizeof(Scales);
#pragma unroll
    for (int i = 0; i < GROUPS * (1 + WIDE); i += 4) {
        if (GROUPS * (1 + WIDE) >= 4)
            *(uint4*)(found.words + i) = *(const uint4*)(own + i * 4);
        else if (GROUPS * (1 + WIDE) == 2)
            *(uint2*)found.words = *(const uint2*)own;
        else
            found.words[0] = *(const u32*)own;
    }
}

__device__ __forceinline__ float2 pair_of(const Scales& scales, int group) {
#if WIDE
    return make_float2(__uint_as_float(scales.words[2 * group]),
                       __uint_as_float(scales.words[2 * group + 1]));
#else
    return halves(scales.words[group]);
#endif
}

#if ROWS || TILES
struct Numbers {
    u32 first[4], second[4];  // words of the outputs g and g + 8
    Scales scales, lows;
};

// `slot` is the lane's address.
__device__ __forceinline__ void load_numbers(Numbers& found, const char* slot, int lane) {
    *(uint4*)found.first = *(const uint4*)slot;
    *(uint4*)found.second = *(const uint4*)(slot + HALF_BYTES);
    const char* scales = slot - lane * 16 + 2 * HALF_BYTES;
    load_scales(found.scales, scales, lane / 4);
    if (LOWS) load_scales(found.lows, scales + SCALE_BYTES, lane / 4);
}

// Copy a block of the matrix to a warp's memory; `slot` is the lane's address.
__device__ __forceinline__ void copy_block(
    const Arguments& given, long long block, u32 slot, int lane) {
    const char* values = given.values + block * (2 * HALF_BYTES) + lane * 16;
    copy16(slot, values);
    copy16(slot + HALF_BYTES, values + HALF_BYTES);
    if (lane < SCALE_BYTES / 16) {
        const long long offset = block * SCALE_BYTES + lane * 16;
        copy16(slot + 2 * HALF_BYTES, given.scales + offset);
        if (LOWS) copy16(slot + 2 * HALF_BYTES + SCALE_BYTES, given.lows + offset);
    }
}

#endif

#if ROWS
// What becomes of one product.
struct End {
    float added, cosine, sine;
    short first[PARTS], last[PARTS];  // warps that have parts of it
    void* target;  // null: it fills the last tile
};

// A program has the same share of the tiles of outputs as the others, and its warps have equal
// shares of all their blocks, one after another in memory. They copy them before x is there.
extern "C" __global__ void __launch_bounds__(THREADS, 2) few_rows(Arguments given) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_blocks = given.num_blocks;
    if (given.level == 2) launch_dependents();

    const int first_tile = (int)((long long)blockIdx.x * given.num_tiles / gridDim.x);
    const int own_tiles =
        (int)((long long)(blockIdx.x + 1) * given.num_tiles / gridDim.x) - first_tile;
    const int part_blocks = own_tiles * num_blocks, all_blocks = PARTS * part_blocks;
    const int start = warp * all_blocks / WARPS, stop = (warp + 1) * all_blocks / WARPS;

    const char* slots = shared + warp * STAGES * SLOT_BYTES + lane * 16;
    const u32 first_slot = shared_address(slots);
    const long long first_block = (long long)first_tile * num_blocks;
    const long long next_part = (long long)given.num_tiles * num_blocks - part_blocks;
    auto load = [&](int i, u32 slot) {
        if (i < stop) {
            const long long skipped = PARTS == 2 && i >= part_blocks ? next_part : 0;
            copy_block(given, first_block + i + skipped, slot, lane);
        }
        commit();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) load(start + stage, first_slot + stage * SLOT_BYTES);

    // x, times the gain, as fixed-point numbers of three digits, relative to the block's greatest:
    // digit n of row r is column 4 r + n of the right operand. Of each group what its sums have too
    // much, or the sums of its digits for the minimums.
    const int stride = num_blocks * BLOCK + X_PADDING, num_groups = num_blocks * GROUPS;
    const int num_chunks = num_blocks * (BLOCK / 8);
    char* digits = shared + WARPS * STAGES * SLOT_BYTES;
    float* corrections = (float*)(digits + 3 * ROWS * stride);
    End* ends = (End*)(corrections + 8 * num_groups);
    float* steps = (float*)(ends + own_tiles * ROWS * 16);
    float* squares = steps + ROWS * num_blocks;
    float* partial = squares + ROWS * WARPS;

    // One product of each thread, or none.
    const int item = threadIdx.x, own_tile = item / (ROWS * 16), row = item / 16 % ROWS;
    const int output = (first_tile + own_tile) * 16 + item % 16;
    const bool has_end = own_tile < own_tiles, exists = has_end && output < given.num_out;
    End end;
    end.added = exists && given.bias ? wide(given.bias[output]) : 0.0f;
    end.target = nullptr;
    if (has_end) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int begin = (part * own_tiles + own_tile) * num_blocks;
            end.first[part] = (short)(((begin + 1) * WARPS - 1) / all_blocks);
            end.last[part] = (short)(((begin + num_blocks) * WARPS - 1) / all_blocks);
        }
    }
    uint4 first_gain = make_uint4(0, 0, 0, 0);
    if (given.gain && threadIdx.x * 8 < given.num_in)
        first_gain = ((const uint4*)given.gain)[threadIdx.x];
    if (given.level > 0) wait_for_predecessor();
    if (given.level == 1) launch_dependents();

    uint4 first_x[ROWS];
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
        first_x[n] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x * 8 < given.num_in)
            first_x[n] = ((const uint4*)(given.x + (long long)n * given.num_in))[threadIdx.x];
    }
#if HEADS
    const int size = given.head_size, head = output / size, dim = output % size;
    long long slot_of_row = 0;
    float2 angle = make_float2(1.0f, 0.0f);
    if (exists) {
        slot_of_row = given.slots[row];
        if (head < given.heads + given.kv_heads)
            angle = *(const float2*)(given.rotations + row * size + dim / 2 * 2);
    }
#else
    float old = 0;
    if (exists) {
        const long long place = (long long)row * given.num_out + output;
        end.target = given.is_float ? (void*)((float*)given.out + place)
                                    : (void*)((u16*)given.out + place);
        if (given.adds) old = given.is_float ? *(float*)end.target : wide(*(u16*)end.target);
    }
#endif
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
        float square = 0;
        for (int i = 0; i * THREADS < num_chunks; i++) {
            const int chunk = threadIdx.x + i * THREADS;
            uint4 x = first_x[n], gain = first_gain;
            if (i > 0) {
                x = make_uint4(0, 0, 0, 0);
                if (chunk * 8 < given.num_in) {
                    x = ((const uint4*)(given.x + (long long)n * given.num_in))[chunk];
                    if (given.gain) gain = ((const uint4*)given.gain)[chunk];
                }
            }
            float values[8], greatest = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const u32 pair = ((const u32*)&x)[k / 2], other = ((const u32*)&gain)[k / 2];
                values[k] = k % 2 ? high(pair) : low(pair);
                if (given.gain) {
                    square += values[k] * values[k];
                    values[k] *= k % 2 ? high(other) : low(other);
                }
                greatest = maximum(greatest, fabsf(values[k]));
            }
#pragma unroll
            for (int step = 1; step < BLOCK / 8; step *= 2)
                greatest = maximum(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
            const float factor = greatest > 1e-30f ? 127.0f * 65536.0f / greatest : 0.0f;
            u32 found[8];  // digits of each number as bytes, the lowest first
#pragma unroll
            for (int k = 0; k < 8; k++)
                found[k] = (u32)(__float2int_rn(values[k] * factor) + 0x808080) ^ 0x808080u;
            // In the order in which a word holds the inputs.
            uint2 rows[3];
#if BITS == 4
            transpose(rows[0].x, rows[1].x, rows[2].x, found[0], found[4], found[1], found[5]);
            transpose(rows[0].y, rows[1].y, rows[2].y, found[2], found[6], found[3], found[7]);
#else
            transpose(rows[0].x, rows[1].x, rows[2].x, found[0], found[2], found[1], found[3]);
            transpose(rows[0].y, rows[1].y, rows[2].y, found[4], found[6], found[5], found[7]);
#endif
            const int group = chunk / (BLOCK / 8 / GROUPS);
#pragma unroll
            for (int d = 0; d < 3; d++) {
                int sum = __dp4a((int)rows[d].x, 0x01010101, 0);
                sum = __dp4a((int)rows[d].y, 0x01010101, sum);
#pragma unroll
                for (int step = 1; step < BLOCK / 8 / GROUPS; step *= 2)
                    sum += __shfl_xor_sync(0xffffffffu, sum, step);
                if (chunk < num_chunks) {
                    ((uint2*)(digits + (3 * n + d) * stride))[chunk] = rows[d];
                    if (chunk % (BLOCK / 8 / GROUPS) == 0) {
                        float correction = (float)sum;
                        if (!LOWS) correction = -MAGIC - ZERO * correction;
                        corrections[group * 8 + 4 * n + d] = correction;
                    }
                }
            }
            if (chunk < num_chunks && chunk % (BLOCK / 8) == 0)
                steps[n * num_blocks + chunk / (BLOCK / 8)] = greatest * (1.0f / 127.0f);
        }
        if (given.gain) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                square += __shfl_xor_sync(0xffffffffu, square, step);
            if (lane == 0) squares[n * WARPS + warp] = square;
        }
    }
#if HEADS
    if (exists) {
        const int slot = (int)slot_of_row, key = head - given.heads, value = key - given.kv_heads;
        u16* target = value < 0 ? given.keys + key * given.by_head
                                : given.kv_values + value * given.by_head;
        target += slot / given.page_size * given.by_page +
                  slot % given.page_size * given.by_offset + dim;
        end.target = key < 0 ? (u16*)given.out + (long long)row * given.heads * size + output : target;
    }
    end.cosine = angle.x;
    end.sine = dim % 2 ? angle.y : -angle.y;
#else
    end.added += old;
#endif
    if (has_end) ends[item] = end;
    __syncthreads();

    // Lanes of columns without a digit multiply with 0.
    const bool has_digit = g % 4 < 3 && g / 4 < ROWS;
    const char* own_digits = digits + (has_digit ? 3 * (g / 4) + g % 4 : 0) * stride + t * (UNIT / 4);
    const float* own_steps = steps + (ROWS == 2 ? t / 2 : 0) * num_blocks;
    u32 x[4][UNIT / 16] = {};
    float totals[4] = {0, 0, 0, 0};
    int tile = start / num_blocks, block = start % num_blocks, stage = 0;
    for (int i = start; i < stop; i++) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        Numbers numbers;
        load_numbers(numbers, slots + stage * SLOT_BYTES, lane);
        if (has_digit) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const char* own = own_digits + block * BLOCK + c * UNIT;
#if BITS == 4
                *(uint2*)x[c] = *(const uint2*)own;
#else
                x[c][0] = *(const u32*)own;
#endif
            }
        }
        float products[4] = {0, 0, 0, 0};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            // The bits of a number of float32 whose lowest bit is 1: the sums need no conversion.
            int sums[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
            for (int c = group * (4 / GROUPS); c < (group + 1) * (4 / GROUPS); c++) {
#if BITS == 4
                const u32 first = numbers.first[c], second = numbers.second[c];
                multiply_32(sums, first & 0x0f0f0f0fu, second & 0x0f0f0f0fu,
                            first >> 4 & 0x0f0f0f0fu, second >> 4 & 0x0f0f0f0fu, x[c][0],
                            x[c][UNIT / 16 - 1]);
#else
                multiply_16(sums, numbers.first[c], numbers.second[c], x[c][0]);
#endif
            }
            const float2 correction = *(const float2*)(corrections + (block * GROUPS + group) * 8 + 2 * t);
            const float2 scale = pair_of(numbers.scales, group), least = pair_of(numbers.lows, group);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float own = k % 2 ? correction.y : correction.x;
                const float sum = __int_as_float(sums[k]) + (LOWS ? -MAGIC : own);
                products[k] += (k < 2 ? scale.x : scale.y) * sum;
                if (LOWS) {
                    const float lowest = (k < 2 ? least.x : least.y);
                    products[k] += lowest * own;
                    if (BITS == 8) products[k] -= (k < 2 ? scale.x : scale.y) * (128.0f * own);
                }
            }
        }
        const float step = own_steps[block];
#pragma unroll
        for (int k = 0; k < 4; k++) totals[k] += step * products[k];
        __syncwarp();
        load(i + STAGES, first_slot + stage * SLOT_BYTES);
        if (++stage == STAGES) stage = 0;
        if (++block == num_blocks || i + 1 == stop) {
            // Lanes of even t have the first two digits of a row, the next ones the third.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float first = totals[2 * half], second = totals[2 * half + 1];
                float y = t % 2 ? first * (1.0f / 65536.0f) : first + second * (1.0f / 256.0f);
                y += __shfl_xor_sync(0xffffffffu, y, 1);
                if (t % 2 == 0 && t / 2 < ROWS)
                    partial[((tile * WARPS + warp) * ROWS + t / 2) * 16 + half * 8 + g] = y;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) totals[k] = 0;
            block = 0;
            tile++;
        }
    }
    __syncthreads();

    // The sums of all warps, in their order.
    if (threadIdx.x / 16 >= own_tiles * ROWS) return;
    const End own_end = ends[threadIdx.x];
    const int own_row = threadIdx.x / 16 % ROWS;
    float products[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int number = part * own_tiles + threadIdx.x / (ROWS * 16);
        const float* sums = partial + (number * WARPS * ROWS + own_row) * 16 + threadIdx.x % 16;
        products[part] = 0;
        for (int other = own_end.first[part]; other <= own_end.last[part]; other++)
            if (other * all_blocks / WARPS < (other + 1) * all_blocks / WARPS)
                products[part] += sums[other * ROWS * 16];
    }
    if (given.gain) {
        float square = 0;
#pragma unroll
        for (int other = 0; other < WARPS; other++) square += squares[own_row * WARPS + other];
        const float root = rsqrtf(square + given.epsilon);
#pragma unroll
        for (int part = 0; part < PARTS; part++) products[part] *= root;
    }
    float y = products[0];
    if (PARTS == 2) y = y / (1.0f + __expf(-y)) * products[PARTS - 1];
    y += own_end.added;
#if HEADS
    y = wide((u16)narrow(y, 0.0f));
    const float neighbour = __shfl_xor_sync(0xffffu << lane / 16 * 16, y, 1);
    y = y * own_end.cosine + neighbour * own_end.sine;
#endif
    if (!own_end.target) return;
    if (given.is_float)
        *(float*)own_end.target = y;
    else
        *(u16*)own_end.target = (u16)narrow(y, 0.0f);
}

#elif TILES
// The numbers less their zero, exact in bfloat16; of 8 bits, pairs of lower halves and of upper
// halves less 8.
__device__ __forceinline__ void expand_centred(u32* pairs, u32 word, u32 added) {
    expand_word(pairs, word, added);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool is_low = BITS == 4 ? LOWS : i % 2 == 0;
        pairs[i] = add_pairs(pairs[i], is_low ? 0xc300c300u : 0xc308c308u);
    }
}

// A program has OUTS tiles of outputs, and its warps their blocks in turn. Each lane copies what it
// multiplies with of x, too, so that no other one waits for it.
extern "C" __global__ void __launch_bounds__(THREADS, OUTS == 1 ? 2 : 1) rows(Arguments given) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_tile = blockIdx.x * OUTS, first_row = blockIdx.y * TILES * 8;
    const int own_blocks = (given.num_blocks - warp + WARPS - 1) / WARPS;
    const int width = UNIT / 2;  // bytes of a lane's inputs of a unit
    char* slots = shared + warp * STAGES * SLOT_BYTES;
    auto load = [&](int i) {
        if (i < own_blocks) {
            const u32 slot = shared_address(slots) + i % STAGES * SLOT_BYTES;
            const int block = warp + i * WARPS;
#pragma unroll
            for (int out = 0; out < OUTS; out++)
                if (first_tile + out < given.num_tiles) {
                    const long long tile = first_tile + out;
                    const u32 target = slot + out * BLOCK_BYTES + lane * 16;
                    copy_block(given, tile * given.num_blocks + block, target, lane);
                }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const int row = first_row + 8 * n + g;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int input = block * BLOCK + c * UNIT + t * (UNIT / 4);
                    const bool exists = row < given.num_rows && input < given.num_in;
                    const u16* source = given.x + (exists ? (long long)row * given.num_in + input : 0);
                    const u32 target = slot + OUTS * BLOCK_BYTES + ((n * 4 + c) * 32 + lane) * width;
                    copy_some(target, source, width, exists);
                }
            }
        }
        commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) load(i);

    const u32 ones[2] = {0x3f803f80u, 0x3f803f80u}, added = given.pair_of_128;
    float totals[OUTS][TILES][4] = {};
    for (int i = 0; i < own_blocks; i++) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        const char* slot = slots + i % STAGES * SLOT_BYTES;
#pragma unroll
        for (int out = 0; out < OUTS; out++) {
            Numbers numbers;
            load_numbers(numbers, slot + out * BLOCK_BYTES + lane * 16, lane);
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float sums[TILES][BITS / 4][4] = {}, of_x[TILES][4] = {};
#pragma unroll
                for (int c = group * (4 / GROUPS); c < (group + 1) * (4 / GROUPS); c++) {
                    u32 first[4], second[4];
                    expand_centred(first, numbers.first[c], added);
                    expand_centred(second, numbers.second[c], added);
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        u32 x[4] = {0, 0, 0, 0};
                        const char* own =
                            slot + OUTS * BLOCK_BYTES + ((n * 4 + c) * 32 + lane) * width;
                        if (BITS == 4)
                            *(uint4*)x = *(const uint4*)own;
                        else
                            *(uint2*)x = *(const uint2*)own;
                        if (BITS == 4) {
                            multiply(sums[n][0], first, second, 1, x[0], x[1]);
                            multiply(sums[n][0], first + 2, second + 2, 1, x[2], x[3]);
                        } else {
                            multiply(sums[n][0], first, second, 2, x[0], x[1]);
                            multiply(sums[n][BITS / 4 - 1], first + 1, second + 1, 2, x[0], x[1]);
                        }
                        if (LOWS) multiply(of_x[n], ones, ones, 1, x[0], x[1]);
                        if (LOWS && BITS == 4) multiply(of_x[n], ones, ones, 1, x[2], x[3]);
                    }
                }
                const float2 scale = pair_of(numbers.scales, group);
                const float2 least = pair_of(numbers.lows, group);
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        float sum = sums[n][0][k];
                        if (BITS == 8) sum += 16.0f * sums[n][BITS / 4 - 1][k];
                        totals[out][n][k] += (k < 2 ? scale.x : scale.y) * sum;
                        if (LOWS) totals[out][n][k] += (k < 2 ? least.x : least.y) * of_x[n][k];
                    }
            }
        }
        __syncwarp();
        load(i + STAGES);
    }
    wait_copies<0>();
    __syncthreads();

    // The sums of all warps, in their order.
    float* partial = (float*)shared;
    const int all_outputs = OUTS * 16, products = all_outputs * 8 * TILES;
#pragma unroll
    for (int out = 0; out < OUTS; out++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int column = n * 8 + 2 * t + k % 2, row = out * 16 + g + k / 2 * 8;
                partial[warp * products + column * all_outputs + row] = totals[out][n][k];
            }
    __syncthreads();
    for (int item = threadIdx.x; item < products; item += THREADS) {
        const int row = first_row + item / all_outputs;
        const int output = first_tile * 16 + item % all_outputs;
        float y = 0;
#pragma unroll
        for (int other = 0; other < WARPS; other++) y += partial[other * products + item];
        if (output >= given.num_out || row >= given.num_rows) continue;
        const long long place = (long long)row * given.num_out + output;
        if (given.is_float)
            ((float*)given.out)[place] = y;
        else
            ((u16*)given.out)[place] = (u16)narrow(y, 0.0f);
    }
}

#else
// Write the matrix [num_out, num_in] in bfloat16, whose numbers are rounded once.
extern "C" __global__ void __launch_bounds__(THREADS) expand(Arguments given) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const long long block = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int num_blocks = given.num_blocks;
    if (block >= (long long)((given.num_out + 15) / 16) * num_blocks) return;
    Scales scales, lows;
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
            const float2 pair = pair_of(scales, c / (4 / GROUPS)), lowest = pair_of(lows, c / (4 / GROUPS));
            const float scale = half ? pair.y : pair.x;
            const float least = !LOWS ? 0.0f : half ? lowest.y : lowest.x;
            u32 pairs[4];
            expand_word(pairs, words[c], given.pair_of_128);
            u32 result[4];
#pragma unroll
            for (int k = 0; k < UNIT / 8; k++) {
                const u32 pair = pairs[BITS == 8 ? 2 * k : k];
                float first = low(pair) - 128.0f, second = high(pair) - 128.0f;
                if (BITS == 8) {
                    first += 16.0f * (low(pairs[2 * k % 4 + 1]) - 128.0f);
                    second += 16.0f * (high(pairs[2 * k % 4 + 1]) - 128.0f);
                }
                // As on a CPU: two roundings where there are minimums.
                result[k] = narrow(__fadd_rn(__fmul_rn(first - ZERO, scale), least),
                                   __fadd_rn(__fmul_rn(second - ZERO, scale), least));
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
