// A CUDA device on a CPU: threads of a program are fibers, which change places where they wait for
// others. The functions of llm/kernels/instructions.cu are written by the PTX manual. Copies happen
// at once, and memory of a program is not a number before it is written. Headers of C only: those of
// C++ take longer than a kernel to compile.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __expf expf

template <class T>
static T min(T a, T b) { return b < a ? b : a; }

typedef unsigned int u32;
typedef unsigned short u16;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct Place { int x, y; };

const int MOST_BYTES = 227 * 1024, MOST_WARPS = 32, STACK_BYTES = 1 << 16;
alignas(128) char shared[MOST_BYTES];

struct Fiber {
    ucontext_t context;
    char* stack;
    bool has_ended;
};
struct Barrier { int waiting, generation, threads; };

static Fiber* fibers;
static ucontext_t scheduler;
static int current;
static Place blockIdx, gridDim;
static struct { struct { operator int() const { return current; } } x; } threadIdx;
static Barrier of_warp[MOST_WARPS], of_program;
static u32 registers[MOST_WARPS][32][6];

static void wait_at(Barrier& barrier) {
    const int own = barrier.generation;
    barrier.waiting++;
    while (barrier.generation == own) {
        if (barrier.waiting >= barrier.threads) {
            barrier.waiting = 0;
            barrier.generation++;
        } else {
            swapcontext(&fibers[current].context, &scheduler);
        }
    }
}

static void __syncthreads() { wait_at(of_program); }
static void __syncwarp() { wait_at(of_warp[current / 32]); }

template <class T>
static T __shfl_sync(u32, T value, int lane) {
    auto& warp = registers[current / 32];
    memcpy(warp[current % 32], &value, 4);
    __syncwarp();
    T found;
    memcpy(&found, warp[lane], 4);
    __syncwarp();
    return found;
}

template <class T>
static T __shfl_xor_sync(u32 mask, T value, int step) {
    return __shfl_sync(mask, value, current % 32 ^ step);
}

static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fadd_rn(float a, float b) { return a + b; }
static int byte_of(u32 word, int index) { return word >> 8 * index & 255; }
static int signed_byte_of(u32 word, int index) { return (int8_t)byte_of(word, index); }

template <class To, class From>
static To bits_as(From from) {
    To found;
    memcpy(&found, &from, 4);
    return found;
}
static float __uint_as_float(u32 bits) { return bits_as<float>(bits); }
static u32 __float_as_uint(float x) { return bits_as<u32>(x); }
static float __int_as_float(int bits) { return bits_as<float>(bits); }

static int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) sum += signed_byte_of(a, i) * signed_byte_of(b, i);
    return sum;
}

static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        const int index = selector >> 4 * i & 7;
        found |= (u32)byte_of(index < 4 ? a : b, index % 4) << 8 * i;
    }
    return found;
}

static u32 shared_address(const void* pointer) { return (u32)((const char*)pointer - shared); }

static void copy_some(u32 target, const void* source, int bytes, bool exists) {
    if (target % bytes || (uintptr_t)source % bytes || target + bytes > MOST_BYTES) {
        fprintf(stderr, "a copy of %d bytes to %u\n", bytes, target);
        abort();
    }
    if (exists) memcpy(shared + target, source, bytes);
    else memset(shared + target, 0, bytes);
}

static void copy16(u32 target, const void* source) { copy_some(target, source, 16, true); }
static void copy16_if(bool exists, u32 target, const void* source) {
    if (exists) copy16(target, source);
}
static void commit() {}
template <int N>
static void wait_copies() {}
static void launch_dependents() {}
static void wait_for_predecessor() {}
static void keep_here(int&, int&) {}

