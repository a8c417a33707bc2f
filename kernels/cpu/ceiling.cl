// fma_ceiling: the highest rate of multiply-adds of a core, by 12 independent chains of float16 in registers.
//   out  [work-items][16]; each work-item does repeats * CHAINS * 16 multiply-adds
// nothing: a launch without any work, to measure its cost

#define CHAINS 12

WORK_ITEM __kernel void fma_ceiling(__global float* out, const int repeats) {
  const float16 start = (float16)(get_global_id(0) * 1e-9f + 1.0f), x = (float16)(0.999999f), y = (float16)(1e-7f);
  float16 chain[CHAINS];
#pragma unroll
  for (int j = 0; j < CHAINS; j++) chain[j] = start + j;
  for (int i = 0; i < repeats; i++) {
#pragma unroll
    for (int j = 0; j < CHAINS; j++) chain[j] = fma(chain[j], x, y);
  }
  float16 sum = chain[0];
#pragma unroll
  for (int j = 1; j < CHAINS; j++) sum += chain[j];
  vstore16(sum, get_global_id(0), out);
}

__kernel void nothing(void) {}
