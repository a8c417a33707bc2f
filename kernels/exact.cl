// Functions that PoCL computes correctly for one element, but not for 16 at once.
//
// If one lane exceeds LARGE, PoCL's sin, cos and tan compute all lanes by an algorithm that is wrong for
// small numbers: sin(1e-8) is 0.01 in a vector with sin(3e38). PoCL's pow and fmod of doubles give wrong
// lanes in some vectors.

#define LARGE 10000.0f

// Each macro pastes `exact_##NAME` itself. As an argument of another macro, NAME would be expanded, since
// PoCL's headers define `pow` as a macro. Calls for doubles would then reach the function for floats.

#define OF_ONE(NAME, T)                                                                           \
    static inline T __attribute__((overloadable)) exact_##NAME(const T x) { return NAME(x); }

#define OF_TWO(NAME, T)                                                                           \
    static inline T __attribute__((overloadable)) exact_##NAME(const T x, const T y)              \
    {                                                                                             \
        return NAME(x, y);                                                                        \
    }

#define ONE_BY_ONE(T, CALL)                                                                       \
    T##16 each = x;                                                                               \
    T *lanes = (T *)&each;                                                                        \
    for (int lane = 0; lane < 16; ++lane) lanes[lane] = CALL;                                     \
    return each;

#define OF_16_FLOATS(NAME)                                                                        \
    static inline float16 __attribute__((overloadable)) exact_##NAME(const float16 x)             \
    {                                                                                             \
        if (!any(fabs(x) > (float16)(LARGE))) return NAME(x);                                     \
        ONE_BY_ONE(float, NAME(lanes[lane]))                                                      \
    }

OF_ONE(sin, float)
OF_16_FLOATS(sin)
OF_ONE(cos, float)
OF_16_FLOATS(cos)
OF_ONE(tan, float)
OF_16_FLOATS(tan)
OF_TWO(pow, float)
OF_TWO(pow, float16)
OF_TWO(fmod, float)
OF_TWO(fmod, float16)

#ifdef cl_khr_fp64
#define OF_16_DOUBLES(NAME)                                                                       \
    static inline double16 __attribute__((overloadable))                                          \
    exact_##NAME(const double16 x, const double16 y)                                              \
    {                                                                                             \
        const double *others = (const double *)&y;                                                \
        ONE_BY_ONE(double, NAME(lanes[lane], others[lane]))                                       \
    }

OF_ONE(sin, double)
OF_ONE(sin, double16)
OF_ONE(cos, double)
OF_ONE(cos, double16)
OF_ONE(tan, double)
OF_ONE(tan, double16)
OF_TWO(pow, double)
OF_16_DOUBLES(pow)
OF_TWO(fmod, double)
OF_16_DOUBLES(fmod)
#endif
