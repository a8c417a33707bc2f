// A vstore16 that is one store. PoCL compiles vstore16 to three stores: a load of the same floats then
// waits for all three, and kernels with much arithmetic take longer. Kernels that only copy are faster
// with three.

typedef float16 __attribute__((aligned(4))) float16_anywhere;

static inline void __attribute__((overloadable)) vstore16_at_once(const float16 value, __global float* p)
{
    *(__global float16_anywhere*)p = value;
}
