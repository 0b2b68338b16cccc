// Products with packed matrices on tensor cores; llm/kernels/packed.py compiles and launches them.
//
// Given: BITS of a number (4 or 8), GROUPS of a block (1, 2 or 4), WIDE (scales are float32, else
// float16), FACTORS (each is a float16 of the block times an integer of 8 bits), LOWS (there are
// minimums), WARPS of a program. With ROWS of x (1 or 2) the function is `few_rows`, which
// gets PARTS (2: gate and up), HEADS (queries, keys and values are rotated and stored), STAGES of
// each warp's blocks in flight and REFILLS (a warp has more blocks); with TILES of 8 rows of x it is `rows`, which gets OUTS, tiles
// of outputs of a program, and STAGES; otherwise it is `expand`.
//
// A block of 16 outputs and 512 / BITS inputs is 1,024 bytes (see llm/kernels/words.py): lane
// 4 g + t of a warp reads words of the outputs g and g + 8. `few_rows` multiplies the numbers as
// bytes. For `rows` a number of 4 bits becomes the lowest mantissa bits of a bfloat16, which is
// 128 + u: two of them need a shift and one operation of bits. Numbers of 8 bits are two of 4.

#define THREADS (32 * WARPS)
#define UNIT (128 / BITS)
#define BLOCK (4 * UNIT)
#define HALF_BYTES 512
#define OWN_SCALE_BYTES (FACTORS ? 4 + 2 * GROUPS : (WIDE ? 8 : 4) * GROUPS)  // of g and g + 8
#define SCALE_BYTES (8 * OWN_SCALE_BYTES)
#define BLOCK_BYTES (2 * HALF_BYTES + SCALE_BYTES * (1 + LOWS))
#define INPUT_BYTES (TILES * 16 * BLOCK)
#define SLOT_BYTES (OUTS * BLOCK_BYTES + INPUT_BYTES)
#define X_PADDING 16
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
    // Two numbers 128 in bfloat16, and four bytes 128. The compiler would make two operations of one
    // with two constants.
    u32 pair_of_128, bytes_of_128;
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

// Two bytes, each 128 more.
__device__ __forceinline__ float2 integers(u32 pair) {
    const float first = __uint_as_float(__byte_perm(pair, 0x4b000000, 0x7650));
    const float second = __uint_as_float(__byte_perm(pair, 0x4b000000, 0x7651));
    return make_float2(first - 8388736.0f, second - 8388736.0f);  // 2^23 + 128
}

__device__ __forceinline__ float2 times(float2 a, float2 b) {
    return make_float2(a.x * b.x, a.y * b.y);
}

// The scales or minimums of the outputs g and g + 8, of each group of a block.
struct Scales {
    u32 words[OWN_SCALE_BYTES / 4];
};

__device__ __forceinline__ void load_scales(Scales& found, const char* scales, int g) {
    const char* own = scales + g * sizeof(Scales);
    if (OWN_SCALE_BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < OWN_SCALE_BYTES / 16; i++)
            ((uint4*)found.words)[i] = ((const uint4*)own)[i];
    } else if (OWN_SCALE_BYTES == 8) {
        *(uint2*)found.words = *(const uint2*)own;
    } else {
#pragma unroll
        for (int i = 0; i < OWN_SCALE_BYTES / 4; i++) found.words[i] = ((const u32*)own)[i];
    }
}

