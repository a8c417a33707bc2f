// The exponential, for one element and for 16 at once: the runtimes' functions take longer.
//
// exp(x) = 2^n exp(r), with r = x - n ln 2 in two steps, and a polynomial for exp(r). The error is at
// most 1 ULP; infinity, 0, subnormal numbers and NaN are correct. The product with 2^n has two steps,
// since n can exceed the exponents of floats. Doubles use the built-in function.

#define EXACT_EXP(FLOAT, UINT)                                                                    \
    static inline FLOAT __attribute__((overloadable)) exact_exp(const FLOAT x)                    \
    {                                                                                             \
        const FLOAT above = select(x, (FLOAT)(-104.0f), x < (FLOAT)(-104.0f));                    \
        const FLOAT y = select(above, (FLOAT)(89.5f), above > (FLOAT)(89.5f));                    \
        /* 1.5 * 2^23: the low bits of the sum are the nearest integer. */                        \
        const FLOAT shifted = fma(y, (FLOAT)(1.44269502f), (FLOAT)(12582912.0f));                 \
        const FLOAT n = shifted - (FLOAT)(12582912.0f);                                           \
        const FLOAT near = fma(n, (FLOAT)(-0.693147182f), y);                                     \
        const FLOAT r = fma(n, (FLOAT)(1.90465430e-9f), near), s = r * r;                         \
        FLOAT p = fma((FLOAT)(8.368745e-3f), r, (FLOAT)(4.166839e-2f));                           \
        p = fma((FLOAT)(1.381454e-3f), s, p);                                                     \
        p = fma(p, s, fma((FLOAT)(0.16666521f), r, (FLOAT)(0.49999994f)));                        \
        p = (FLOAT)(1.0f) + fma(p, s, r);                                                         \
        const UINT bits = as_##UINT(shifted), half_bits = (bits >> 1) << 23;                      \
        const FLOAT half_scale = as_##FLOAT(half_bits + 0x3f800000u);                             \
        return p * half_scale * as_##FLOAT((bits << 23) - half_bits + 0x3f800000u);               \
    }

EXACT_EXP(float, uint)
EXACT_EXP(float16, uint16)
#ifdef cl_khr_fp64
static inline double __attribute__((overloadable)) exact_exp(const double x) { return exp(x); }
static inline double16 __attribute__((overloadable)) exact_exp(const double16 x) { return exp(x); }
#endif
