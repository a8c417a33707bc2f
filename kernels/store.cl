// A vstore16 that is one store. PoCL makes three of its own: a load of the same floats waits for all
// of them, and a kernel that computes much takes longer. One that only copies takes less with three.

typedef float16 __attribute__((aligned(4))) float16_anywhere;

static inline void __attribute__((overloadable)) vstore16_at_once(const float16 value, __global float* p)
{
    *(__global float16_anywhere*)p = value;
}
