// The error function, for one element and for 16 at once: PoCL's function takes one element at a time.
//
// Two polynomials: erf(x) is x + x * P(x^2) near zero, and 1 - exp(Q(x)) beyond. The error
// is at most 2 ULP in float; doubles use the built-in function. Needs exp.cl before it.
//
// Except for factors, the normal distribution function is erf(x) + 1, and its density is exp(-x^2).
// One exponential gives both: erf_plus_one is exp(-x^2) P(-x) for x < 0, else 2 - exp(-x^2) P(x).
// Its error is at most 3e-7, about an ULP of 2. P has degree 10.

#define EXACT_ERF(FLOAT, INT)                                                                     \
    static inline FLOAT __attribute__((overloadable)) exact_erf(const FLOAT x)                    \
    {                                                                                             \
        const FLOAT t = fabs(x), s = x * x;                                                       \
        FLOAT far = fma((FLOAT)(-1.72853470e-5f), t, (FLOAT)(3.83197126e-4f));                    \
        far = fma(far, s, fma((FLOAT)(-3.88396438e-3f), t, (FLOAT)(2.42546219e-2f)));             \
        far = fma(far, t, (FLOAT)(-1.06777877e-1f));                                              \
        far = fma(far, t, (FLOAT)(-6.34846687e-1f));                                              \
        far = fma(far, t, (FLOAT)(-1.28717512e-1f));                                              \
        far = copysign((FLOAT)(1.0f) - exact_exp(fma(far, t, -t)), x);                            \
        FLOAT near = fma((FLOAT)(-5.96761703e-4f), s, (FLOAT)(4.99119423e-3f));                   \
        near = fma(near, s, (FLOAT)(-2.67681349e-2f));                                            \
        near = fma(near, s, (FLOAT)(1.12819925e-1f));                                             \
        near = fma(near, s, (FLOAT)(-3.76125336e-1f));                                            \
        near = fma(near, s, (FLOAT)(1.28379166e-1f));                                             \
        return select(fma(near, x, x), far, convert_##INT(t > (FLOAT)(0.927734375f)));            \
    }

// exp(-x^2), computed as a power of 2; results below 2^-126 are 0.
#define EXP_MINUS_SQUARE(FLOAT, UINT)                                                             \
    static inline FLOAT __attribute__((overloadable)) exp_minus_square(const FLOAT x)             \
    {                                                                                             \
        const FLOAT exponent = x * x * (FLOAT)(-1.44269502f);                                     \
        const FLOAT y = select(exponent, (FLOAT)(-127.0f), exponent < (FLOAT)(-127.0f));          \
        /* 1.5 * 2^23 and the exponent's bias: the low bits of the sum are those of 2^n. */       \
        const FLOAT shifted = y + (FLOAT)(12583039.0f);                                           \
        const FLOAT f = y - (shifted - (FLOAT)(12583039.0f));                                     \
        FLOAT p = fma((FLOAT)(1.32645911e-3f), f, (FLOAT)(9.67161916e-3f));                       \
        p = fma(p, f, (FLOAT)(5.55073507e-2f));                                                   \
        p = fma(p, f, (FLOAT)(0.240222409f));                                                     \
        p = fma(p, f, (FLOAT)(0.693147004f));                                                     \
        p = fma(p, f, (FLOAT)(1.0f));                                                             \
        return p * as_##FLOAT(as_##UINT(shifted) << 23);                                          \
    }

#define ERF_PLUS_ONE(FLOAT)                                                                       \
    static inline FLOAT __attribute__((overloadable))                                             \
    erf_plus_one(const FLOAT x, const FLOAT power_x)                                              \
    {                                                                                             \
        const FLOAT size = fabs(x);                                                               \
        const FLOAT t = select(size, (FLOAT)(4.0f), size > (FLOAT)(4.0f));                        \
        FLOAT p = fma((FLOAT)(1.04428531e-4f), t, (FLOAT)(-1.59332727e-3f));                      \
        p = fma(p, t, (FLOAT)(1.08716562e-2f));                                                   \
        p = fma(p, t, (FLOAT)(-4.46807966e-2f));                                                  \
        p = fma(p, t, (FLOAT)(0.127030388f));                                                     \
        p = fma(p, t, (FLOAT)(-0.27508086f));                                                     \
        p = fma(p, t, (FLOAT)(0.489239186f));                                                     \
        p = fma(p, t, (FLOAT)(-0.749611259f));                                                    \
        p = fma(p, t, (FLOAT)(0.999667168f));                                                     \
        p = fma(p, t, (FLOAT)(-1.12836289f));                                                     \
        p = fma(p, t, (FLOAT)(0.999999881f));                                                     \
        const FLOAT tail = power_x * p;                                                           \
        return select(tail, (FLOAT)(2.0f) - tail, x > (FLOAT)(0.0f));                             \
    }

EXACT_ERF(float, int)
EXACT_ERF(float16, int16)
EXP_MINUS_SQUARE(float, uint)
EXP_MINUS_SQUARE(float16, uint16)
ERF_PLUS_ONE(float)
ERF_PLUS_ONE(float16)
#ifdef cl_khr_fp64
static inline double __attribute__((overloadable)) exact_erf(const double x) { return erf(x); }
static inline double16 __attribute__((overloadable)) exact_erf(const double16 x) { return erf(x); }
#define OF_DOUBLES(FLOAT)                                                                         \
    static inline FLOAT __attribute__((overloadable)) exp_minus_square(const FLOAT x)             \
    {                                                                                             \
        return exp(-x * x);                                                                       \
    }                                                                                             \
    static inline FLOAT __attribute__((overloadable))                                             \
    erf_plus_one(const FLOAT x, const FLOAT power_x)                                              \
    {                                                                                             \
        return erfc(-x);                                                                          \
    }

OF_DOUBLES(double)
OF_DOUBLES(double16)
#endif
