// 3x3 convolution of stride 1 by minimal filtering, F(4x4, 3x3), on CPUs: 36 products for 16 outputs in place of 144.
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016).
//
//   padded   [N][rows][cols][depth]           x with channels last, with a border (layout.cl); tiles of 6x6 every 4 pixels
//   packed   [block][9][depth][COLS]          weights by blocks of output channels (layout.cl)
//   weights  [36][block][depth][COLS]         transformed
//   inputs   [36][tiles][depth_stride]        transformed, of the tile rows that are in work
//   products [tiles][36][lane_stride]         inputs times weights
//   y        row-major [N][lanes][height][width]
//
// A tile row is the tiles side by side in one image; tile rows are counted through all images.

#define COLS 32
#define ROWS 12
#define POINTS 36
#define GROUP 4  // neighbouring tiles that are stored together

// Interpolation at 0, +-R, +-2R and infinity.
#define R 0.70710678118654752f

// B^T d of one row or column.
inline void transform_input(const float16 d0, const float16 d1, const float16 d2, const float16 d3, const float16 d4,
                            const float16 d5, float16* out, const int step) {
  const float16 even_1 = d4 - 2.0f * d2, odd_1 = d3 - 2.0f * d1;
  const float16 even_2 = d4 - 0.5f * d2, odd_2 = d3 - 0.5f * d1;
  out[0] = d0 - 2.5f * d2 + d4;
  out[step] = even_1 + R * odd_1;
  out[2 * step] = even_1 - R * odd_1;
  out[3 * step] = even_2 + 2 * R * odd_2;
  out[4 * step] = even_2 - 2 * R * odd_2;
  out[5 * step] = d1 - 2.5f * d3 + d5;
}

// G g.
inline void transform_weights(const float16 g0, const float16 g1, const float16 g2, float16* out, const int step) {
  const float16 even_1 = (g0 + 0.5f * g2) * (-2.0f / 3.0f), odd_1 = g1 * (-2.0f / 3.0f * R);
  const float16 even_2 = (g0 + 2.0f * g2) * (1.0f / 6.0f), odd_2 = g1 * (R / 3.0f);
  out[0] = g0;
  out[step] = even_1 + odd_1;
  out[2 * step] = even_1 - odd_1;
  out[3 * step] = even_2 + odd_2;
  out[4 * step] = even_2 - odd_2;
  out[5 * step] = g2;
}

// A^T m.
inline void transform_output(const float16 m0, const float16 m1, const float16 m2, const float16 m3, const float16 m4,
                             const float16 m5, float16* out, const int step) {
  const float16 sum_1 = m1 + m2, difference_1 = m1 - m2;
  const float16 sum_2 = m3 + m4, difference_2 = m3 - m4;
  out[0] = m0 + sum_1 + sum_2;
  out[step] = R * difference_1 + 2 * R * difference_2;
  out[2 * step] = 0.5f * sum_1 + 2.0f * sum_2;
  out[3 * step] = 0.5f * R * difference_1 + (4 * R * difference_2 + m5);
}

// Tap (i, j) of the convolution is at first + i * step_h + j * step_w of the kernel. global size: blocks, chunks of 16 d
WORK_ITEM __kernel void winograd_weights(__global const float* restrict packed, __global float* restrict weights,
                                         const int depth, const int first, const int step_h, const int step_w) {
  const int block = get_global_id(0), d0 = get_global_id(1) * LANES, d1 = min(d0 + LANES, depth);
  const int point = (int)get_global_size(0) * depth * COLS, tap = depth * COLS;
  packed += block * 9 * tap + first * tap;
  weights += block * tap;
  for (int at = d0 * COLS; at < d1 * COLS; at += LANES) {
    float16 columns[18];
#pragma unroll
    for (int j = 0; j < 3; j++) {
      __global const float* w = packed + j * step_w * tap + at;
      transform_weights(vload16(0, w), vload16(0, w + step_h * tap), vload16(0, w + 2 * step_h * tap), columns + j, 3);
    }
#pragma unroll
    for (int i = 0; i < 6; i++) {
      float16 row[6];
      transform_weights(columns[3 * i], columns[3 * i + 1], columns[3 * i + 2], row, 1);
#pragma unroll
      for (int j = 0; j < 6; j++) vstore16(row[j], 0, weights + (6 * i + j) * point + at);
    }
  }
}

