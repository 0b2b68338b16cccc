// PTX instructions as functions, the first part of every source.

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void copy16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy16_if(bool exists, u32 target, const void* source) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(
            target), "l"(source), "r"((int)exists) : "memory");
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

// Two numbers that are computed here, not where they are first read.
__device__ __forceinline__ void keep_here(int& first, int& second) {
    asm volatile("" : "+r"(first), "+r"(second)::"memory");
}

// Two numbers rounded to bfloat16, the first in the lower half.
__device__ __forceinline__ u32 narrow(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Two numbers of float16.
__device__ __forceinline__ float2 halves(u32 pair) {
    float2 found;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(found.x), "=f"(found.y) : "r"(pair));
    return found;
}

// 16 outputs with 16 inputs and eight columns of bfloat16; `a` and `b` are the pairs of the outputs g
// and g + 8, and those at `next`.
__device__ __forceinline__ void multiply(
    float* sums, const u32* a, const u32* b, int next, u32 x, u32 y) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(b[0]), "r"(a[next]), "r"(b[next]), "r"(x), "r"(y));
}

// 16 outputs with 32 (16) inputs and eight columns of signed bytes.
__device__ __forceinline__ void multiply_32(int* sums, u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

__device__ __forceinline__ void multiply_16(int* sums, u32 a, u32 b, u32 x) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a), "r"(b), "r"(x));
}

// The greater number; not a number if one is not.
__device__ __forceinline__ float maximum(float a, float b) {
    float found;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
    return found;
}

// The lowest four bits of both halves, with others added.
__device__ __forceinline__ u32 lowest_of_halves(u32 word, u32 added) {
    u32 found;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(found) : "r"(word), "r"(added));
    return found;
}

// Sums of two pairs of bfloat16.
__device__ __forceinline__ u32 add_pairs(u32 pair, u32 other) {
    u32 found;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(found) : "r"(pair), "r"(0x3f803f80u), "r"(other));
    return found;
}