__device__ __forceinline__ float2 pair_of(const Scales& scales, int group) {
#if FACTORS
    const u32 pair = scales.words[1 + group / 2] >> group % 2 * 16;
    return times(halves(scales.words[0]), integers(pair));
#elif WIDE
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
#define REGISTERS 56  // see llm/kernels/packed.py
// With one row of x there are columns for two groups: 0 to 2 for an even one, 4 to 6 for the next.
#define PAIRED (ROWS == 1 && GROUPS > 1)
#define SETS (PAIRED ? GROUPS / 2 : GROUPS)  // of sums of a block
#define CENTRED (BITS == 8 || !LOWS)  // numbers are less their zero, of 4 bits times 16

// The group of a unit, and its place among those of a lane: the even groups are the first ones.
__device__ constexpr int group_of(int unit) { return unit * GROUPS / 4; }
__device__ constexpr int place_of(int unit) {
    return PAIRED && GROUPS == 4 ? unit % 2 * 2 + unit / 2 : unit;
}

// What becomes of one product.
struct End {
    float added, cosine, sine;
    void* target;  // null: it fills the last tile
};

// The matrices' blocks in the order of a warp.
struct Source {
    const char *values, *scales, *lows;
    int next, stop, jump;  // numbers of blocks; at `jump` the second part begins
};

__device__ __forceinline__ void move(Source& source, long long blocks) {
    source.values += blocks * (2 * HALF_BYTES);
    source.scales += blocks * SCALE_BYTES;
    if (LOWS) source.lows += blocks * SCALE_BYTES;
}

__device__ __forceinline__ void copy_next(Source& source, u32 slot, long long skipped, int lane) {
    const bool exists = source.next < source.stop, has_scales = exists && lane < SCALE_BYTES / 16;
    if (PARTS == 2 && source.next == source.jump) move(source, skipped);
    copy16_if(exists, slot, source.values);
    copy16_if(exists, slot + HALF_BYTES, source.values + HALF_BYTES);
    copy16_if(has_scales, slot + 2 * HALF_BYTES, source.scales);
    if (LOWS) copy16_if(has_scales, slot + 2 * HALF_BYTES + SCALE_BYTES, source.lows);
    move(source, 1);
    source.next++;
    commit();
}

// Of a group, in the scales or minimums of the outputs g and g + 8.
__device__ __forceinline__ float2 scales_of(const char* scales, int group) {
#if FACTORS
    return times(halves(*(const u32*)scales), integers(((const u16*)(scales + 4))[group]));
#elif WIDE
    return ((const float2*)scales)[group];
#else
    return halves(((const u32*)scales)[group]);
#endif
}

// Two registers of bytes of a word, for the inputs of its lower and upper halves of bytes.
__device__ __forceinline__ void bytes_of(u32& lower, u32& upper, u32 word, u32 bytes_of_128) {
#if CENTRED
    lower = (word << 4 & 0xf0f0f0f0u) ^ bytes_of_128;
    upper = (word & 0xf0f0f0f0u) ^ bytes_of_128;
#else
    lower = word & 0x0f0f0f0fu;
    upper = word >> 4 & 0x0f0f0f0fu;
#endif
}

// A program has the same share of the tiles of outputs as the others, and its warps have equal
// shares of all their blocks, one after another in memory. They copy them before x is there.
extern "C" __global__ void __maxnreg__(REGISTERS) few_rows(Arguments given) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_blocks = given.num_blocks;
    if (given.level == 2) launch_dependents();

    const int first_tile = (u32)blockIdx.x * given.num_tiles / gridDim.x;
    const int own_tiles = (u32)(blockIdx.x + 1) * given.num_tiles / gridDim.x - first_tile;
    const int part_blocks = own_tiles * num_blocks, all_blocks = PARTS * part_blocks;
    const int start = warp * all_blocks / WARPS, stop = (warp + 1) * all_blocks / WARPS;

    const char* slots = shared + warp * STAGES * SLOT_BYTES + lane * 16;
    const u32 first_slot = shared_address(slots);
    const long long skipped = (long long)given.num_tiles * num_blocks - part_blocks;
    Source source = {given.values + lane * 16, given.scales + lane * 16, given.lows + lane * 16,
                     start, stop, part_blocks};
    move(source, (long long)first_tile * num_blocks + start);
    if (PARTS == 2 && start > part_blocks) move(source, skipped);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++)
        copy_next(source, first_slot + stage * SLOT_BYTES, skipped, lane);

    // x, times the gain, as fixed-point numbers of three digits, relative to the power of two of the
    // block's greatest: digit n of row r is column 4 r + n of the right operand. With minimums also
    // the sums of a group's digits. The bytes of a lane are next to each other.
    const int stride = num_blocks * BLOCK + X_PADDING, num_groups = num_blocks * GROUPS;
    const int num_chunks = num_blocks * (BLOCK / 8);
    char* digits = shared + WARPS * STAGES * SLOT_BYTES;
    float* sums_of_x = (float*)(digits + 3 * ROWS * stride);
    End* ends = (End*)(sums_of_x + (LOWS ? 4 * ROWS * num_groups : 0));
    float* steps = (float*)(ends + own_tiles * ROWS * 16);
    float* squares = steps + ROWS * num_blocks;
    float* partial = squares + ROWS * WARPS;
    for (int i = threadIdx.x; i < PARTS * own_tiles * WARPS * ROWS * 16; i += THREADS)
        partial[i] = 0;

    // One product of each thread, or none.
    const int item = threadIdx.x, own_tile = item / (ROWS * 16), row = item / 16 % ROWS;
    const int output = (first_tile + own_tile) * 16 + item % 16;
    const bool has_end = own_tile < own_tiles, exists = has_end && output < given.num_out;
    End end;
    end.added = exists && given.bias ? wide(given.bias[output]) : 0.0f;
    end.target = nullptr;
    int tile = start / num_blocks, block = start % num_blocks;
    uint4 gain = make_uint4(0, 0, 0, 0), ahead[ROWS];
    if (given.gain && threadIdx.x * 8 < given.num_in) gain = ((const uint4*)given.gain)[threadIdx.x];
    keep_here(tile, block);
    if (given.level > 0) wait_for_predecessor();
    if (given.level == 1) launch_dependents();