static u32 to_bfloat16(float x) {
    const u32 bits = bits_as<u32>(x);
    if (isnan(x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 narrow(float first, float second) { return to_bfloat16(second) << 16 | to_bfloat16(first); }
static float number_of(u32 pair, int index) {
    return __uint_as_float(index ? pair & 0xffff0000u : pair << 16);
}
static float of_float16(u32 bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size =
        exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return bits >> 15 & 1 ? -size : size;
}
static float2 halves(u32 pair) { return {of_float16(pair & 0xffff), of_float16(pair >> 16)}; }
static float maximum(float a, float b) { return isnan(a) || a > b ? a : b; }
static u32 lowest_of_halves(u32 word, u32 added) { return (word & 0x000f000fu) | added; }
static u32 add_pairs(u32 pair, u32 other) {
    return narrow(number_of(pair, 0) + number_of(other, 0), number_of(pair, 1) + number_of(other, 1));
}

// A tensor core's product of 16 rows and eight columns, `depth` numbers deep, `PER` in a register:
// `product(a, b, index)` of two registers' numbers.
template <int PER, class T, class F>
static void multiply_tile(T* sums, const u32* a, const u32* b, int depth, F product) {
    auto& warp = registers[current / 32];
    const int lane = current % 32, group = lane / 4, thread = lane % 4, run = 4 * PER;
    memcpy(warp[lane], a, 8 * depth / run);
    memcpy(warp[lane] + 4, b, 4 * depth / run);
    __syncwarp();
    T found[4];
    for (int k = 0; k < 4; k++) {
        const int row = group + k / 2 * 8, column = 2 * thread + k % 2;
        double sum = sums[k];
        for (int i = 0; i < depth; i++) {
            const int holder = i % run / PER, part = i / run;
            const u32 left = warp[row % 8 * 4 + holder][2 * part + row / 8];
            sum += product(left, warp[column * 4 + holder][4 + part], i % PER);
        }
        found[k] = (T)sum;
    }
    __syncwarp();
    memcpy(sums, found, sizeof found);
}

static double byte_product(u32 a, u32 b, int i) {
    return signed_byte_of(a, i) * signed_byte_of(b, i);
}
static double pair_product(u32 a, u32 b, int i) { return (double)number_of(a, i) * number_of(b, i); }

static void multiply(float* sums, const u32* a, const u32* b, int next, u32 x, u32 y) {
    const u32 left[4] = {a[0], b[0], a[next], b[next]}, right[2] = {x, y};
    multiply_tile<2>(sums, left, right, 16, pair_product);
}
static void multiply_32(int* sums, u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
    const u32 left[4] = {a, b, c, d}, right[2] = {x, y};
    multiply_tile<4>(sums, left, right, 32, byte_product);
}
static void multiply_16(int* sums, u32 a, u32 b, u32 x) {
    const u32 left[2] = {a, b};
    multiply_tile<4>(sums, left, &x, 16, byte_product);
}

struct Arguments;
static void run_thread(const Arguments& given);
static const Arguments* arguments;

static void begin() {
    run_thread(*arguments);
    fibers[current].has_ended = true;
    of_warp[current / 32].threads--;
    of_program.threads--;
    swapcontext(&fibers[current].context, &scheduler);
}

static void run_program(int num_threads) {
    memset(shared, 0xff, sizeof shared);
    for (Barrier& barrier : of_warp) barrier = {0, 0, 32};
    of_program = {0, 0, num_threads};
    for (int i = 0; i < num_threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.has_ended = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, begin, 0);
    }
    while (of_program.threads)
        for (current = 0; current < num_threads; current++)
            if (!fibers[current].has_ended) swapcontext(&scheduler, &fibers[current].context);
}

static bool is_inside(int bytes) {
    for (int i = bytes; i < MOST_BYTES; i++)
        if ((unsigned char)shared[i] != 0xff) return false;
    return true;
}

// Run all programs, and return whether none wrote beyond its shared memory.
extern "C" int launch(int width, int height, int num_threads, int bytes, const Arguments* given) {
    arguments = given;
    gridDim = {width, height};
    fibers = (Fiber*)malloc(num_threads * sizeof(Fiber));
    for (int i = 0; i < num_threads; i++) fibers[i].stack = (char*)malloc(STACK_BYTES);
    bool are_inside = true;
    for (blockIdx.y = 0; blockIdx.y < height; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < width; blockIdx.x++) {
            run_program(num_threads);
            are_inside &= is_inside(bytes);
        }
    for (int i = 0; i < num_threads; i++) free(fibers[i].stack);
    free(fibers);
    return are_inside;
}
