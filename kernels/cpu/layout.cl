// Copies that convolutions work on.
//
//   x        row-major [N][C][H][W]
//   padded   [N][rows][cols][C]: channels last, inside a border of zeros
//   w        row-major weights
//   packed   [group][ceil(lanes / COLS)][taps_h][taps_w][depth][COLS]: weights by blocks of output channels (lanes)

#define COLS 32

// `band` rows of one image, 16 channels. (top, left) is where the image starts in the copy.
// global size: blocks of 16 channels, bands of rows, N
WORK_ITEM __kernel void pad_channels_last(__global const float* restrict x, __global float* restrict padded,
                                          const int channels, const int height, const int width, const int rows,
                                          const int cols, const int top, const int left, const int band) {
  const int c0 = get_global_id(0) * LANES, image = get_global_id(2);
  const int row0 = get_global_id(1) * band, row1 = min(row0 + band, rows);
  const int count = channels - c0;
  __global float* out = padded + image * rows * cols * channels + c0;
  for (int row = row0; row < row1; row++) {
    const bool inside = row >= top && row < top + height;
    for (int col = 0; col < cols; col++)
      if (!inside || col < left || col >= left + width)
        store_upto((float16)(0.0f), out + (row * cols + col) * channels, count);
  }
  const int first = max(row0 - top, 0) * width, last = min(row1 - top, height) * width;
  __global const float* in = x + (image * channels + c0) * height * width;
  int row = first / width + top, col = left;
  for (int p = first; p < last; p += LANES) {
    float16 r[LANES];
#pragma unroll
    for (int i = 0; i < LANES; i++)
      r[i] = i < count ? load_upto(in + i * height * width + p, last - p) : (float16)(0.0f);
    transpose16(r);
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      if (p + i < last && col < cols) store_upto(r[i], out + (row * cols + col) * channels, count);
      if (++col == left + width) {
        col = left;
        row++;
      }
    }
  }
}

// Position of kernel index `k` among taps first, first + step, ... (`taps` of them), or -1.
inline int tap_of(const int k, const int first, const int step, const int taps) {
  const int distance = step > 0 ? k - first : first - k;
  const int tap = abs(step) == 1 ? distance : distance / abs(step);
  return distance >= 0 && tap < taps && tap * abs(step) == distance ? tap : -1;
}

// Weights w[lane * lane_stride + d * depth_stride + kh * kernel_w + kw] of one group into `packed`.
// global size: groups * blocks of COLS lanes, chunks of 16 d
WORK_ITEM __kernel void pack_weights(__global const float* restrict w, __global float* restrict packed,
                                     const int group_stride, const int lane_stride, const int depth_stride,
                                     const int lanes, const int blocks, const int depth, const int kernel_h,
                                     const int kernel_w, const int first_h, const int step_h, const int taps_h,
                                     const int first_w, const int step_w, const int taps_w) {
  const int block = get_global_id(0), lane0 = block % blocks * COLS;
  const int d0 = get_global_id(1) * LANES, d1 = min(d0 + LANES, depth);
  const int kernel_size = kernel_h * kernel_w;
  const bool merged = depth_stride == kernel_size;  // then (d, kh, kw) is one contiguous run
  const int run = merged ? (d1 - d0) * kernel_size : kernel_size;
  w += block / blocks * group_stride + lane0 * lane_stride;
  packed += block * taps_h * taps_w * depth * COLS;
  for (int base = 0; base < COLS; base += LANES) {
    for (int d = d0; d < d1; d += merged ? d1 - d0 : 1) {
      int at = d, kh = 0, kw = 0;
      for (int j = 0; j < run; j += LANES) {
        float16 r[LANES];
        __global const float* from = w + base * lane_stride + d * depth_stride + j;
        if (run == 1) {
          r[0] = load_strided(from, lane_stride, lanes - lane0 - base);
        } else {
#pragma unroll
          for (int i = 0; i < LANES; i++)
            r[i] = lane0 + base + i < lanes ? load_upto(from + i * lane_stride, run - j) : (float16)(0.0f);
          transpose16(r);
        }
#pragma unroll
        for (int i = 0; i < LANES; i++) {
          if (j + i < run) {
            const int th = tap_of(kh, first_h, step_h, taps_h), tw = tap_of(kw, first_w, step_w, taps_w);
            if (th >= 0 && tw >= 0)
              vstore16(r[i], 0, packed + ((th * taps_w + tw) * depth + at) * COLS + base);
            if (++kw == kernel_w) {
              kw = 0;
              if (++kh == kernel_h) {
                kh = 0;
                at++;
              }
            }
          }
        }
      }
    }
  }
}
