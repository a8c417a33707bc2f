// Gradient of a bias on CPUs: sums over images and pixels.
//
//   dy  row-major [N][C][P] (P pixels)   db  [C]

// Global size: C
WORK_ITEM __kernel void bias_gradient(__global const float* restrict dy, __global float* restrict db,
                                      const int images, const int channels, const int pixels) {
  const int c = get_global_id(0);
  float16 sum = (float16)(0.0f);
  for (int image = 0; image < images; image++) {
    __global const float* run = dy + (image * channels + c) * pixels;
    for (int p = 0; p < pixels; p += LANES) sum += load_upto(run + p, pixels - p);
  }
  db[c] = sum_lanes(sum);
}
