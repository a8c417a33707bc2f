// Functions that generated kernels call, for one element and for 16 at once.
//
// philox_uniform: Philox 4x32-10 (Salmon et al., SC'11). `flat` numbers an element of a tensor seen
// as [samples, elements]; the draw is word e % 4 of the block with counter
// (e / 4, first + s, site, step) and key `seed`, as a multiple of 2^-24 in [0, 1).

#define PHILOX_UNIFORM(FLOAT, UINT, INT, LONG)                                                   \
    static inline FLOAT __attribute__((overloadable)) philox_uniform(                            \
        const LONG flat, const long elements, const uint site,                                   \
        const LONG seed, const LONG step, const LONG first)                                      \
    {                                                                                            \
        const UINT at = convert_##UINT(flat);                                                    \
        const UINT sample = at / (UINT)((uint)elements);                                         \
        const UINT e = at - sample * (UINT)((uint)elements);                                     \
        UINT c0 = e / (UINT)(4u);                                                                \
        UINT c1 = convert_##UINT(first & (LONG)(0xFFFFFFFFL)) + sample;                          \
        UINT c2 = (UINT)(site);                                                                  \
        UINT c3 = convert_##UINT(step & (LONG)(0xFFFFFFFFL));                                    \
        UINT k0 = convert_##UINT(seed & (LONG)(0xFFFFFFFFL));                                    \
        UINT k1 = convert_##UINT((seed >> (LONG)(32)) & (LONG)(0xFFFFFFFFL));                    \
        for (int round = 0; round < 10; ++round) {                                               \
            const UINT high0 = mul_hi((UINT)(0xD2511F53u), c0), low0 = (UINT)(0xD2511F53u) * c0; \
            const UINT high1 = mul_hi((UINT)(0xCD9E8D57u), c2), low1 = (UINT)(0xCD9E8D57u) * c2; \
            c0 = high1 ^ c1 ^ k0;                                                                \
            c1 = low1;                                                                           \
            c2 = high0 ^ c3 ^ k1;                                                                \
            c3 = low0;                                                                           \
            k0 += (UINT)(0x9E3779B9u);                                                           \
            k1 += (UINT)(0xBB67AE85u);                                                           \
        }                                                                                        \
        const INT word = convert_##INT(e & (UINT)(3u));                                          \
        UINT drawn = select(c0, c1, convert_##INT(word == (INT)(1)));                            \
        drawn = select(drawn, c2, convert_##INT(word == (INT)(2)));                              \
        drawn = select(drawn, c3, convert_##INT(word == (INT)(3)));                              \
        return convert_##FLOAT(drawn >> (UINT)(8u)) * (FLOAT)(5.9604644775390625e-8f);           \
    }

PHILOX_UNIFORM(float, uint, int, long)
PHILOX_UNIFORM(float16, uint16, int16, long16)
