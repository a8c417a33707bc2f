// Copies of images and weights in the layouts that convolutions read.
//
//   x        row-major [N][C][H][W]
//   padded   [N][rows][cols][C]: channels last, inside a border of zeros
//   w        row-major weights
//   packed   [group][ceil(lanes / COLS)][kernel_h * kernel_w][depth][COLS]: weights by blocks of output channels (lanes)

#define COLS 32
#define NEXT_PIXEL         \
  if (++col == left + width) { \
    col = left;            \
    row++;                 \
  }

// Copies `band` rows and 16 channels of an image; images begin with `first_image`. An image begins at (top, left) of its copy.
// global size: blocks of 16 channels, bands of rows, N
WORK_ITEM __kernel void pad_channels_last(__global const float* restrict x, __global float* restrict padded,
                                          const int channels, const int height, const int width, const int rows,
                                          const int cols, const int top, const int left, const int band,
                                          const int first_image) {
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
  __global const float* in = x + ((first_image + image) * channels + c0) * height * width;
  int row = first / width + top, col = left;
  for (int p = first; p < last; p += LANES) {
    float tile[LANES * LANES];
    if (count >= LANES && p + LANES <= last) {
      for (int i = 0; i < LANES; i++) vstore16(vload16(0, in + i * height * width + p), i, tile);
      transpose16(tile);
      for (int i = 0; i < LANES; i++) {
        vstore16(vload16(i, tile), 0, out + (row * cols + col) * channels);
        NEXT_PIXEL;
      }
    } else {
      for (int i = 0; i < LANES; i++)
        vstore16(i < count ? load_upto(in + i * height * width + p, last - p) : (float16)(0.0f), i, tile);
      transpose16(tile);
      for (int i = 0; i < min(LANES, last - p); i++) {
        store_upto(vload16(i, tile), out + (row * cols + col) * channels, count);
        NEXT_PIXEL;
      }
    }
  }
}

// Copies weights w[group][lane * lane_stride + d * depth_stride + tap], `size` floats in all, into `packed`.
// global size: groups * blocks of COLS lanes, chunks of 16 d
WORK_ITEM __kernel void pack_weights(__global const float* restrict w, __global float* restrict packed,
                                     const int size, const int group_stride, const int lane_stride,
                                     const int depth_stride, const int lanes, const int blocks, const int depth,
                                     const int taps) {
  const int block = get_global_id(0), lane0 = block % blocks * COLS;
  const int d0 = get_global_id(1) * LANES, d1 = min(d0 + LANES, depth);
  const bool merged = depth_stride == taps;  // then (d, tap) is one contiguous run
  const int run = merged ? (d1 - d0) * taps : taps;
  const int first = block / blocks * group_stride + lane0 * lane_stride;
  packed += block * taps * depth * COLS;
  for (int base = 0; base < COLS; base += LANES) {
    for (int d = d0; d < d1; d += merged ? d1 - d0 : 1) {
      int row = d, tap = 0;
      for (int j = 0; j < run; j += LANES) {
        const int from = first + base * lane_stride + d * depth_stride + j;
        float tile[LANES * LANES];
        if (run == 1) {
          vstore16(load_strided(w + from, lane_stride, lanes - lane0 - base), 0, tile);
        } else {
          // Other weights follow the run. Reading these is harmless, and faster than a check.
          for (int i = 0; i < LANES; i++) {
            const int at = from + i * lane_stride;
            vstore16(lane0 + base + i < lanes ? load_upto(w + at, size - at) : (float16)(0.0f), i, tile);
          }
          transpose16(tile);
        }
        for (int i = 0; i < min(LANES, run - j); i++) {
          vstore16(vload16(i, tile), 0, packed + (tap * depth + row) * COLS + base);
          if (++tap == taps) {
            tap = 0;
            row++;
          }
        }
      }
    }
  }
}
