// x times the normal distribution function, for one element and for 16 at once.
//
// It is max(x, 0) - t tail(t), where t = |x| and tail(t), the probability of more than t, is 2^Q(t).
// The polynomial Q has the least error in t tail(t). The error is at most 1.2e-7 where the value is
// below 1, else 1.2e-7 of the value. Below -9.5 it is -2e-17. Doubles use the built-in function.

#define GELU(FLOAT, UINT)                                                                         \
    static inline FLOAT __attribute__((overloadable)) gelu(const FLOAT x)                         \
    {                                                                                             \
        const FLOAT size = fabs(x), t = select(size, (FLOAT)(9.5f), size > (FLOAT)(9.5f));        \
        FLOAT q = fma((FLOAT)(5.23874405e-6f), t, (FLOAT)(-2.32536495e-5f));                      \
        q = fma(q, t, (FLOAT)(-5.31697413e-4f));                                                  \
        q = fma(q, t, (FLOAT)(7.57966749e-3f));                                                   \
        q = fma(q, t, (FLOAT)(-5.28526977e-2f));                                                  \
        q = fma(q, t, (FLOAT)(-0.459091574f));                                                    \
        q = fma(q, t, (FLOAT)(-1.15111852f));                                                     \
        q = fma(q, t, (FLOAT)(-1.0f));                                                            \
        /* 1.5 * 2^23: the low bits of the sum are the nearest integer. */                        \
        const FLOAT shifted = q + (FLOAT)(12582912.0f), f = q - (shifted - (FLOAT)(12582912.0f)); \
        FLOAT p = fma((FLOAT)(1.32645911e-3f), f, (FLOAT)(9.67161916e-3f));                       \
        p = fma(p, f, (FLOAT)(5.55073507e-2f));                                                   \
        p = fma(p, f, (FLOAT)(0.240222409f));                                                     \
        p = fma(p, f, (FLOAT)(0.693147004f));                                                     \
        p = fma(p, f, (FLOAT)(1.0f));                                                             \
        const FLOAT tail = as_##FLOAT(as_##UINT(p) + (as_##UINT(shifted) << 23));                 \
        return fma(-t, tail, select(x, (FLOAT)(0.0f), x < (FLOAT)(0.0f)));                        \
    }

GELU(float, uint)
GELU(float16, uint16)
#ifdef cl_khr_fp64
static inline double __attribute__((overloadable)) gelu(const double x)
{
    return x * erfc(x * -0.70710678118654752) * 0.5;
}
static inline double16 __attribute__((overloadable)) gelu(const double16 x)
{
    return x * erfc(x * -0.70710678118654752) * 0.5;
}
#endif
