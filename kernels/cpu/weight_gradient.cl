// Gradients of a convolution's weights and bias on CPUs.
//
//   padded  [N][rows][cols][groups * depth]: x with channels last (layout.cl)
//   dy_last [N][rows][cols][groups * lanes]: dy with channels last
//   dw      row-major [groups * lanes][depth][kernel_h][kernel_w]
//
// DEPTH_TILE x COLS sums stay in registers while all pixels stream through, in order: deterministic.

#define COLS 32

// global size: tiles of DEPTH_TILE d, taps, groups * blocks
WORK_ITEM __kernel void weight_gradient(__global const float* restrict padded, __global const float* restrict dy_last,
                                        __global float* restrict dw, const int images, const int rows,
                                        const int cols, const int depth, const int lanes, const int groups,
                                        const int kernel_w, const int x_offset, const int x_image, const int x_row,
                                        const int x_col, const int tap_row, const int tap_col, const int dy_offset,
                                        const int dy_image, const int dy_row) {
  const int blocks = (lanes + COLS - 1) / COLS, block = get_global_id(2);
  const int group = block / blocks, lane0 = block % blocks * COLS, count = lanes - lane0;
  const int own_d = get_global_id(0) * DEPTH_TILE, d0 = min(own_d, depth - DEPTH_TILE);
  const int tap = get_global_id(1), taps = get_global_size(1);
  const int dy_pixel = groups * lanes;
  padded += x_offset + tap / kernel_w * tap_row + tap % kernel_w * tap_col + group * depth + d0;
  dy_last += dy_offset + group * lanes + lane0;
  float16 lo[DEPTH_TILE], hi[DEPTH_TILE];
#pragma unroll
  for (int m = 0; m < DEPTH_TILE; m++) lo[m] = hi[m] = (float16)(0.0f);
  for (int image = 0; image < images; image++) {
    for (int row = 0; row < rows; row++) {
      __global const float* x = padded + image * x_image + row * x_row;
      __global const float* dy = dy_last + image * dy_image + row * dy_row;
      for (int col = 0; col < cols; col++) {
        const float16 dy_lo = load_upto(dy, count), dy_hi = load_upto(dy + LANES, count - LANES);
#pragma unroll
        for (int m = 0; m < DEPTH_TILE; m++) {
          lo[m] = fma((float16)(x[m]), dy_lo, lo[m]);
          hi[m] = fma((float16)(x[m]), dy_hi, hi[m]);
        }
        x += x_col;
        dy += dy_pixel;
      }
    }
  }
  float16 sums[DEPTH_TILE][2];
#pragma unroll
  for (int m = 0; m < DEPTH_TILE; m++) {
    sums[m][0] = lo[m];
    sums[m][1] = hi[m];
  }
  for (int m = own_d - d0; m < DEPTH_TILE; m++) {
    __global float* out = dw + ((group * lanes + lane0) * depth + d0 + m) * taps + tap;
    store_strided(sums[m][0], out, depth * taps, count);
    store_strided(sums[m][1], out + LANES * depth * taps, depth * taps, count - LANES);
  }
}

// db[c] = sum of dy over images and pixels. Global size: C
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
