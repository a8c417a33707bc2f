// Gradient of a convolution's weights on CPUs.
//
//   padded  [N][rows][cols][groups * depth]: x with channels last (layout.cl)
//   dy_last [N][rows][cols][groups * lanes]: dy with channels last
//   dw      row-major [groups * lanes][depth][kernel_h][kernel_w]
//
// DEPTH_TILE x TAP_TILE x COLS sums stay in registers while all pixels stream through, in order: deterministic.
// TAP_TILE neighbours of a kernel's row share the loads of dy.

#define COLS 32
#define SUMS (DEPTH_TILE * TAP_TILE)

// global size: tiles of DEPTH_TILE d, tiles of TAP_TILE taps, groups * blocks
WORK_ITEM __kernel void weight_gradient(__global const float* restrict padded, __global const float* restrict dy_last,
                                        __global float* restrict dw, const int images, const int rows,
                                        const int cols, const int depth, const int lanes, const int groups,
                                        const int kernel_h, const int kernel_w, const int x_offset, const int x_image, const int x_row,
                                        const int x_col, const int tap_row, const int tap_col, const int first_row,
                                        const int row_step, const int tap_step, const int height,
                                        const int dy_offset, const int dy_image, const int dy_row) {
  const int blocks = (lanes + COLS - 1) / COLS, block = get_global_id(2);
  const int group = block / blocks, lane0 = block % blocks * COLS, count = lanes - lane0;
  const int own_d = get_global_id(0) * DEPTH_TILE, d0 = min(own_d, depth - DEPTH_TILE);
  const int tap = get_global_id(1) * TAP_TILE, taps = kernel_h * kernel_w;
  const int dy_pixel = groups * lanes;
  padded += x_offset + tap / kernel_w * tap_row + tap % kernel_w * tap_col + group * depth + d0;
  dy_last += dy_offset + group * lanes + lane0;
  float16 lo[SUMS], hi[SUMS];
#pragma unroll
  for (int m = 0; m < SUMS; m++) lo[m] = hi[m] = (float16)(0.0f);
  for (int image = 0; image < images; image++) {
    for (int row = 0; row < rows; row++) {
      const int input_row = first_row + row * row_step + tap / kernel_w * tap_step;
      if (input_row < 0 || input_row >= height) continue;  // on the border all is zero
      __global const float* x = padded + image * x_image + row * x_row;
      __global const float* dy = dy_last + image * dy_image + row * dy_row;
      for (int col = 0; col < cols; col++) {
        const float16 dy_lo = load_upto(dy, count), dy_hi = load_upto(dy + LANES, count - LANES);
#pragma unroll
        for (int m = 0; m < SUMS; m++) {
          const float value = x[m / DEPTH_TILE * tap_col + m % DEPTH_TILE];
          lo[m] = fma((float16)(value), dy_lo, lo[m]);
          hi[m] = fma((float16)(value), dy_hi, hi[m]);
        }
        x += x_col;
        dy += dy_pixel;
      }
    }
  }
  float16 sums[SUMS][2];
#pragma unroll
  for (int m = 0; m < SUMS; m++) {
    sums[m][0] = lo[m];
    sums[m][1] = hi[m];
  }
  for (int m = 0; m < SUMS; m++) {
    const int d = d0 + m % DEPTH_TILE;
    if (d < own_d) continue;  // another work-item's
    __global float* out = dw + ((group * lanes + lane0) * depth + d) * taps + tap + m / DEPTH_TILE;
    store_strided(sums[m][0], out, depth * taps, count);
    store_strided(sums[m][1], out + LANES * depth * taps, depth * taps, count - LANES);
  }
}
