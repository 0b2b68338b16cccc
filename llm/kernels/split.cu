// Products of 3 to 64 rows of x with a matrix of bfloat16, on tensor cores;
// llm/kernels/split_products.py compiles and launches them.
//
// Given: ROWS of x (8 to 64), TILES of 16 rows of the matrix and CHUNKS of CHUNK inputs (a multiple
// of 64) of a program, GROUPS of its warps that share the rows of x, STAGES of chunks of x in
// flight, and PARTS (2: gate and up). With SQUARES a row of x is divided by the root of so many sums
// of squares. With SPLITS a cluster of so many programs adds its products to a residual.
//
// A program copies its part of the matrix before x is there: all of it fits into shared memory. So
// the matrix is on its way while the kernels before run.
//
// Lane 4 g + t reads 16 bytes at once, the inputs 8 t to 8 t + 7 of 32, of row g of x and of the
// rows g and g + 8 of a tile. The tensor cores' order of inputs is another, but the same for both.
// With gate and up these are rows of gate and of up, so that a lane has both products of an output.

#define THREADS (32 * TILES * GROUPS)
#define UNITS (CHUNK / 8)  // of 16 bytes
#define LINES (16 * TILES)
#define OWN (ROWS / 8 / GROUPS)  // tiles of eight rows of a warp

#define SHARE ((ROWS + SPLITS - 1) / SPLITS)  // rows that a program of a cluster adds
#define FOURS (LINES / 4)
#define TURNS ((SHARE * FOURS + THREADS - 1) / THREADS)  // of a program's threads

struct Arguments {
    const u16* x;  // [num_rows, num_in]
    const u16* weight;  // [PARTS * num_out, num_in]
    void* out;  // float32 [parts of the inputs, num_rows, num_out], else bfloat16
    const float* squares;  // [num_rows, SQUARES]
    u16* residual;  // [num_rows, num_out]
    const float* gain;  // [num_out]: `out` is the new residual times it
    float* new_squares;  // [num_rows, gridDim.x] sums of squares of the new residual
    long long part_size;  // of the results of a part of the inputs
    int num_rows, num_out, num_in, row_size;
    float epsilon;
    int level;  // of the launch
};

__device__ __forceinline__ float number(u32 pair, int index) {
    return __uint_as_float(index ? pair & 0xffff0000u : pair << 16);
}

// Offset of 16 bytes in a chunk: rows next to each other lie in different banks.
__device__ __forceinline__ int place(int line, int unit) {
    return (line * UNITS + (unit ^ (line & 1) << 2)) * 16;
}

// Place of a sum in shared memory: rows of a lane and its neighbours lie in different banks.
__device__ __forceinline__ int spot(int row, int output) {
    return row * LINES + (output ^ ((row & 6) << 2 & LINES - 1));
}

extern "C" __global__ void __launch_bounds__(THREADS) split(Arguments given) {
    extern __shared__ __align__(128) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile = warp % TILES, first_row = warp / TILES * OWN * 8;
    const int first_out = blockIdx.x * (LINES / PARTS), first_in = blockIdx.y * (CHUNKS * CHUNK);
    if (given.level == 2) launch_dependents();

    const u32 matrix = shared_address(shared), rows = matrix + CHUNKS * LINES * CHUNK * 2;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll 8
        for (int i = threadIdx.x; i < LINES * UNITS; i += THREADS) {
            const int line = i / UNITS, unit = i % UNITS, input = first_in + chunk * CHUNK + unit * 8;
            const int output = first_out + (PARTS == 2 ? line / 16 * 8 + line % 8 : line);
            const bool exists = output < given.num_out && input < given.num_in;
            const long long source = output + (PARTS == 2 && line / 8 % 2 ? given.num_out : 0);
            copy_some(matrix + chunk * (LINES * CHUNK * 2) + place(line, unit),
                      given.weight + (exists ? source * given.num_in + input : 0), 16, exists);
        }
    }
#if SPLITS
    // Rows and outputs of a thread, four at a time, which it adds to the residual.
    const int own_row = blockIdx.y * SHARE + threadIdx.x / FOURS, next_row = THREADS / FOURS;
    const int own_out = threadIdx.x % FOURS * 4, column = first_out + own_out;
    const int end = min(given.num_rows, ((int)blockIdx.y + 1) * SHARE);
    const bool has_column = column < given.num_out;
    float4 gain = {0.0f, 0.0f, 0.0f, 0.0f};
    if (has_column) gain = *(const float4*)(given.gain + column);