// global size: tile rows in work, chunks of CHANNELS
#define CHANNELS 64
WORK_ITEM __kernel void winograd_input(__global const float* restrict padded, __global float* restrict inputs,
                                       const int x_offset, const int x_image, const int x_row, const int depth,
                                       const int first_row, const int tile_rows, const int tile_cols,
                                       const int depth_stride) {
  const int own_row = get_global_id(0), row = first_row + own_row;
  const int c0 = get_global_id(1) * CHANNELS, c1 = min(c0 + CHANNELS, depth);
  const int point = (int)get_global_size(0) * tile_cols * depth_stride;
  padded += x_offset + row / tile_rows * x_image + row % tile_rows * 4 * x_row;
  inputs += own_row * tile_cols * depth_stride;
  for (int tile = 0; tile < tile_cols; tile++) {
    for (int c = c0; c < c1; c += LANES) {
      float16 columns[POINTS];
#pragma unroll
      for (int j = 0; j < 6; j++) {
        __global const float* x = padded + j * depth + c;
        const int count = depth - c;
        transform_input(load_upto(x, count), load_upto(x + x_row, count), load_upto(x + 2 * x_row, count),
                        load_upto(x + 3 * x_row, count), load_upto(x + 4 * x_row, count),
                        load_upto(x + 5 * x_row, count), columns + j, 6);
      }
#pragma unroll
      for (int i = 0; i < 6; i++) {
        float16 out[6];
        transform_input(columns[6 * i], columns[6 * i + 1], columns[6 * i + 2], columns[6 * i + 3], columns[6 * i + 4],
                        columns[6 * i + 5], out, 1);
#pragma unroll
        for (int j = 0; j < 6; j++) vstore16(out[j], 0, inputs + (6 * i + j) * point + c);
      }
    }
    padded += 4 * depth;
    inputs += depth_stride;
  }
}

// ROWS x COLS sums stay in registers. global size: blocks, POINTS
WORK_ITEM __kernel void winograd_multiply(__global const float* restrict inputs, __global const float* restrict weights,
                                          __global float* restrict products, const int tiles, const int depth,
                                          const int depth_stride, const int lane_stride) {
  const int block = get_global_id(0), point = get_global_id(1);
  weights += (point * (int)get_global_size(0) + block) * depth * COLS;
  inputs += point * tiles * depth_stride;
  products += point * lane_stride + block * COLS;
  for (int own = 0; own < tiles; own += ROWS) {
    const int tile = min(own, tiles - ROWS);
    __global const float* a = inputs + tile * depth_stride;
    __global const float* b = weights;
    float16 lo[ROWS], hi[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = (float16)(0.0f);
    for (int k = 0; k < depth; k++) {
      const float16 b_lo = vload16(0, b), b_hi = vload16(1, b);
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        const float value = a[m * depth_stride + k];
        lo[m] = fma((float16)(value), b_lo, lo[m]);
        hi[m] = fma((float16)(value), b_hi, hi[m]);
      }
      b += COLS;
    }
    __global float* out = products + tile * POINTS * lane_stride;
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      vstore16(lo[m], 0, out + m * POINTS * lane_stride);
      vstore16(hi[m], 1, out + m * POINTS * lane_stride);
    }
  }
}

// The first `count` lanes, in fours.
inline void store_quads(const float16 value, __global float* p, const int count) {
  if (count >= LANES) {
    vstore16(value, 0, p);
  } else {
    float lane[LANES];
    vstore16(value, 0, lane);
    int i = 0;
    for (; i + 4 <= count; i += 4) vstore4(vload4(0, lane + i), 0, p + i);
    for (; i < count; i++) p[i] = lane[i];
  }
}

// global size: tile rows in work, chunks of 16 lanes
WORK_ITEM __kernel void winograd_output(__global const float* restrict products, __global const float* restrict bias,
                                        const int has_bias, __global float* restrict y, const int first_row,
                                        const int tile_rows, const int tile_cols, const int lanes,
                                        const int lane_stride, const int height, const int width) {
  const int own_row = get_global_id(0), row = first_row + own_row, h = row % tile_rows * 4;
  const int c0 = get_global_id(1) * LANES, channels = min(lanes - c0, LANES), rows = min(height - h, 4);
  const float16 shift = has_bias ? load_upto(bias + c0, channels) : (float16)(0.0f);
  products += own_row * tile_cols * POINTS * lane_stride + c0;
  y += (row / tile_rows * lanes + c0) * height * width + h * width;
  float stage[LANES * 4 * GROUP * 4];  // [channel][row][column]
  for (int tile = 0; tile < tile_cols; tile += GROUP) {
    for (int side = 0; side < min(GROUP, tile_cols - tile); side++) {
      float16 columns[24], pixels[LANES];
#pragma unroll
      for (int j = 0; j < 6; j++) {
        __global const float* m = products + j * lane_stride;
        const int down = 6 * lane_stride;
        transform_output(vload16(0, m), vload16(0, m + down), vload16(0, m + 2 * down), vload16(0, m + 3 * down),
                         vload16(0, m + 4 * down), vload16(0, m + 5 * down), columns + j, 6);
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
        transform_output(columns[6 * i], columns[6 * i + 1], columns[6 * i + 2], columns[6 * i + 3],
                         columns[6 * i + 4], columns[6 * i + 5], pixels + 4 * i, 1);
#pragma unroll
      for (int p = 0; p < LANES; p++) pixels[p] += shift;
      transpose_rows(pixels);
#pragma unroll
      for (int c = 0; c < LANES; c++) {
        float* at = stage + c * 64 + side * 4;
        vstore4(pixels[c].lo.lo, 0, at);
        vstore4(pixels[c].lo.hi, 0, at + 16);
        vstore4(pixels[c].hi.lo, 0, at + 32);
        vstore4(pixels[c].hi.hi, 0, at + 48);
      }
      products += POINTS * lane_stride;
    }
    const int w = tile * 4, count = min(width - w, GROUP * 4);
    for (int c = 0; c < channels; c++)
      for (int i = 0; i < rows; i++)
        store_quads(vload16(c * 4 + i, stage), y + (c * height + i) * width + w, count);
  }
}
