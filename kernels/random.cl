// Random numbers that depend only on (seed, step, sample, site): Philox 4x32-10 (Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC'11).
//
// draw: out is [samples, elements], row-major. Element e of sample s is word e % 4 of the block with
// counter (e / 4, first + s, site, step) and key seed; rng holds seed, step, first. A word gives a
// multiple of 2^-24 in [0, 1). Without -DMASK, this number is the element; with it, the element is a
// byte: whether the number is less than `keep`. Work-item g draws CHUNK blocks of one sample, SETS *
// LANES (1 or 16) at once: while a set waits for its last round, another set computes a round.

#if LANES == 1
#define SETS 1
#define UINT uint
#define STORE(value, at) (*(at) = (value))
#define IOTA 0u
#else
#define SETS 2
#define UINT uint16
#define STORE(value, at) vstore16(value, 0, at)
#define IOTA (uint16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#endif

#define UNIT 5.9604644775390625e-8f // 2^-24

#ifdef MASK
#define TYPE uchar
#define DRAWN(word) ((uchar)((word) >> 8 < limit))
#else
#define TYPE float
#define DRAWN(word) (convert_float((word) >> 8) * UNIT)
#endif

// The upper halves of the products. PoCL's mul_hi of vectors takes twice as long.
static inline UINT high_of_product(const UINT x, const uint factor)
{
#if LANES == 1
    return mul_hi(x, factor);
#else
    const ulong8 pairs = as_ulong8(x), even = (pairs & 0xFFFFFFFFul) * factor, odd = (pairs >> 32) * factor;
    return __builtin_shufflevector(as_uint16(even), as_uint16(odd), 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#endif
}

static inline void philox(UINT c[SETS][4], uint k0, uint k1)
{
#pragma unroll
    for (int round = 0; round < 10; ++round) {
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            UINT *w = c[set];
            const UINT high0 = high_of_product(w[0], 0xD2511F53u), low0 = w[0] * 0xD2511F53u;
            const UINT high1 = high_of_product(w[2], 0xCD9E8D57u), low1 = w[2] * 0xCD9E8D57u;
            w[0] = high1 ^ w[1] ^ k0;
            w[1] = low1;
            w[2] = high0 ^ w[3] ^ k1;
            w[3] = low0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// Stores LANES blocks of `row`, from `block` on; with `whole`, all their words are elements.
static inline void store_words(
    const UINT c[4], __global TYPE *row, const int block, const int elements, const bool whole, const uint limit)
{
    const int e = block * 4;
#ifdef MASK
    if (whole) {
        UINT bytes = (UINT)(0u);
        for (int word = 0; word < 4; ++word) {
            const UINT kept = ((c[word] >> 8u) - limit) >> 31u; // 1 where the difference is negative
            bytes |= kept << (UINT)(8u * word);
        }
        STORE(bytes, (__global uint *)(row + e));
        return;
    }
#endif
#if LANES == 1
#pragma unroll
    for (int word = 0; word < 4; ++word) // a constant index keeps the words in registers
        if (e + word < elements)
            row[e + word] = DRAWN(c[word]);
#else
    uint words[4 * LANES];
    for (int word = 0; word < 4; ++word)
        STORE(c[word], words + word * LANES);
    for (int i = 0; i < min(4 * LANES, elements - e); ++i)
        row[e + i] = DRAWN(words[i % 4 * LANES + i / 4]);
#endif
}

__kernel void draw(
    __global const long *rng, __global TYPE *out, const int site, const int elements,
    const int samples, const float keep)
{
    const int blocks = (elements + 3) / 4, chunks = (blocks + CHUNK - 1) / CHUNK;
    const int item = get_global_id(0); // divisions of 64 bits are slow
    const int sample = item / chunks;
    if (sample >= samples)
        return;
    const int first = item % chunks * CHUNK, last = min(first + CHUNK, blocks);
    const uint k0 = (uint)rng[0], k1 = (uint)(rng[0] >> 32);
    __global TYPE *row = out + sample * elements;
#ifdef MASK
    const uint limit = (uint)ceil(keep * 16777216.0f); // the same comparison with integers
#else
    const uint limit = 0;
#endif
    for (int block = first; block < last; block += SETS * LANES) {
        UINT c[SETS][4];
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            c[set][0] = (UINT)(block + set * LANES) + IOTA;
            c[set][1] = (UINT)((uint)rng[2] + sample);
            c[set][2] = (UINT)((uint)site);
            c[set][3] = (UINT)((uint)rng[1]);
        }
        philox(c, k0, k1);
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const int at = block + set * LANES;
            if (at < last)
                store_words(c[set], row, at, elements, elements % 4 == 0 && at + LANES <= last, limit);
        }
    }
}