#endif
    if (given.level > 0) wait_for_predecessor();
    if (given.level == 1) launch_dependents();

    auto load_rows = [&](int chunk) {
        if (chunk < CHUNKS) {
            const u32 slot = rows + chunk % STAGES * (ROWS * CHUNK * 2);
#pragma unroll 8
            for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
                const int row = i / UNITS, unit = i % UNITS, input = first_in + chunk * CHUNK + unit * 8;
                const bool exists = row < given.num_rows && input < given.num_in;
                copy_some(slot + place(row, unit),
                          given.x + (exists ? (long long)row * given.num_in + input : 0), 16, exists);
            }
        }
        commit();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) load_rows(stage);

#if SQUARES
    float* factors = (float*)(shared + (CHUNKS * LINES + (STAGES < CHUNKS ? STAGES : CHUNKS) * ROWS) * CHUNK * 2);
    for (int row = threadIdx.x; row < given.num_rows; row += THREADS) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < SQUARES; i++) square += given.squares[row * SQUARES + i];
        factors[row] = rsqrtf(square + given.epsilon);
    }
#endif
#if SPLITS
    uint2 old[TURNS] = {};
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int row = own_row + turn * next_row;
        if (has_column && row < end)
            old[turn] = *(const uint2*)(given.residual + (long long)row * given.num_out + column);
    }
#endif
    float sums[OWN][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        load_rows(chunk + STAGES - 1);
        const char* left = shared + chunk * (LINES * CHUNK * 2);
        const char* right = shared + CHUNKS * LINES * CHUNK * 2 + chunk % STAGES * (ROWS * CHUNK * 2);
#pragma unroll
        for (int unit = t; unit < UNITS; unit += 4) {
            const uint4 first = *(const uint4*)(left + place(tile * 16 + g, unit));
            const uint4 second = *(const uint4*)(left + place(tile * 16 + 8 + g, unit));
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                const uint4 x = *(const uint4*)(right + place(first_row + n * 8 + g, unit));
                multiply(sums[n], &first.x, &second.x, 1, x.x, x.y);
                multiply(sums[n], &first.z, &second.z, 1, x.z, x.w);
            }
        }
    }

#if SPLITS
    __syncthreads();
    float* totals = (float*)shared;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            totals[spot(first_row + n * 8 + 2 * t + k % 2, tile * 16 + k / 2 * 8 + g)] = sums[n][k];
    }
    wait_for_cluster();
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int row = own_row + turn * next_row;
        const bool exists = has_column && row < end;
        float square = 0.0f;
        if (exists) {
            float4 parts[SPLITS];
            const u32 address = shared_address(totals + spot(row, own_out));
#pragma unroll
            for (int part = 0; part < SPLITS; part++) parts[part] = load_from(part, address);
            float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int part = 0; part < SPLITS; part++) {
                sum.x += parts[part].x;
                sum.y += parts[part].y;
                sum.z += parts[part].z;
                sum.w += parts[part].w;
            }
            uint2 found, scaled;
            found.x = narrow(number(old[turn].x, 0) + sum.x, number(old[turn].x, 1) + sum.y);
            found.y = narrow(number(old[turn].y, 0) + sum.z, number(old[turn].y, 1) + sum.w);
            const float a = number(found.x, 0), b = number(found.x, 1);
            const float c = number(found.y, 0), d = number(found.y, 1);
            scaled.x = narrow(a * gain.x, b * gain.y);
            scaled.y = narrow(c * gain.z, d * gain.w);
            const long long target = (long long)row * given.num_out + column;
            *(uint2*)(given.residual + target) = found;
            *(uint2*)((u16*)given.out + target) = scaled;
            square = a * a + b * b + c * c + d * d;
        }
#pragma unroll
        for (int step = 1; step < FOURS; step *= 2) square += __shfl_xor_sync(0xffffffffu, square, step);
        if (exists && own_out == 0) given.new_squares[row * gridDim.x + blockIdx.x] = square;
    }
    wait_for_cluster();  // or another program reads what does not exist any more
#else
    const int output = first_out + tile * (16 / PARTS) + g;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = first_row + n * 8 + 2 * t + k;
            if (row >= given.num_rows) continue;
#if SQUARES
            const float factor = factors[row];
#else
            const float factor = 1.0f;
#endif
            const long long target = blockIdx.y * given.part_size + (long long)row * given.row_size + output;
#if PARTS == 2
            const float gate = sums[n][k] * factor, up = sums[n][2 + k] * factor;
            if (output < given.num_out)
                ((u16*)given.out)[target] = (u16)narrow(gate / (1.0f + __expf(-gate)) * up, 0.0f);
#else
            if (output < given.num_out) ((float*)given.out)[target] = sums[n][k] * factor;
            if (output + 8 < given.num_out) ((float*)given.out)[target + 8] = sums[n][2 + k] * factor;
#endif
        }
    }
#endif
}
