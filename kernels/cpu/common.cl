// Shared by the CPU kernels; prepended to each of them.
//
// Pattern of all CPU kernels: one work-item is a work-group and computes a whole tile or run of memory with
// float16 registers. So every runtime vectorises a kernel in the same way, and no barrier is needed.

#define WORK_ITEM __attribute__((reqd_work_group_size(1, 1, 1)))
#define LANES 16

// Prefetches the cache line at `p` for writing. OpenCL's prefetch does nothing on PoCL. Interpreters lack the builtin, and
// some runtimes end the process when they compile it.
#ifdef NO_PREFETCH
#define PREFETCH_WRITE(p)
#else
#define PREFETCH_WRITE(p) __builtin_prefetch((const void*)(size_t)(p), 1, 3)
#endif

// Writes a whole cache line to memory past the caches, for results that are too large for the caches. So the line is not read
// first. `p` is the start of a line.
#define STORE_PAST_CACHES(value, p) __builtin_nontemporal_store(value, (__global float16*)(p))

// The first `count` floats at `p`, then zeros; reads only these floats.
inline float16 load_upto(__global const float* p, const int count) {
  if (count >= LANES) return vload16(0, p);
  float lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = i < count ? p[i] : 0.0f;
  return vload16(0, lane);
}

// `count` floats (at most 16) that are `stride` apart, then zeros.
inline float16 load_strided(__global const float* p, const int stride, const int count) {
  if (stride == 1) return load_upto(p, count);
  float lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = i < count ? p[i * stride] : 0.0f;
  return vload16(0, lane);
}

// Writes the first `count` lanes.
inline void store_upto(const float16 value, __global float* p, const int count) {
  if (count >= LANES) {
    vstore16(value, 0, p);
  } else {
    float lane[LANES];
    vstore16(value, 0, lane);
    for (int i = 0; i < count; i++) p[i] = lane[i];
  }
}

// Writes the first `count` lanes `stride` floats apart.
inline void store_strided(const float16 value, __global float* p, const int stride, const int count) {
  if (stride == 1) {
    store_upto(value, p, count);
  } else {
    float lane[LANES];
    vstore16(value, 0, lane);
    for (int i = 0; i < min(count, LANES); i++) p[i * stride] = lane[i];
  }
}

inline float sum_lanes(const float16 v) {
  const float8 a = v.lo + v.hi;
  const float4 b = a.lo + a.hi;
  const float2 c = b.lo + b.hi;
  return c.lo + c.hi;
}

inline float max_lanes(const float16 v) {
  const float8 a = fmax(v.lo, v.hi);
  const float4 b = fmax(a.lo, a.hi);
  const float2 c = fmax(b.lo, b.hi);
  return fmax(c.lo, c.hi);
}

// Two rows with their lanes interleaved: the first halves of both, or their second halves.
#define INTERLEAVED(a, b, at)                                                                            \
  __builtin_shufflevector(a, b, at, at + 16, at + 1, at + 17, at + 2, at + 18, at + 3, at + 19, at + 4, at + 20, \
                          at + 5, at + 21, at + 6, at + 22, at + 7, at + 23)

// Transposes a 16 x 16 tile in registers: four rounds of a perfect shuffle of its rows.
// (OpenCL's .even and .odd give the same code, but compiling takes 50 % longer.)
inline void transpose_rows(float16* r) {
#pragma unroll
  for (int round = 0; round < 4; round++) {
    float16 t[LANES];
#pragma unroll
    for (int i = 0; i < LANES / 2; i++) {
      t[2 * i] = INTERLEAVED(r[i], r[i + LANES / 2], 0);
      t[2 * i + 1] = INTERLEAVED(r[i], r[i + LANES / 2], 8);
    }
#pragma unroll
    for (int i = 0; i < LANES; i++) r[i] = t[i];
  }
}

// Transposes a tile in memory, for callers with edges: their loops over rows need no unrolling, so the code stays small.
inline void transpose16(float* tile) {
  float16 r[LANES];
#pragma unroll
  for (int i = 0; i < LANES; i++) r[i] = vload16(i, tile);
  transpose_rows(r);
#pragma unroll
  for (int i = 0; i < LANES; i++) vstore16(r[i], i, tile);
}
