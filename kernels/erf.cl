// The error function, for one element and for 16 at once: PoCL's own takes one at a time.
//
// Two polynomials, near zero and beyond: erf(x) = x + x * P(x^2) and 1 - exp(Q(x)). At most 2 ULP
// apart from the exact value in float; doubles use the built-in function.

#define EXACT_ERF(FLOAT, INT)                                                                     \
    static inline FLOAT __attribute__((overloadable)) exact_erf(const FLOAT x)                    \
    {                                                                                             \
        const FLOAT t = fabs(x), s = x * x;                                                       \
        FLOAT far = fma((FLOAT)(-1.72853470e-5f), t, (FLOAT)(3.83197126e-4f));                    \
        far = fma(far, s, fma((FLOAT)(-3.88396438e-3f), t, (FLOAT)(2.42546219e-2f)));             \
        far = fma(far, t, (FLOAT)(-1.06777877e-1f));                                              \
        far = fma(far, t, (FLOAT)(-6.34846687e-1f));                                              \
        far = fma(far, t, (FLOAT)(-1.28717512e-1f));                                              \
        far = copysign((FLOAT)(1.0f) - exp(fma(far, t, -t)), x);                                  \
        FLOAT near = fma((FLOAT)(-5.96761703e-4f), s, (FLOAT)(4.99119423e-3f));                   \
        near = fma(near, s, (FLOAT)(-2.67681349e-2f));                                            \
        near = fma(near, s, (FLOAT)(1.12819925e-1f));                                             \
        near = fma(near, s, (FLOAT)(-3.76125336e-1f));                                            \
        near = fma(near, s, (FLOAT)(1.28379166e-1f));                                             \
        return select(fma(near, x, x), far, convert_##INT(t > (FLOAT)(0.927734375f)));               \
    }

EXACT_ERF(float, int)
EXACT_ERF(float16, int16)
#ifdef cl_khr_fp64
static inline double __attribute__((overloadable)) exact_erf(const double x) { return erf(x); }
static inline double16 __attribute__((overloadable)) exact_erf(const double16 x) { return erf(x); }
#endif