#pragma unroll
    for (int n = 0; n < ROWS; n++) {
        ahead[n] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x * 8 < given.num_in)
            ahead[n] = ((const uint4*)(given.x + (long long)n * given.num_in))[threadIdx.x];
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
    float all_squares[ROWS] = {};
    for (int chunk = threadIdx.x; chunk - lane < num_chunks; chunk += THREADS) {
        uint4 next[ROWS], next_gain = make_uint4(0, 0, 0, 0);
        const bool has_next = (chunk + THREADS) * 8 < given.num_in;
        if (has_next && given.gain) next_gain = ((const uint4*)given.gain)[chunk + THREADS];
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            next[n] = make_uint4(0, 0, 0, 0);
            if (has_next)
                next[n] = ((const uint4*)(given.x + (long long)n * given.num_in))[chunk + THREADS];
            float values[8], greatest = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const u32 pair = ((const u32*)&ahead[n])[k / 2], other = ((const u32*)&gain)[k / 2];
                values[k] = k % 2 ? high(pair) : low(pair);
                if (given.gain) {
                    all_squares[n] += values[k] * values[k];
                    values[k] *= k % 2 ? high(other) : low(other);
                }
                greatest = maximum(greatest, fabsf(values[k]));
            }
#pragma unroll
            for (int step = 1; step < BLOCK / 8; step *= 2)
                greatest = maximum(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
            // Its power of two, at least 2^-100, becomes 2^21. Infinity and what is no number become
            // infinity.
            const u32 bits = __float_as_uint(greatest) & 0x7f800000u;
            const u32 power = bits > (27u << 23) ? bits : 27u << 23;
            const float factor = __uint_as_float((275u << 23) - power);
            u32 found[8];  // digits of each number as bytes, each 128 more, the lowest first
#pragma unroll
            for (int k = 0; k < 8; k++)
                found[k] = __float_as_uint(__fmaf_rn(values[k], factor, MAGIC)) +
                           (0x808080u - MAGIC_BITS);
            // In the order in which a word holds the inputs.
            uint2 rows[3];
#if BITS == 4
            transpose(rows[0].x, rows[1].x, rows[2].x, found[0], found[4], found[1], found[5]);
            transpose(rows[0].y, rows[1].y, rows[2].y, found[2], found[6], found[3], found[7]);
            const int unit = chunk / 4 % 4, own = chunk % 4 * 32 + place_of(unit) * 8;
#else
            transpose(rows[0].x, rows[1].x, rows[2].x, found[0], found[2], found[1], found[3]);
            transpose(rows[0].y, rows[1].y, rows[2].y, found[4], found[6], found[5], found[7]);
            const int unit = chunk / 2 % 4, own = chunk % 2 * 32 + place_of(unit) * 4;
#endif
            const int of_block = chunk / (BLOCK / 8);
#pragma unroll
            for (int d = 0; d < 3; d++) {
                rows[d].x ^= 0x80808080u;
                rows[d].y ^= 0x80808080u;
                if (chunk < num_chunks) {
                    char* target = digits + (3 * n + d) * stride + of_block * BLOCK + own;
#if BITS == 4
                    *(uint2*)target = rows[d];
#else
                    *(u32*)target = rows[d].x;
                    *(u32*)(target + 16) = rows[d].y;
#endif
                }
                if (LOWS) {
                    int sum = __dp4a((int)rows[d].x, 0x01010101, 0);
                    sum = __dp4a((int)rows[d].y, 0x01010101, sum);
#pragma unroll
                    for (int step = 1; step < BLOCK / 8 / GROUPS; step *= 2)
                        sum += __shfl_xor_sync(0xffffffffu, sum, step);
                    const int group = chunk / (BLOCK / 8 / GROUPS);
                    if (chunk < num_chunks && chunk % (BLOCK / 8 / GROUPS) == 0)
                        sums_of_x[(group * ROWS + n) * 4 + d] = (float)sum;
                }
            }
            if (chunk < num_chunks && chunk % (BLOCK / 8) == 0)
                steps[n * num_blocks + of_block] = __uint_as_float(power) * (1.0f / (1 << 21));
            ahead[n] = next[n];
        }
        gain = next_gain;
    }
    if (given.gain) {
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            float square = all_squares[n];
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
    if (!REFILLS) wait_copies<0>();
    __syncthreads();

    // Lanes of columns without a digit, or with one of the other group, multiply with 0.
    const bool has_digit = g % 4 < 3 && (PAIRED || g / 4 < ROWS);
    const char* own_digits =
        digits + (has_digit ? (PAIRED ? 0 : 3 * (g / 4)) + g % 4 : 0) * stride + t * UNIT;
    const float* own_steps = steps + (ROWS == 2 ? t / 2 : 0) * num_blocks;
    const int own_scales = 2 * HALF_BYTES + g * OWN_SCALE_BYTES - lane * 16;
    const u32 bytes_of_128 = given.bytes_of_128;
    u32 x[4][UNIT / 16] = {};
    float totals[4] = {0, 0, 0, 0};
    int slot = 0;
    for (int i = start; i < stop; i++) {
        if (REFILLS) {
            wait_copies<STAGES - 1>();
            __syncwarp();
        }
        const char* found = slots + slot;
        const uint4 first = *(const uint4*)found;
        const uint4 second = *(const uint4*)(found + HALF_BYTES);
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (has_digit && (!PAIRED || g / 4 == half)) {
                u32 words[UNIT / 8];
                const char* own = own_digits + block * BLOCK + half * (UNIT / 2);
#if BITS == 4
                *(uint4*)words = *(const uint4*)own;
#else
                *(uint2*)words = *(const uint2*)own;
#endif
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (place_of(c) / 2 == half)
#pragma unroll
                        for (int k = 0; k < UNIT / 16; k++)
                            x[c][k] = words[place_of(c) % 2 * (UNIT / 16) + k];
            }
        float products[4] = {0, 0, 0, 0};
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            // The bits of a number of float32 whose lowest bit is 1: the sums need no conversion.
            int sums[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
            for (int c = set * (4 / SETS); c < (set + 1) * (4 / SETS); c++) {
                const u32 a = ((const u32*)&first)[c], b = ((const u32*)&second)[c];
#if BITS == 4
                u32 words[4];
                bytes_of(words[0], words[2], a, bytes_of_128);
                bytes_of(words[1], words[3], b, bytes_of_128);
                multiply_32(sums, words[0], words[1], words[2], words[3], x[c][0], x[c][1]);
#else
                multiply_16(sums, a ^ 0x80808080u, b ^ 0x80808080u, x[c][0]);
#endif
            }
            const int group = PAIRED ? 2 * set + t / 2 : set;
            const char* scales = found + own_scales;
            const float2 scale = scales_of(scales, group);
#pragma unroll
            for (int k = 0; k < 4; k++)
                products[k] += (k < 2 ? scale.x : scale.y) * (__int_as_float(sums[k]) - MAGIC);
            if (LOWS) {
                const float2 least = scales_of(scales + SCALE_BYTES, group);
                const int column = ROWS == 2 ? 2 * t : 2 * (t % 2);
                const float2 sum =
                    *(const float2*)(sums_of_x + (block * GROUPS + group) * ROWS * 4 + column);
#pragma unroll
                for (int k = 0; k < 4; k++)
                    products[k] += (k < 2 ? least.x : least.y) * (k % 2 ? sum.y : sum.x);
            }
        }
        const float step = own_steps[block];
#pragma unroll
        for (int k = 0; k < 4; k++) totals[k] += step * products[k];
        if (REFILLS) {
            __syncwarp();
            copy_next(source, first_slot + slot, skipped, lane);
        }
        slot = REFILLS && slot == (STAGES - 1) * SLOT_BYTES ? 0 : slot + SLOT_BYTES;
        if (++block == num_blocks || i + 1 == stop) {
            // Lanes of even t have the first two digits of a row, the next ones the third.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float high_digits = totals[2 * half], next = totals[2 * half + 1];
                float y = t % 2 ? high_digits : high_digits * 65536.0f + next * 256.0f;
                if (BITS == 4 && CENTRED) y *= 0.0625f;
                y += __shfl_xor_sync(0xffffffffu, y, 1);
                if (PAIRED) y += __shfl_xor_sync(0xffffffffu, y, 2);
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
#pragma unroll
        for (int other = 0; other < WARPS; other++) products[part] += sums[other * ROWS * 16];
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
